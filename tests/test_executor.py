"""FluidExecutor on the local backend: real processes, no sleeps but those of the trials."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.hosts.forkserver.host_end import ForkServerProcess
from fluid.backends.local import LocalBackend
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor, executor_in_force, submit_trialgroup
from fluid.lane.protocol import LaneOptions
from fluid.reports.run.loader import load_run
from fluid.resources import Device
from fluid.results.records import Result
from fluid.session.listeners import TrialFailedError, TrialListener
from fluid.trialgroup import Search, Shown, Trial, TrialGroup

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


def count_up(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reports 1, 2, 3, ... for ever, with its process and an optional pause."""
    step = 0
    while True:
        step += 1
        if config.get("seconds"):
            time.sleep(config["seconds"])
        yield {"step": step, "pid": os.getpid()}


class Counter:
    """The same, and it can be saved."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps, self.pids = config, 0, [os.getpid()]

    def step(self) -> dict[str, Any]:
        if self.config.get("seconds"):
            time.sleep(self.config["seconds"])
        if self.steps + 1 == self.config.get("fails_at"):
            raise RuntimeError("the loss is NaN")
        self.steps += 1
        return {"step": self.steps, "pid": os.getpid(), "lives": len(self.pids)}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "state.json").write_text(json.dumps({"steps": self.steps, "pids": self.pids}))

    def load_checkpoint(self, folder: str) -> None:
        state = json.loads((Path(folder) / "state.json").read_text())
        self.steps, self.pids = state["steps"], [*state["pids"], os.getpid()]

    def cleanup(self) -> None:
        pass


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FluidExecutor]]:
    """Makes executors of two devices, and closes them."""
    made: list[FluidExecutor] = []

    def make(**options: Any) -> FluidExecutor:
        options = {"backend": "local", "devices": 2, "run_dir": tmp_path / f"run-{len(made)}", "verbose": 0, **options}
        made.append(FluidExecutor(**options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def iterations(results: list[Result], trial_id: str) -> list[int]:
    return [result.iteration for result in results if result.trial_id == trial_id]


def first(results: Iterator[Result], wanted: Callable[[Result], bool]) -> Result:
    return next(result for result in results if wanted(result))


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [count_up, Counter])
def test_every_iteration_is_reported_once_and_in_order(make: Callable[..., FluidExecutor], trainable: Any) -> None:
    trials = [Trial(trainable, {"x": x}, budget=1 + x, trial_id=f"t{x}") for x in range(6)]
    handle = make().submit_trialgroup(TrialGroup(trials, name="rung-0"))
    results = list(handle.results())
    for x in range(6):
        assert iterations(results, f"t{x}") == list(range(1, 2 + x))
    assert handle.states == {f"t{x}": "DONE" for x in range(6)}
    assert all(r.config["x"] == int(r.trial_id[1:]) and r.metrics["step"] == r.iteration for r in results)
    assert all(r.width == 1.0 and len(r.device_ids) == 1 and r.seconds >= 0.0 for r in results)
    assert {r.device_ids for r in results} == {(0,), (1,)}
    assert handle.done and handle.wait(0) and handle.name == "rung-0"
    assert handle.makespan is not None and handle.makespan > 0.0
    assert handle.eta == 0.0
    assert list(handle.results()) == results, "a second reader begins at the first result"


@pytest.mark.slow
def test_a_stopped_trial_ends_and_the_others_go_on(make: Callable[..., FluidExecutor]) -> None:
    endless = Trial(count_up, {"seconds": 0.01}, budget=10**6, trial_id="endless")
    handle = make().submit_trialgroup(TrialGroup([endless, Trial(count_up, budget=5, trial_id="short")]))
    first(handle.results(), lambda result: result.trial_id == "endless")
    assert not handle.wait(0.0)
    handle.stop("endless")
    handle.stop("endless")
    assert handle.wait(PATIENCE)
    assert handle.states == {"endless": "STOPPED", "short": "DONE"}
    with pytest.raises(InvalidFieldError, match="endless"):
        handle.extend("endless", 1)


def test_an_extended_trial_goes_on_where_it_was(make: Callable[..., FluidExecutor]) -> None:
    handle = make().submit_trialgroup(TrialGroup([Trial(count_up, budget=3, trial_id="a", follow_up_iterations=2)]))
    assert handle.wait(PATIENCE)
    handle.extend("a", by=2)
    assert handle.wait(PATIENCE)
    results = list(handle.results())
    assert [result.metrics["step"] for result in results] == [1, 2, 3, 4, 5]
    assert len({result.metrics["pid"] for result in results}) == 1, "it stayed resident"
    with pytest.raises(InvalidFieldError, match="by=0"):
        handle.extend("a", 0)
    with pytest.raises(InvalidFieldError, match="unknown"):
        handle.extend("b", 1)


@pytest.mark.slow
def test_a_trial_can_be_added_and_a_second_group_runs_beside(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    one = executor.submit_trialgroup(TrialGroup([Trial(Counter, {"seconds": 0.02}, budget=50, trial_id="a")]))
    two = executor.submit_trialgroup(TrialGroup([Trial(Counter, budget=2, trial_id="b")]))
    assert two.wait(PATIENCE) and not one.done
    one.add(Trial(Counter, budget=2, trial_id="c"))
    assert one.wait(PATIENCE)
    assert one.states == {"a": "DONE", "c": "DONE"} and two.states == {"b": "DONE"}
    assert executor.handles == [one, two]


@pytest.mark.slow
def test_trials_are_added_together_or_not_at_all(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    handle = executor.submit_trialgroup(TrialGroup([Trial(count_up, trial_id="a")]))
    others = [Trial(count_up, trial_id=name) for name in "bc"]
    with pytest.raises(InvalidFieldError, match="trial_id='a'"):
        handle.add(*others, Trial(count_up, trial_id="a"))
    assert executor.submit_trialgroup(TrialGroup([Trial(count_up, trial_id="d")])).wait(PATIENCE)
    with pytest.raises(InvalidFieldError, match="trial_id='d'"):
        handle.add(*others, Trial(count_up, trial_id="d"))
    handle.add()
    handle.add(*others)
    assert handle.wait(PATIENCE)
    assert handle.states == dict.fromkeys("abc", "DONE")


@pytest.mark.slow
def test_what_a_search_decided_is_told_by_the_report(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    shown = [Trial(count_up, {"seconds": 0}, trial_id=f"t{k}", shown=Shown(f"trial {k}", {"k": k})) for k in range(3)]
    handle = executor.submit_trialgroup(TrialGroup(shown, name="sweep", search=Search("step", "max", 3, extends=True)))
    assert handle.wait(PATIENCE)
    assert executor.status().groups[0].trials == {"PAUSED": 3}
    handle.stop("t0", "DONE")
    handle.stop("t1", "STOPPED")
    handle.forget("t0")
    assert executor.status().groups[0].trials == {"DONE": 1, "STOPPED": 1, "PAUSED": 1}
    with pytest.raises(InvalidFieldError, match="outcome='gone'"):
        handle.stop("t2", "gone")
    executor.close()
    run = load_run(executor.run_dir)
    assert [(trial.trial_id, trial.state, trial.config) for trial in run.trials] == [
        ("trial 0", "DONE", {"k": 0}),
        ("trial 1", "STOPPED", {"k": 1}),
        ("trial 2", "PAUSED", {"k": 2}),
    ]
    assert (run.name, run.metrics[0]) == ("sweep", "step")


@pytest.mark.slow
def test_ended_trials_of_a_group_with_a_metric_are_done(make: Callable[..., FluidExecutor]) -> None:
    trials = [Trial(count_up, {"seconds": 0}, trial_id=f"t{k}") for k in range(2)]
    handle = make().submit_trialgroup(TrialGroup(trials, search=Search("step", "max")))
    assert handle.wait(PATIENCE)
    assert [trial.state for trial in handle.trials] == ["DONE", "DONE"]


@pytest.mark.slow
def test_a_trial_that_raises_is_tried_again_then_fails_alone(make: Callable[..., FluidExecutor]) -> None:
    bad = Trial(Counter, {"fails_at": 2}, budget=3, trial_id="bad")
    handle = make(max_failures=2).submit_trialgroup(TrialGroup([bad, Trial(Counter, budget=3, trial_id="good")]))
    assert handle.wait(PATIENCE)
    assert handle.states == {"bad": "FAILED", "good": "DONE"}
    failure = handle.failures["bad"]
    assert failure.kind == "error" and "the loss is NaN" in failure.message
    assert "raise RuntimeError" in failure.traceback
    assert iterations(list(handle.results()), "bad") == [1], "what is done again is not reported again"
    with pytest.raises(TrialFailedError, match="the loss is NaN"):
        handle.raise_failures()


@pytest.mark.slow
def test_a_lane_killed_in_an_iteration_costs_its_trial_only_that(make: Callable[..., FluidExecutor]) -> None:
    trials = [Trial(Counter, {"seconds": 0.25}, budget=12, trial_id=name) for name in ("victim", "other")]
    handle = make().submit_trialgroup(TrialGroup(trials))
    results = handle.results()
    seen = first(results, lambda result: result.trial_id == "victim" and result.iteration == 6)
    os.kill(seen.metrics["pid"], signal.SIGKILL)
    assert handle.wait(PATIENCE)
    everything = list(handle.results())
    assert handle.states == {"victim": "DONE", "other": "DONE"}
    for name in ("victim", "other"):
        assert iterations(everything, name) == list(range(1, 13))
    last = {result.trial_id: result.metrics for result in everything}
    assert last["victim"]["lives"] == 2, "it went on from a checkpoint"
    assert last["other"]["lives"] == 1, "the other never noticed"


def test_bad_input_is_refused_at_the_call_and_disturbs_nothing(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    handle = executor.submit_trialgroup(TrialGroup([Trial(count_up, {"seconds": 0.01}, budget=10, trial_id="a")]))
    with pytest.raises(InvalidFieldError, match=r"trial_id='a'"):
        executor.submit_trialgroup(TrialGroup([Trial(count_up, trial_id="b"), Trial(count_up, trial_id="a")]))
    with pytest.raises(InvalidFieldError, match="config"):
        executor.submit_trialgroup(TrialGroup([Trial(count_up, {"lock": __import__("threading").Lock()})]))
    with pytest.raises(InvalidFieldError, match="trainable"):
        executor.submit_trialgroup(TrialGroup([Trial("resnet", {})]))
    with pytest.raises(InvalidFieldError, match="group"):
        executor.submit_trialgroup(TrialGroup())
    with pytest.raises(InvalidFieldError, match="timeout"):
        handle.wait(-1.0)
    assert handle.wait(PATIENCE) and handle.states == {"a": "DONE"}
    assert len(executor.handles) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            ("backend", "slurm"),
            ("planner", "magic"),
            ("packing", "yes"),
            ("lane_policy", "longest"),
            ("devices", 0),
            ("max_packing", 0),
        ),
        *(("max_width", -1), ("max_failures", -1), ("max_fused", 0), ("max_fused", 2.5), ("max_fused", True)),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=option):
        FluidExecutor(**{"backend": "local", "run_dir": tmp_path, "verbose": 0, option: value})


@pytest.mark.slow
def test_a_device_removed_and_one_added_while_trials_run(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    trials = [Trial(Counter, {"seconds": 0.05}, budget=30, trial_id=f"t{x}") for x in range(2)]
    handle = executor.submit_trialgroup(TrialGroup(trials))
    first(handle.results(), lambda result: result.device_ids == (1,))
    executor.remove_device(1)
    assert [device.index for device in executor.devices] == [0]
    executor.add_device(Device(2, kind="cpu"))
    assert handle.wait(PATIENCE)
    results = list(handle.results())
    for x in range(2):
        assert iterations(results, f"t{x}") == list(range(1, 31))
    assert {result.device_ids for result in results} >= {(0,), (1,), (2,)}


def test_closing_leaves_no_process_and_wakes_waiters(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    handle = executor.submit_trialgroup(TrialGroup([Trial(count_up, {"seconds": 0.01}, budget=10**6)]))
    pid = next(handle.results()).metrics["pid"]
    executor.close()
    executor.close()
    assert not Path(f"/proc/{pid}").exists() or _is_zombie(pid)
    with pytest.raises(FluidError, match="closed"):
        handle.wait()
    with pytest.raises(FluidError, match="closed"):
        list(handle.results())
    with pytest.raises(FluidError, match="closed"):
        executor.submit_trialgroup(TrialGroup([Trial(count_up)]))


def test_the_run_folder_tells_what_happened(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    handle = executor.submit_trialgroup(TrialGroup([Trial(Counter, {"lr": 0.1}, budget=3, trial_id="a")], name="g"))
    assert handle.wait(PATIENCE)
    executor.close()
    folder = executor.run_dir
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(entry["trial"], entry["iteration"], entry["metrics"]["step"]) for entry in results] == [
        ("a", 1, 1),
        ("a", 2, 2),
        ("a", 3, 3),
    ]
    session = json.loads((folder / "session.json").read_text())
    assert session["planner"] == "portfolio" and len(session["devices"]) == 2
    assert '"lr": 0.1' in (folder / "trials.jsonl").read_text()


@pytest.mark.slow
def test_the_innermost_executor_is_in_force(make: Callable[..., FluidExecutor]) -> None:
    with make() as outer:
        with make() as inner:
            assert submit_trialgroup(TrialGroup([Trial(count_up)])).wait(PATIENCE)
            assert len(inner.handles) == 1
        assert submit_trialgroup(TrialGroup([Trial(count_up)])).wait(PATIENCE)
        assert len(outer.handles) == 1
    assert executor_in_force() is None


def test_a_thread_outside_of_every_block_uses_that_of_the_process(make: Callable[..., FluidExecutor]) -> None:
    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(executor_in_force).result(PATIENCE) is None
        with make() as outer:
            assert worker.submit(executor_in_force).result(PATIENCE) is outer
            handle = worker.submit(submit_trialgroup, TrialGroup([Trial(count_up)])).result(PATIENCE)
            assert handle.wait(PATIENCE) and outer.handles == [handle]
        assert worker.submit(executor_in_force).result(PATIENCE) is None


def test_a_thread_in_a_block_of_its_own_is_not_disturbed(make: Callable[..., FluidExecutor]) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def other() -> FluidExecutor | None:
        with make():
            entered.set()
            assert may_end.wait(PATIENCE)
            return executor_in_force()

    with make() as mine, ThreadPoolExecutor(1) as worker:
        theirs = worker.submit(other)
        assert entered.wait(PATIENCE)
        assert executor_in_force() is mine, "the other thread's block is the innermost of the process"
        may_end.set()
        assert theirs.result(PATIENCE) not in (mine, None)
        assert executor_in_force() is mine


def test_each_task_has_its_own_block_and_shares_that_around_it(make: Callable[..., FluidExecutor]) -> None:
    executors = [make(), make()]

    async def task(executor: FluidExecutor) -> None:
        assert executor_in_force() is outer
        await asyncio.sleep(0)
        with executor:
            await asyncio.sleep(0)  # Now both tasks are in their blocks.
            assert executor_in_force() is executor
            assert await asyncio.to_thread(executor_in_force) is executor

    async def main() -> None:
        await asyncio.gather(*map(task, executors))

    with make() as outer:
        asyncio.run(main())
        assert executor_in_force() is outer


def test_an_executor_closed_by_another_thread_is_no_longer_in_force(make: Callable[..., FluidExecutor]) -> None:
    with make() as outer, make() as inner:
        with ThreadPoolExecutor(1) as worker:
            worker.submit(inner.close).result(PATIENCE)
        assert executor_in_force() is outer


DRIVER = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from test_executor import Counter
    from fluid import FluidExecutor, Trial, TrialGroup

    if __name__ == "__main__":
        executor = FluidExecutor(backend="local", devices=2, run_dir={folder!r}, verbose=0)
        trials = [Trial(Counter, dict(seconds=0.2), budget=16, trial_id=f"t{{x}}") for x in range(3)]
        handle = executor.submit_trialgroup(TrialGroup(trials, name="long"))
        for result in handle.results():
            print(result.trial_id, result.iteration, result.metrics["pid"], flush=True)
"""


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_no_lane_outlives_its_driver_and_the_session_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # the session's trainable is that of test_executor
    folder = tmp_path / "session"
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER.format(tests=str(Path(__file__).parent), folder=str(folder))))
    pids: set[int] = set()
    reported: dict[str, int] = {}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            trial_id, iteration, pid = line.split()
            pids.add(int(pid))
            reported[trial_id] = int(iteration)
            if min(reported.get("t0", 0), reported.get("t1", 0)) >= 8:
                driver.send_signal(number)
                break
        driver.wait(PATIENCE)
        _wait_for_ends([os.pidfd_open(pid) for pid in pids if not _is_zombie(pid)])

    executor = FluidExecutor.resume(folder, backend="local", devices=2, verbose=0)
    try:
        (handle,) = executor.handles
        assert handle.name == "long"
        assert handle.wait(PATIENCE)
        assert handle.states == {"t0": "DONE", "t1": "DONE", "t2": "DONE"}
        lines = (folder / "results.jsonl").read_text().splitlines()
        for trial_id in ("t0", "t1", "t2"):
            entries = [entry for entry in map(json.loads, lines) if entry["trial"] == trial_id]
            assert [entry["iteration"] for entry in entries] == list(range(1, 17)), "none lost, none twice"
        assert max(result.metrics["lives"] for result in handle.results()) >= 2, "they went on from checkpoints"
    finally:
        executor.close()


# --- Closing


def test_a_listener_may_close_the_executor(make: Callable[..., FluidExecutor]) -> None:
    executor = make()

    class Closer(TrialListener):
        def on_result(self, result: Any) -> None:
            executor.close()

    handle = executor.submit_trialgroup(TrialGroup([Trial(Counter, {}, budget=1_000_000)]), Closer())
    with pytest.raises(FluidError, match="the executor was closed"):
        handle.wait(PATIENCE)
    executor.close()
    assert not any(thread.name == "fluid-pump" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(FluidError, match="closed"):
        executor.submit_trialgroup(TrialGroup([Trial(Counter, {}, budget=1)]))


def test_a_second_close_waits_for_the_first(
    make: Callable[..., FluidExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make()
    first_is_in, may_end, ended = threading.Event(), threading.Event(), []
    close = executor._session.close

    def slowly() -> None:
        first_is_in.set()
        may_end.wait(PATIENCE)
        close()
        ended.append("first")

    monkeypatch.setattr(executor._session, "close", slowly)
    first = threading.Thread(target=executor.close)
    first.start()
    assert first_is_in.wait(PATIENCE)
    monkeypatch.setattr(executor._session, "close", close)
    second = threading.Thread(target=lambda: (executor.close(), ended.append("second")))
    second.start()
    second.join(0.1)
    may_end.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert ended == ["first", "second"]


@pytest.mark.slow
def test_with_few_descriptors_the_error_says_so(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import resource, time
            from fluid import FluidExecutor, Trial, TrialGroup

            def wait(config):
                time.sleep(1.0)
                yield {{"loss": 1.0}}

            resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
            with FluidExecutor("local", 60, run_dir={str(tmp_path / "run")!r}, verbose=0) as executor:
                trials = [Trial(wait) for _ in range(60)]
                handle = executor.submit_trialgroup(TrialGroup(trials))
                assert handle.wait({PATIENCE})
                print(set(handle.states.values()), {{error.message for error in handle.failures.values()}})
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "DONE" in done.stdout


# --- How devices are shared


def test_mps_is_refused_where_it_cannot_be_had(tmp_path: Path) -> None:
    options: dict[str, Any] = {"packing": "mps", "run_dir": tmp_path, "verbose": 0}
    with pytest.raises(InvalidFieldError, match=r"packing='mps': MPS cannot be used: the devices are CPU cores"):
        FluidExecutor("local", [Device(0, kind="cpu")], **options)
    with (
        LocalBackend([Device(0, kind="cpu")], preload=[]) as backend,
        pytest.raises(InvalidFieldError, match="pass it to the backend object instead"),
    ):
        FluidExecutor(backend, **options)


def test_what_a_backend_was_told_cannot_be_told_again(tmp_path: Path) -> None:
    with (
        LocalBackend(1, preload=[]) as backend,
        pytest.raises(InvalidFieldError, match=r"lane_policy='fair'.*the backend"),
    ):
        FluidExecutor(backend, lane_policy="fair", run_dir=tmp_path, verbose=0)


def options_of_a_lane(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> LaneOptions:
    """What the next lane is told when it is forked."""
    told: list[LaneOptions] = []
    fork = ForkServerProcess.fork

    def note(server: ForkServerProcess, options: LaneOptions, connection: socket.socket) -> None:
        told.append(options)
        fork(server, options, connection)

    monkeypatch.setattr(ForkServerProcess, "fork", note)
    executor.add_device(Device(5, kind="cpu"))
    return told[0]


@pytest.mark.parametrize("policy", [None, "srtf"])
def test_lanes_hear_of_the_policy(
    make: Callable[..., FluidExecutor], monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    assert options_of_a_lane(make(lane_policy=policy), monkeypatch).policy == (policy or "longest_first")


@pytest.mark.parametrize("packing", ["auto", "timeslice", "off"])
def test_the_session_says_how_devices_are_shared(make: Callable[..., FluidExecutor], packing: str) -> None:
    executor = make(packing=packing, lane_policy="fair", devices=[Device(0, kind="cpu")])
    executor.close()
    session = json.loads((executor.run_dir / "session.json").read_text())
    assert (session["packing"], session["lane_policy"]) == (packing, "fair")
    assert (session["sharing"], session["sharing_why"]) == ("timeslice", "")


@pytest.mark.slow
def test_the_session_says_so_when_mps_is_given_up(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._MOST_RESTARTS", 0)
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._CHECK_S", 0.05)
    backend = LocalBackend([Device(0, kind="cpu")], preload=[], sharing="mps", _mps_program=str(fake.program))
    with FluidExecutor(backend, packing="mps", run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(Counter, {"seconds": 0.01}, budget=10**6)]))
        pid = next(iter(handle.results())).metrics["pid"]
        assert json.loads((tmp_path / "run" / "session.json").read_text())["sharing"] == "mps"
        fake.tell("fault")
        first(handle.results(), lambda result: result.metrics["pid"] != pid)
    session = json.loads((tmp_path / "run" / "session.json").read_text())
    assert (session["sharing"], session["sharing_why"]) == ("timeslice", "GPU-0: it failed 1 times")
    assert session["pid"] == os.getpid()


class Crowded:
    """Takes ten times as long while another one runs."""

    def setup(self, config: dict[str, Any]) -> None:
        self.folder = Path(config["folder"])

    def step(self) -> dict[str, Any]:
        sign = self.folder / f"{os.getpid()}"
        sign.touch()
        time.sleep(0.005)
        if len(list(self.folder.iterdir())) > 1:
            time.sleep(0.045)
        sign.unlink()
        return {}

    def save_checkpoint(self, folder: str) -> None:
        pass

    def load_checkpoint(self, folder: str) -> None:
        pass


@pytest.mark.slow
def test_packing_that_hurts_is_switched_off_and_the_report_says_so(
    make: Callable[..., FluidExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORTH_TRYING_S", "WORTH_TRYING_STARTS"):  # it is tried however little there is to do
        monkeypatch.setattr(f"fluid.engine.tuning.{name}", 0.0)
    (tmp_path / "signs").mkdir()
    config = {"folder": str(tmp_path / "signs")}
    executor = make(devices=1, max_packing=4)
    trials = [Trial(Crowded, config, budget=60, trial_id=f"t{x}", profile_key="net") for x in range(4)]
    handle = executor.submit_trialgroup(TrialGroup(trials))
    assert handle.wait(PATIENCE)
    assert set(handle.states.values()) == {"DONE"}
    assert executor.profile.measured_packing("net") >= 2, "it was tried"
    assert executor.profile.packing_limit("net", 4) == 1
    last = [result for result in handle.results() if result.trial_id == "t3"][-1]
    assert last.width == 1.0
    executor.close()
    (facts,) = load_run(executor.run_dir).keys
    assert facts.c == 1 and facts.alpha > 2.0


def _wait_for_ends(handles: list[int]) -> None:
    """Waits up to ten seconds for each process to end."""
    for handle in handles:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        assert poller.poll(10_000), "a lane outlived its driver"
        os.close(handle)

"""The thread of the loggers: what they are told, in which order, and that they disturb nobody."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logger_heard import PATIENCE, Heard
from waiting import eventually

import fluid
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.loggers import hub as hub_module
from fluid.loggers.logger import LoggedTrial, TrialLogger
from fluid.loggers.sink import LOGGERS
from fluid.results.records import Result
from fluid.session.listeners import TrialListener
from fluid.trialgroup import Search, Shown, Trial, TrialGroup

ROOT = Path(__file__).parents[2]


def count_up(config: dict[str, Any], state: Any) -> Iterator[Any]:
    step = state or 0
    while True:
        step += 1
        if step == config.get("dies_at") and not Path(config["died"]).exists():
            Path(config["died"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == config.get("fails_at"):
            raise ValueError("no such luck")
        yield {"loss": 1.0 / step, "deep": {"step": step}}, step


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FluidExecutor]]:
    """Makes executors of one device, and closes them."""
    made: list[FluidExecutor] = []

    def make(*loggers: TrialListener, **options: Any) -> FluidExecutor:
        options = {"run_dir": tmp_path / f"run-{len(made)}", "verbose": 0, **options}
        made.append(FluidExecutor("local", 1, loggers=loggers, **options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def group(name: str, *ids: str, budget: int = 3, search: Search | None = None, **config: Any) -> TrialGroup:
    trials = [Trial(count_up, {"x": number, **config}, budget, trial_id=each) for number, each in enumerate(ids)]
    return TrialGroup(trials, name, search=search, owner="ann")


@pytest.mark.slow
def test_a_logger_hears_all_groups_in_order_in_a_thread_of_its_own(make: Callable[..., FluidExecutor]) -> None:
    heard, plain = Heard(), Plain()
    executor = make(heard, plain)
    handles = [executor.submit_trialgroup(one) for one in (group("first", "a", "b"), group("second", "c", budget=1))]
    assert all(handle.wait(PATIENCE) for handle in handles)
    executor.close()
    assert heard.of("a") == [
        ("trial", {"x": 0}),
        ("start",),
        *(("result", iteration) for iteration in (1, 2, 3)),
        ("end", "DONE", None),
    ]
    assert heard.iterations("b") == [1, 2, 3] and heard.iterations("c") == [1]
    assert {each.trial_id: each.group for each in heard.trials.values()} == {"a": "first", "b": "first", "c": "second"}
    assert heard.results["a"][1].metrics == {"loss": 0.5, "deep": {"step": 2}}
    assert heard.results["b"][0].config == {"x": 1}
    assert heard.calls[-1] == ("broken", "", "the executor was closed")
    assert heard.threads == {"fluid-loggers"}
    assert len({each.uid for each in heard.trials.values()}) == 3
    assert [call for call in heard.calls if call[0] != "trial"] == plain.calls, "any TrialListener will do"


class Plain(TrialListener):
    """No TrialLogger."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, trial_id: str) -> None:
        self.calls.append(("start", trial_id))

    def on_result(self, result: Result) -> None:
        self.calls.append(("result", result.trial_id, result.iteration))

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        self.calls.append(("end", trial_id, state, None if failure is None else failure.message))

    def on_broken(self, error: BaseException) -> None:
        self.calls.append(("broken", "", str(error)))


@pytest.mark.slow
def test_failed_stopped_extended_and_retried_trials(make: Callable[..., FluidExecutor], tmp_path: Path) -> None:
    heard = Heard()
    executor = make(heard, max_failures=1)
    died = {"dies_at": 3, "died": str(tmp_path / "died")}
    handle = executor.submit_trialgroup(
        TrialGroup(
            [
                Trial(count_up, {"fails_at": 2}, 3, trial_id="fails"),
                Trial(count_up, died, 4, trial_id="dies"),
                Trial(count_up, {}, 2, trial_id="extended"),
                Trial(count_up, {}, 10**9, trial_id="stopped"),
            ],
            "group",
        )
    )
    eventually(lambda: heard.iterations("stopped"))
    handle.stop("stopped")
    assert handle.wait(PATIENCE)
    handle.extend("extended", 2)
    assert handle.wait(PATIENCE)
    executor.close()
    assert heard.of("fails")[-2:] == [("start",), ("end", "FAILED", "ValueError: no such luck")], "it was tried again"
    assert heard.iterations("fails") == [1]
    assert heard.iterations("dies") == [1, 2, 3, 4], "a trial whose process dies goes on with its run"
    assert heard.ends == {"fails": "FAILED", "dies": "DONE", "extended": "DONE", "stopped": "STOPPED"}
    assert heard.of("extended") == [
        ("trial", {}),
        ("start",),
        ("result", 1),
        ("result", 2),
        ("end", "DONE", None),
        ("trial", {}),
        ("start",),
        ("result", 3),
        ("result", 4),
        ("end", "DONE", None),
    ]


@pytest.mark.slow
def test_states_are_those_that_reports_show(make: Callable[..., FluidExecutor]) -> None:
    heard = Heard()
    executor = make(heard)
    handle = executor.submit_trialgroup(
        group("search", "a", "b", "c", budget=1, search=Search("loss", "min", extends=True))
    )
    assert handle.wait(PATIENCE)
    handle.extend("a", 1)
    assert handle.wait(PATIENCE)
    handle.stop("a", "DONE")
    handle.stop("b", "STOPPED")
    executor.close()
    assert [call for call in heard.of("a") if call[0] == "end"] == [
        ("end", "PAUSED", None),
        ("end", "PAUSED", None),
        ("end", "DONE", None),
    ]
    assert heard.ends == {"a": "DONE", "b": "STOPPED", "c": "PAUSED"}


def test_trials_are_logged_as_they_are_shown(make: Callable[..., FluidExecutor]) -> None:
    heard = Heard()
    executor = make(heard)
    shown = [Shown("trial 7", {"lr": 0.1}, iterations, metrics="deep") for iterations in (0, 2)]
    first = [Trial(count_up, budget=2, trial_id=f"part-{n}", shown=each) for n, each in enumerate(shown)]
    handle = executor.submit_trialgroup(TrialGroup(first, "sweep", owner="ann"))
    more = TrialGroup([Trial(count_up, trial_id="x", shown=shown[0])], "other", owner="ann")
    other = executor.submit_trialgroup(more)
    assert handle.wait(PATIENCE) and other.wait(PATIENCE)
    executor.close()
    assert heard.iterations("trial 7") == [1, 2, 3, 4]
    assert heard.results["trial 7"][0].metrics == {"step": 1}
    assert heard.results["trial 7"][0].config == {"lr": 0.1}
    assert [each.group for each in heard.trials.values()] == ["sweep", "other"], "of one shown id, but two trials"


@pytest.mark.slow
def test_a_logger_that_raises_is_left_out_with_one_warning(
    make: Callable[..., FluidExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Heard):
        def on_result(self, result: Result) -> None:
            super().on_result(result)
            raise OSError("the server is down")

    class Exits(TrialListener):
        def on_start(self, trial_id: str) -> None:
            raise SystemExit(3)

    fails, heard = Fails("there"), Heard()
    executor = make(fails, Exits(), heard)
    with caplog.at_level(logging.WARNING, logger="fluid.loggers"):
        assert executor.submit_trialgroup(group("group", "a", "b")).wait(PATIENCE)
        executor.close()
    assert heard.iterations("a") == heard.iterations("b") == [1, 2, 3]
    assert len([call for call in fails.calls if call[0] == "result"]) == 1
    assert fails.calls[-1][0] == "broken", "it can let go of what it holds"
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "Fails(there) raised OSError('the server is down')" in texts[1] and "Exits raised SystemExit(3)" in texts[0]


@pytest.mark.slow
def test_a_logger_that_hangs_neither_slows_nor_breaks_the_sweep(make: Callable[..., FluidExecutor]) -> None:
    class Slow(Heard):
        may_go_on = threading.Event()

        def on_start(self, trial_id: str) -> None:
            assert self.may_go_on.wait(PATIENCE)

    slow = Slow()
    executor = make(slow)
    assert executor.submit_trialgroup(group("group", "a", "b", budget=500)).wait(PATIENCE)
    assert not slow.results, "the sweep is over, and the logger has not begun"
    slow.may_go_on.set()
    executor.close()
    assert slow.iterations("a") == slow.iterations("b") == list(range(1, 501))


@pytest.mark.slow
def test_closing_says_what_it_waits_for_and_gives_up(
    make: Callable[..., FluidExecutor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_SAY_S", 0.01)
    monkeypatch.setattr(hub_module, "_GIVE_UP_S", 0.05)

    class Hangs(TrialLogger):
        destination = "server"
        is_called, may_go_on = threading.Event(), threading.Event()

        def on_result(self, result: Result) -> None:
            self.is_called.set()
            assert self.may_go_on.wait(PATIENCE)

    hangs = Hangs()
    executor = make(hangs)
    assert executor.submit_trialgroup(group("group", "a")).wait(PATIENCE)
    assert hangs.is_called.wait(PATIENCE)
    with caplog.at_level(logging.WARNING, logger="fluid.loggers"):
        executor.close()
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("waiting for Hangs(server): ")
    assert texts[-1].startswith("gave up waiting for Hangs(server): ")
    hangs.may_go_on.set()


KILLED = """
    import os, signal, sys
    from logger_heard import Heard
    from fluid import FluidExecutor, TrialGroup, Trial
    from fluid.loggers.sink import read_progress
    from waiting import eventually
    folder = Path(sys.argv[1])

    class Killer(Heard):
        def on_result(self, result):
            super().on_result(result)
            if self.iterations("a")[-1:] == self.iterations("b")[-1:] == [5]:
                print("killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    killer = Killer()
    with FluidExecutor("local", 3, run_dir=folder / "run", verbose=0, loggers=[killer]) as executor:
        trials = [Trial(waits, {"folder": str(folder)}, 8, trial_id=name) for name in "ab"]
        trials.append(Trial(waits, {}, 1, trial_id="short"))
        handle = executor.submit_trialgroup(TrialGroup(trials, "group"))
        eventually(lambda: read_progress(folder / "run").get("Killer()", None) and
                   read_progress(folder / "run")["Killer()"].results == 7)
        (folder / "3").touch()
        handle.wait()
"""


def waits(config: dict[str, Any], state: Any) -> Iterator[Any]:
    """Counts up; after iterations 3 and 5 it waits for a file of that name."""
    step = state or 0
    while True:
        while "folder" in config and step in (3, 5) and not Path(config["folder"], str(step)).exists():
            time.sleep(0.01)
        step += 1
        yield {"step": step}, step


@pytest.mark.slow
def test_a_killed_session_goes_on_with_what_its_loggers_had_not_stored(tmp_path: Path) -> None:
    imports = "import time\nfrom pathlib import Path\nfrom typing import Any\nfrom collections.abc import Iterator\n"
    script = imports + inspect.getsource(waits) + textwrap.dedent(KILLED)
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(ROOT)])
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL and killed.stdout == "killed\n", killed.stderr
    (tmp_path / "5").touch()

    class Killer(Heard):
        """Recognized by its name."""

    again, newcomer = Killer(), Heard("new")
    with FluidExecutor.resume(
        tmp_path / "run", backend="local", devices=2, verbose=0, loggers=[again, newcomer]
    ) as executor:
        assert executor.handles[0].wait(PATIENCE)
    assert again.iterations("a") == again.iterations("b") == [4, 5, 6, 7, 8], "1 to 3 were noted"
    assert newcomer.iterations("a") == newcomer.iterations("b") == list(range(1, 9))
    assert "short" not in again.trials, "its end was noted, too"
    assert newcomer.ends == {"a": "DONE", "b": "DONE", "short": "DONE"}
    assert again.session.session_id == json.loads((tmp_path / "run" / "session.json").read_text())["id"]
    assert {each.uid for each in again.trials.values()} <= {each.uid for each in newcomer.trials.values()}

    third = Killer()
    with FluidExecutor.resume(tmp_path / "run", backend="local", devices=1, verbose=0, loggers=[third]) as executor:
        executor.handles[0].extend("a", 1)
        assert executor.handles[0].wait(PATIENCE)
    assert [call[0] for call in third.calls] == ["trial", "start", "result", "end", "broken"]


def test_a_torn_note_is_cut_off(make: Callable[..., FluidExecutor]) -> None:
    executor = make(Heard())
    assert executor.submit_trialgroup(group("group", "a")).wait(PATIENCE)
    executor.close()
    with (executor.run_dir / LOGGERS).open("ab") as file:
        file.write(b'{"logger": "Heard()", "resu')
    heard = Heard()
    FluidExecutor.resume(executor.run_dir, backend="local", devices=1, verbose=0, loggers=[heard]).close()
    assert [call[0] for call in heard.calls] == ["broken"]


@pytest.mark.slow
def test_a_native_sweep_takes_loggers(tmp_path: Path) -> None:
    first, second = Heard(), Heard()
    options: dict[str, Any] = {"metric": "loss", "samples": 4, "budget": 3, "min_budget": 1, "name": "sweep"}
    run_dir = tmp_path / "run"
    result = fluid.run(count_up, {"x": [1, 2]}, loggers=[first], run_dir=run_dir, algorithm="sha", **options)
    assert first.ends == {trial.trial_id: trial.state for trial in result.trials}
    assert set(first.ends.values()) == {"DONE", "STOPPED"}
    assert {trial.trial_id: trial.iteration for trial in result.trials} == {
        trial_id: iterations[-1] for trial_id in first.ends if (iterations := first.iterations(trial_id))
    }
    fluid.run(count_up, {"x": [1, 2]}, loggers=[second], run_dir=run_dir, resume=True, algorithm="sha", **options)
    assert not second.results and not second.ends, "all was logged before"


@pytest.mark.parametrize("loggers", ["tensorboard", [3], [Heard], Heard(), None])
def test_what_is_no_logger_is_refused(loggers: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="loggers"):
        FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, loggers=loggers)
    FluidExecutor("local", 1, run_dir=tmp_path, verbose=0).close()


def test_a_logger_may_refuse_a_session(tmp_path: Path) -> None:
    class Refuses(TrialLogger):
        def on_session(self, session: Any) -> None:
            raise InvalidFieldError("server", "there", "is down")

    with pytest.raises(InvalidFieldError, match="is down"):
        FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, loggers=[Heard(), Refuses()])
    FluidExecutor("local", 1, run_dir=tmp_path, verbose=0).close()


def test_a_logger_is_no_listener_of_one_group(make: Callable[..., FluidExecutor]) -> None:
    with make() as executor:
        with pytest.raises(InvalidFieldError, match="pass it as FluidExecutor"):
            executor.submit_trialgroup(group("group", "a"), Heard())
        with pytest.raises(InvalidFieldError, match=r"callbacks\[0\]"):
            fluid.run(count_up, {"x": 1}, metric="loss", callbacks=[Heard()])
        with pytest.raises(InvalidFieldError, match=r"loggers=.* give it there, FluidExecutor\(loggers="):
            fluid.run(count_up, {"x": 1}, metric="loss", loggers=[Heard()])


@pytest.mark.slow
def test_configs_that_are_told_later(make: Callable[..., FluidExecutor]) -> None:
    heard = Heard()
    executor = make(heard)
    handle = executor.submit_trialgroup(group("group", "a"))
    assert handle.wait(PATIENCE)
    eventually(lambda: heard.ends)
    handle.show_config("a", {"lr": 0.5})
    executor.close()
    assert heard.trials["a"] == LoggedTrial(trial_id="a", group="group", config={"lr": 0.5}, uid=heard.trials["a"].uid)
    assert heard.of("a")[-1] == ("trial", {"lr": 0.5})

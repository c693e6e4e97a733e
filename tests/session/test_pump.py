"""The session's thread when something goes wrong: waiters are woken, and refused requests leave nothing behind."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.base import Backend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command
from fluid.engine.core import EngineError
from fluid.engine.events import (
    BudgetExtended,
    DeviceAdded,
    DeviceDraining,
    DeviceLost,
    Event,
    Failure,
    GroupSubmitted,
    TrialSpec,
)
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.results.records import Result
from fluid.session import pump as ticking
from fluid.session.folder.folder import RunFolder
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialListener
from fluid.session.pump import Ticks
from fluid.trainables.payload import TrialPayload
from fluid.trialgroup import Trial, TrialGroup

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class IdleBackend(Backend):
    """A backend of one device whose lanes never become ready, and that fails where it is told to."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.reported: list[Event] = []
        self.closed = 0
        self.close_error: BaseException | None = None
        self.execute_error: BaseException | None = None
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def devices(self) -> list[Device]:
        return [Device(0)]

    def now(self) -> float:
        return 0.0

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        self.registered.append(trial_id)

    def execute(self, commands: Sequence[Command]) -> None:
        if self.execute_error is not None:
            raise self.execute_error

    def poll(self, timeout: float | None = None) -> list[Event]:
        self._woken.get()
        reported, self.reported = self.reported, []
        return reported

    def wake(self) -> None:
        self._woken.put(None)

    def close(self) -> None:
        self.closed += 1
        if self.close_error is not None:
            raise self.close_error


def endless(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {"who": config.get("who")}


@pytest.fixture
def backend() -> IdleBackend:
    return IdleBackend()


@pytest.fixture
def executor(backend: IdleBackend, tmp_path: Path) -> Iterator[FluidExecutor]:
    """An executor on the idle backend."""
    executor = FluidExecutor(backend=backend, run_dir=tmp_path / "run", verbose=0)
    yield executor
    executor.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[FluidExecutor]:
    """An executor of one real device that runs one trial at a time."""
    with FluidExecutor(backend="local", devices=1, packing="off", run_dir=tmp_path / "local", verbose=0) as executor:
        yield executor


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Threads of a user's."""
    with ThreadPoolExecutor() as threads:
        yield threads


def submit(executor: FluidExecutor, *names: str, listener: Any = None, **config: Any) -> TrialGroupHandle:
    return executor.submit_trialgroup(TrialGroup([Trial(endless, config, trial_id=name) for name in names]), listener)


# -- devices that come and go ---------------------------------------------------------------------------------------


def test_devices_may_go_come_back_and_drain_at_one_time(executor: FluidExecutor, backend: IdleBackend) -> None:
    seen: list[Event] = [DeviceLost(0.0, 0), DeviceAdded(0.0, Device(0)), DeviceAdded(0.0, Device(1))]
    # The user may have removed a device that drains.
    backend.reported = [*seen, DeviceDraining(0.0, 7, 60.0), DeviceDraining(0.0, 0, 60.0)]
    backend.wake()
    deadline = time.monotonic() + PATIENCE
    while [device.index for device in executor.devices] != [1]:
        assert time.monotonic() < deadline, "the devices are not as they were reported"
    submit(executor, "a")
    assert backend.registered == ["a"], "the session goes on"


# -- ticks where events keep coming ----------------------------------------------------------------------------------


class Wide:
    """May run on several devices; the simulated backend never loads it."""

    fluid_elastic = True

    def step(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, folder: Path) -> None:
        pass

    def load_checkpoint(self, folder: Path) -> None:
        pass


def test_trials_are_resized_although_events_never_pause(tmp_path: Path) -> None:
    backend = SimulatedBackend(lambda *_: Truth(0.001, 1.0, 1.0), [Device(0), Device(1)], epsilon=0.001)
    trials = [Trial(Wide, budget=3000, trial_id="long", max_width=2), Trial(Wide, budget=20, trial_id="short")]
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        assert executor.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
        entries = [json.loads(line) for line in (executor.run_dir / "journal.jsonl").read_text().splitlines()]
    (resize,) = [entry for entry in entries if entry["what"] == "NoteResize"]
    assert (resize["trial_id"], resize["width"]) == ("long", 2.0)
    submitted = next(entry["at"] for entry in entries if entry["what"] == "GroupSubmitted")
    assert ticking.LATEST_TICK_S <= resize["at"] - submitted < ticking.LATEST_TICK_S + 0.01


@pytest.fixture
def busy() -> EngineState:
    """An engine that wants a tick: a trial waits."""
    state = EngineState(make_planner("portfolio"))
    specs = (TrialSpec("a", 9), TrialSpec("b", 9))
    state.handle(DeviceAdded(0.0, Device(0)))
    state.handle(GroupSubmitted(0.0, "g", specs))
    assert state.wants_tick and not state.only_spreads
    return state


def test_ticks_that_interrupt_events_take_a_small_share_of_the_time(busy: EngineState) -> None:
    ticks, now, spent, began = Ticks(busy), 10.0, 0.0, []
    while now < 70.0:
        now += 0.001
        if ticks.is_overdue(now, waited=0.0):
            began.append(now)
            now += 0.02
            spent += 0.02
            ticks.ticked(now - 0.02, now)
    assert began[0] == pytest.approx(10.0 + ticking.LATEST_TICK_S, abs=0.01)
    assert 0.9 * ticking.MOST_TICKING < spent / 60.0 <= 1.1 * ticking.MOST_TICKING


def test_a_tick_is_not_overdue_where_events_pause(busy: EngineState) -> None:
    ticks = Ticks(busy)
    assert not any(ticks.is_overdue(0.01 * step, waited=0.01) for step in range(100))
    assert ticks.until(1.0) == ticking.SETTLING_S


# -- a backend that cannot be closed --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("the cluster is gone"), SystemExit("the cluster is gone")])
def test_waiters_are_told_when_closing_the_backend_raises(
    executor: FluidExecutor,
    backend: IdleBackend,
    aside: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    handle = submit(executor, "a")
    waiting, answer = aside.submit(handle.wait), handle.call("a", "method")
    backend.close_error = error
    executor.close()
    with pytest.raises(FluidError, match="did not end: the executor was closed"):
        waiting.result(PATIENCE)
    with pytest.raises(FluidError, match="was not answered"):
        answer.result(PATIENCE)
    with pytest.raises(FluidError, match="did not end"):
        list(handle.results())
    assert (executor.run_dir / "profile.json").is_file()
    with pytest.raises(ValueError, match="closed file"):
        executor._folder.journal([BudgetExtended(0.0, "a", 1)], [])
    (record,) = [record for record in caplog.records if "dropped" not in record.getMessage()]
    if isinstance(error, OSError):  # It is of the environment: where in Fluid it came up tells nobody.
        assert record.levelno == logging.WARNING and str(error) in record.getMessage() and record.exc_info is None
    else:
        assert record.levelno == logging.ERROR and record.exc_info is not None and record.exc_info[1] is error


def test_every_part_is_closed_also_when_a_listener_raises(executor: FluidExecutor, backend: IdleBackend) -> None:
    class Rude(TrialListener):
        def on_broken(self, error: BaseException) -> None:
            raise SystemExit

    first, second = submit(executor, "a", listener=Rude()), submit(executor, "b")
    executor.close()
    for handle in (first, second):
        with pytest.raises(FluidError, match="did not end"):
            handle.wait(PATIENCE)
    assert backend.closed == 1 and (executor.run_dir / "profile.json").is_file()


# -- errors that end a session --------------------------------------------------------------------------------------


def break_on(monkeypatch: pytest.MonkeyPatch, kind: type[Event]) -> None:
    """Makes the engine raise after an event of this kind has changed it."""
    handle = EngineState.handle

    def handle_then_raise(state: EngineState, *events: Event) -> list[Command]:
        commands = handle(state, *events)
        if any(isinstance(event, kind) for event in events):
            raise EngineError("widths do not sum up")
        return commands

    monkeypatch.setattr(EngineState, "handle", handle_then_raise)


def test_an_engine_error_in_a_users_call_ends_the_session(
    executor: FluidExecutor,
    backend: IdleBackend,
    aside: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = submit(executor, "a")
    waiting = aside.submit(handle.wait)
    break_on(monkeypatch, GroupSubmitted)
    with pytest.raises(EngineError, match="widths"):
        submit(executor, "b")
    with pytest.raises(FluidError, match="did not end: widths do not sum up") as caught:
        waiting.result(PATIENCE)
    assert isinstance(caught.value.__cause__, EngineError)
    with pytest.raises(FluidError, match="closed"):
        handle.extend("a", 1)
    executor.close()
    assert backend.closed == 1 and backend.registered == ["a"]
    assert "widths do not sum up" in caplog.text


def test_an_engine_error_that_a_listener_meets_ends_the_session(
    executor: FluidExecutor, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Extends(TrialListener):
        def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
            other.extend("b", 1)  # What it raises is logged, and raised nowhere.

        def on_broken(self, error: BaseException) -> None:
            heard.put(str(error))

    other = submit(executor, "b")
    handle = submit(executor, "a", listener=Extends())
    break_on(monkeypatch, BudgetExtended)
    handle.stop("a")
    assert heard.get(timeout=PATIENCE) == "widths do not sum up"
    with pytest.raises(FluidError, match="did not end"):
        other.wait(PATIENCE)


def test_a_command_that_the_backend_refuses_ends_the_session(executor: FluidExecutor, backend: IdleBackend) -> None:
    handle = submit(executor, "a")
    backend.execute_error = InvalidFieldError("lane_id", 7, "was never started")
    with pytest.raises(InvalidFieldError, match="lane_id=7"):
        handle.stop("a")
    backend.execute_error = None
    with pytest.raises(FluidError, match="closed: lane_id=7"):
        submit(executor, "b")
    with pytest.raises(FluidError, match="did not end: lane_id=7"):
        handle.wait(PATIENCE)


def test_a_journal_that_cannot_be_written_ends_the_session(
    executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = submit(executor, "a")

    def full(folder: RunFolder, events: Any, commands: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunFolder, "journal", full)
    with pytest.raises(OSError, match="no space"):
        handle.extend("a", 1)
    with pytest.raises(FluidError, match="did not end: no space"):
        handle.wait(PATIENCE)


def test_a_refused_request_ends_nothing(executor: FluidExecutor) -> None:
    handle = submit(executor, "a")
    for refused in (lambda: submit(executor, "a"), lambda: handle.extend("x", 1), lambda: handle.forget("a")):
        with pytest.raises(InvalidFieldError):
            refused()
    assert not handle.wait(0.0)
    assert [group.name for group in executor.status().groups] == [handle.name]


def test_closing_twice_and_from_the_sessions_own_thread(
    executor: FluidExecutor, backend: IdleBackend, caplog: pytest.LogCaptureFixture
) -> None:
    class Closes(TrialListener):
        def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
            executor.close()

    submit(executor, "a", listener=Closes()).stop("a")
    executor.close()
    assert backend.closed == 1 and not caplog.records


# -- what cannot be read here ---------------------------------------------------------------------------------------


class Unreadable(BaseException):
    """No Exception."""


class Poison:
    """Raises where it is unpickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: type[BaseException]) -> None:
    raise error("while unpickling")


class Poisoner:
    """Reports, returns and raises what raises where it is unpickled."""

    def setup(self, config: dict[str, Any]) -> None:
        self.poison = Poison(config["error"])

    def step(self) -> dict[str, Any]:
        return {"plain": 1, "poison": self.poison}

    def give(self) -> Poison:
        return self.poison


@pytest.mark.slow
@pytest.mark.parametrize("error", [SystemExit, Unreadable, ImportError])
def test_what_raises_where_it_is_unpickled_is_its_trials_problem(
    local: FluidExecutor, error: type[BaseException]
) -> None:
    group = TrialGroup([Trial(Poisoner, {"error": error}, budget=2, trial_id="a"), Trial(endless, trial_id="b")])
    handle = local.submit_trialgroup(group)
    with pytest.raises(FluidError, match="cannot read what it returned"):
        handle.call("a", "give").result(PATIENCE)
    assert handle.wait(PATIENCE)
    assert handle.states == {"a": "DONE", "b": "DONE"}
    found = [result.metrics for result in handle.results() if result.trial_id == "a"]
    assert [metrics["plain"] for metrics in found] == [1, 1]
    assert all("Poison object" in metrics["poison"] for metrics in found), "as JSON has it"


def test_metrics_that_json_does_not_have_are_written_as_text(local: FluidExecutor) -> None:
    def odd(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        class NoText:
            def __repr__(self) -> str:
                raise SystemExit

        yield {"confusion": {(0, 1): 5}, "odd": NoText(), "nested": [{2: {3.5}}], "big": 10**5000}

    handle = local.submit_trialgroup(TrialGroup([Trial(odd, {"weights": {(1, 2): 3}}, trial_id="a")]))
    assert handle.wait(PATIENCE)
    local.close()
    folder = local.run_dir
    (result,) = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    assert result["metrics"] == {
        "confusion": {"(0, 1)": 5},
        "odd": "<NoText>",
        "nested": [{"2": "{3.5}"}],
        "big": "<int>",
    }
    assert '{"(1, 2)": 3}' in (folder / "trials.jsonl").read_text()


# -- one id in two submissions --------------------------------------------------------------------------------------


class SlowToPickle:
    """A value of a config that says when it is being pickled, and waits until the test has done something else."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: Any) -> SlowToPickle:
        return self  # A trial copies its config as it is made, which is not what is to wait.

    def __reduce__(self) -> Any:
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        return str, ("slow",)


def _submit(executor: FluidExecutor, handle: TrialGroupHandle, trial: Trial) -> TrialGroupHandle:
    return executor.submit_trialgroup(TrialGroup([trial]))


def _add(executor: FluidExecutor, handle: TrialGroupHandle, trial: Trial) -> TrialGroupHandle:
    handle.add(trial)
    return handle


@pytest.mark.slow
@pytest.mark.parametrize("second", [_submit, _add])
@pytest.mark.parametrize("first", [_submit, _add])
def test_an_accepted_trial_runs_with_its_own_config(
    local: FluidExecutor,
    aside: ThreadPoolExecutor,
    first: Callable[..., TrialGroupHandle],
    second: Callable[..., TrialGroupHandle],
) -> None:
    busy = local.submit_trialgroup(TrialGroup([Trial(endless, budget=10**9, trial_id="busy")]))
    next(busy.results())  # The device has work, so that the trial in question starts last of all.
    others = [submit(local, name) for name in ("group-1", "group-2")]
    slow = SlowToPickle()
    refused = aside.submit(second, local, others[1], Trial(endless, {"who": "refused", "slow": slow}, trial_id="a"))
    assert slow.begun.wait(PATIENCE)
    handle = first(local, others[0], Trial(endless, {"who": "accepted"}, budget=2, trial_id="a"))
    slow.may_end.set()
    with pytest.raises(InvalidFieldError, match="trial_id='a'"):
        refused.result(PATIENCE)
    busy.stop("busy")
    assert handle.wait(PATIENCE)
    results = [result for result in handle.results() if result.trial_id == "a"]
    assert [(result.metrics["who"], result.config["who"]) for result in results] == [("accepted", "accepted")] * 2
    assert others[1].wait(PATIENCE) and others[1].states == {"group-2": "DONE"}


@pytest.mark.slow
def test_one_of_many_threads_that_submit_one_id_is_accepted(local: FluidExecutor, aside: ThreadPoolExecutor) -> None:
    threads, rounds = 4, 10
    together = threading.Barrier(threads)

    def try_all(who: int) -> list[Result]:
        results: list[Result] = []
        for number in range(rounds):
            together.wait(PATIENCE)
            try:
                results += submit(local, f"t{number}", who=who).results()
            except InvalidFieldError as error:
                assert error.field == "trial_id"
        return results

    done = [(who, result) for who, results in enumerate(aside.map(try_all, range(threads))) for result in results]
    assert sorted(result.trial_id for _, result in done) == [f"t{number}" for number in range(rounds)]
    assert all(result.metrics["who"] == who for who, result in done)


@pytest.mark.parametrize("how", ["submit", "add"])
@pytest.mark.parametrize("reason", ["cannot be pickled", "is taken"])
def test_nothing_is_left_of_a_refused_group(
    executor: FluidExecutor, backend: IdleBackend, how: str, reason: str
) -> None:
    handles = [submit(executor, "taken"), submit(executor, "host")]
    folder = executor.run_dir
    files = {name: (folder / name).read_bytes() for name in ("payloads.pkl", "trials.jsonl", "journal.jsonl")}
    third = Trial(endless, {"lock": threading.Lock()}) if "pickled" in reason else Trial(endless, trial_id="taken")
    trials = [Trial(endless, {"who": name}, trial_id=name) for name in "ab"]
    with pytest.raises(InvalidFieldError, match=reason):
        if how == "submit":
            executor.submit_trialgroup(TrialGroup([*trials, third]))
        else:
            handles[1].add(*trials, third)
    assert backend.registered == ["taken", "host"]
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert executor.handles == handles
    submit(executor, "a", "b")
    assert backend.registered == ["taken", "host", "a", "b"]

"""Trials that train in several lanes, on the local backend: real processes that talk to each other."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.trainables import Regression  # noqa: E402

from fluid.backends.local import LocalBackend  # noqa: E402
from fluid.engine.commands import (  # noqa: E402
    Call,
    Fork,
    Pause,
    Resize,
    RunIteration,
    Save,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (  # noqa: E402
    IterationDone,
    LaneLost,
    PausePurpose,
    ResizeDone,
    TrialCalled,
    TrialFailed,
    TrialForked,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSetBack,
    TrialStarted,
)
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError  # noqa: E402
from fluid.executor import FluidExecutor  # noqa: E402
from fluid.results.records import Result  # noqa: E402
from fluid.session.handle import TrialGroupHandle  # noqa: E402
from fluid.trainables.payload import payload_of  # noqa: E402
from fluid.trainables.pickling import dump_arguments  # noqa: E402
from fluid.trialgroup import Trial, TrialGroup  # noqa: E402

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 120.0
MANY = 10**6
#: First number of the lanes of a test: none may be used again.
_numbers = itertools.count(0, 100)
#: Of the trial that each handle is about.
_trial_ids: dict[TrialGroupHandle, str] = {}


class Paced(Regression):
    """Waits for each batch as long as a device would work on its part of it, so that width pays on any machine."""

    def build(self, config: dict[str, Any]) -> None:
        super().build(config)
        time.sleep(config.get("setup", 0.0))
        if config.get("fails_but_once") and not claim(config["fails_but_once"]):
            raise OSError("no data here")

    def before_batch(self) -> None:
        time.sleep(self.config.get("seconds", 0.01) / self.size)

    def end_iteration(self, metrics: dict[str, float]) -> Any:
        # Of all ranks: a test may kill any of them.
        pids = torch.zeros(self.size, dtype=torch.int64)
        pids[self.rank] = os.getpid()
        self._elastic.group.all_reduce(pids)
        if self.size > 1 and self.iteration + 1 >= self.config.get("raises_at", MANY) and self.rank == 1:
            raise ValueError("on purpose")
        return {**super().end_iteration(metrics), "pids": pids.tolist(), "threads": torch.get_num_threads()}

    def tell(self, value: int) -> tuple[int, int]:
        return self.iteration, value


class Rigid:
    """Says nothing of being elastic."""

    def setup(self, config: dict[str, Any]) -> None:
        self.steps = 0

    def step(self) -> dict[str, Any]:
        time.sleep(0.01)
        self.steps += 1
        return {"steps": self.steps}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "steps").write_text(str(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = int((Path(folder) / "steps").read_text())


def claim(path: str) -> bool:
    """Whether this is the first call."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def losses(iterations: int) -> list[float]:
    """Of a trial in this process, without Fluid."""
    trial = Regression()
    trial.setup({})
    return [float(trial.step()["loss"]) for _ in range(iterations)]


def as_alone(results: list[Any]) -> None:
    """Checks that iterations are there once each, in order, and that the losses are those of a single process."""
    assert [result.iteration for result in results] == list(range(1, len(results) + 1))
    assert [result.metrics["loss"] for result in results] == pytest.approx(losses(len(results)), rel=0, abs=1e-5)


# -- under an executor ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """Two CPU devices, whose lanes stay from test to test."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, max_packing=1, verbose=0, run_dir=folder) as made:
        yield made


@pytest.fixture
def submit(executor: FluidExecutor, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Submits a trial that nothing is known about but from this test."""
    handles: list[TrialGroupHandle] = []

    def submit(name: str, budget: int, trainable: Any = Paced, **config: Any) -> Any:
        test = request.node.name
        trial = Trial(trainable, config, budget=budget, trial_id=f"{test}-{name}", profile_key=test)
        handles.append(executor.submit_trialgroup(TrialGroup([trial])))
        _trial_ids[handles[-1]] = trial.trial_id
        return handles[-1]

    yield submit
    for handle in handles:
        stop(handle)


def stop(handle: TrialGroupHandle) -> None:
    handle.stop(_trial_ids[handle])
    assert handle.wait(PATIENCE)


def stopped(handle: TrialGroupHandle) -> list[Result]:
    stop(handle)
    assert set(handle.states.values()) == {"STOPPED"}
    return list(handle.results())


def finished(handle: TrialGroupHandle) -> list[Result]:
    assert handle.wait(PATIENCE)
    assert set(handle.states.values()) == {"DONE"}, handle.states
    return list(handle.results())


def until(results: Iterator[Result], wanted: Callable[[Result], bool]) -> Result:
    return next(result for result in results if wanted(result))


@pytest.mark.slow
def test_a_trial_alone_is_widened_and_learns_the_same(executor: FluidExecutor, submit: Callable[..., Any]) -> None:
    handle = submit("a", MANY)
    wide = until(handle.results(), lambda result: result.width == 2.0)
    until(handle.results(), lambda result: result.iteration == wide.iteration + 5)
    results = stopped(handle)
    as_alone(results)
    assert {result.width for result in results} == {1.0, 2.0}
    assert all(len(result.device_ids) == result.width for result in results)
    assert wide.metrics["pids"][0] == results[0].metrics["pids"][0], "it went on without a restart"
    assert all(result.metrics["threads"] == 1 for result in results)
    assert executor.profile.epsilon > 0.0


@pytest.mark.slow
def test_the_last_one_spreads_and_makes_room_again(submit: Callable[..., Any]) -> None:
    short, long = submit("short", 5), submit("long", MANY)
    finished(short)
    until(long.results(), lambda result: result.width == 2.0)
    newcomer = submit("new", 5)
    told = long.results()
    wide = until(told, lambda result: result.width == 2.0)
    until(told, lambda result: result.iteration > wide.iteration and result.width == 1.0)
    as_alone(finished(newcomer))
    as_alone(stopped(long))


@pytest.mark.slow
def test_an_idle_device_is_kept_for_who_may_come(submit: Callable[..., Any]) -> None:
    """As long as it would take to set a part of another trial up there, for which who comes would have to wait."""
    long = submit("long", MANY, setup=0.8)
    until(long.results(), lambda result: True)
    for number in range(5):
        finished(submit(f"short-{number}", 3, setup=0.8))
        time.sleep(0.2)
    iteration, _ = long.call(_trial_ids[long], "tell", 0).result()
    wide = until(long.results(), lambda result: result.width == 2.0)
    assert wide.iteration > iteration
    as_alone(stopped(long))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lane_that_is_killed_in_a_wide_trial_costs_no_iteration(submit: Callable[..., Any], rank: int) -> None:
    handle = submit("a", MANY)
    wide = until(handle.results(), lambda result: result.width == 2.0)
    os.kill(wide.metrics["pids"][rank], signal.SIGKILL)
    until(handle.results(), lambda result: result.iteration > wide.iteration and result.width == 1.0)
    results = stopped(handle)
    as_alone(results)
    after = next(result for result in results if result.iteration > wide.iteration and result.width == 1.0)
    assert after.metrics["pids"] == [wide.metrics["pids"][1 - rank]], "the other one went on"


@pytest.mark.slow
def test_a_wide_trial_that_loses_all_its_lanes_at_once_goes_on_from_its_checkpoint(submit: Callable[..., Any]) -> None:
    handle = submit("a", MANY)
    wide = until(handle.results(), lambda result: result.width == 2.0)
    for pid in wide.metrics["pids"]:
        os.kill(pid, signal.SIGKILL)
    after = until(handle.results(), lambda result: result.iteration > wide.iteration + 5)
    assert not set(after.metrics["pids"]) & set(wide.metrics["pids"])
    as_alone(stopped(handle))


@pytest.mark.slow
def test_a_wide_trial_can_be_stopped_and_extended(submit: Callable[..., Any]) -> None:
    first = submit("b", MANY)
    until(first.results(), lambda result: result.width == 2.0)
    stopped(first)
    handle = submit("a", 150)  # Of which it is known by now that width pays.
    trial_id = _trial_ids[handle]
    until(handle.results(), lambda result: result.width == 2.0)
    handle.extend(trial_id, 5)
    assert len(finished(handle)) == 155
    handle.extend(trial_id, 5)
    as_alone(finished(handle))
    as_alone(finished(submit("c", 3)))


@pytest.mark.slow
def test_a_trial_that_cannot_be_set_up_elsewhere_stays_where_it_is(submit: Callable[..., Any], tmp_path: Path) -> None:
    results = finished(submit("a", 60, fails_but_once=str(tmp_path / "claimed")))
    as_alone(results)
    assert {result.width for result in results} == {1.0} and len({str(r.metrics["pids"]) for r in results}) == 1


@pytest.mark.slow
def test_what_is_not_elastic_is_never_widened(submit: Callable[..., Any]) -> None:
    results = finished(submit("a", 30, Rigid))
    assert {result.width for result in results} == {1.0}


def test_process_groups_are_checked_at_the_call(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(InvalidFieldError, match="process_group"):
        FluidExecutor(backend="local", devices=2, run_dir=tmp_path, process_group="smoke signals")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"scripts/build_horovod\.py"):
        FluidExecutor(backend="local", devices=2, run_dir=tmp_path, process_group="horovod")


# -- command by command -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    """Three CPU devices, and a process with PyTorch from which lanes are forked."""
    folder = tmp_path_factory.mktemp("three")
    with LocalBackend(3, run_dir=folder, preload=["torch", "torch._dynamo"], grace=0.2) as backend:
        yield backend


@pytest.fixture
def three(warm: LocalBackend, drive_on: Callable[..., Any]) -> Iterator[Any]:
    """Three CPU devices without a lane."""
    drive = drive_on(warm, lanes=next(_numbers))
    yield drive
    drive.do(*(StopTrial(trial_id, tuple(drive.started)) for trial_id in ("a", "b")))
    drive.do(*(StopLane(lane_id) for lane_id in drive.started))


def train(drive: Any, trial_id: str, count: int) -> list[IterationDone]:
    return [drive.of(IterationDone, trial_id) for _ in range(count)]


def seen(drive: Any) -> list[IterationDone]:
    """Iterations that have been reported and not looked at."""
    found = [event for event in drive.seen if isinstance(event, IterationDone)]
    drive.seen = [event for event in drive.seen if event not in found]
    return found


@pytest.mark.slow
def test_a_trial_trains_in_several_lanes_from_the_start(three: Any) -> None:
    lanes = tuple(three.lanes(0, 1, 2))
    three.backend.register("a", payload_of(Paced, {}))
    three.do(StartTrial("a", lanes, iterations=3))
    assert three.of(TrialStarted, "a").lane_id == lanes[0]
    done = train(three, "a", 3)
    three.do(RunIteration("a", lanes, 2))
    done += train(three, "a", 2)
    as_alone(done)
    assert all(event.lane_id == lanes[0] and len(event.metrics["pids"]) == 3 for event in done)


@pytest.mark.slow
def test_pause_save_restore_and_stop_in_several_lanes(three: Any) -> None:
    a, b, c = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Paced, {}))
    three.do(StartTrial("a", (a, b), iterations=MANY))
    assert three.of(TrialStarted, "a").iteration == 0
    done = train(three, "a", 3)
    three.do(Call("a", (a,), call_id=1, method="tell", payload=dump_arguments((7,), {})))
    assert three.of(TrialCalled, "a").failure is None
    three.backend.register("f", payload_of(Paced, {}))
    three.do(Fork("a", (a,), child="f", at=30))
    forked = three.of(TrialForked, "f")
    assert (forked.lane_id, forked.checkpoint.iteration) == (a, 30)
    three.do(Pause("a", (a, b), purpose=PausePurpose.PREEMPT))
    paused = three.of(TrialPaused, "a")
    done += seen(three)
    assert paused.iteration == len(done) and paused.lane_id == a
    three.do(StartTrial("f", (c,), iterations=1, checkpoint=forked.checkpoint, must_restore=True))
    (on,) = train(three, "f", 1)
    assert on.iteration == 31 and on.metrics["loss"] == pytest.approx(losses(31)[-1], rel=1e-5)
    three.do(StopTrial("f", (c,)))
    assert three.of(TrialReleased, "f").lane_id == c
    three.do(Save("a", (a, b)))
    assert three.until(TrialSaved, lambda event: event.checkpoint.iteration == paused.iteration).lane_id == a
    three.do(Save("a", (a, b), drop=True))
    saved = three.until(TrialSaved, lambda event: event.dropped)
    assert saved.checkpoint.iteration == paused.iteration
    three.do(StartTrial("a", (c, b, a), iterations=MANY, checkpoint=saved.checkpoint))
    assert three.of(TrialStarted, "a").iteration == paused.iteration
    done += train(three, "a", 2)
    as_alone(done)
    three.do(StopTrial("a", (c, b, a)))
    assert {three.of(TrialReleased, "a").lane_id for _ in range(3)} == {a, b, c}


@pytest.mark.slow
def test_lanes_whose_checkpoint_is_damaged_agree_on_the_one_before(three: Any) -> None:
    a, b, c = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Paced, {}))
    three.do(StartTrial("a", (a,), iterations=2))
    assert three.of(TrialStarted, "a").iteration == 0
    done = train(three, "a", 2)
    three.do(Save("a", (a,)))
    assert three.until(TrialSaved, lambda event: event.checkpoint.iteration == 2)
    three.do(RunIteration("a", (a,), 2))
    done += train(three, "a", 2)
    three.do(Save("a", (a,), drop=True))
    saved = three.until(TrialSaved, lambda event: event.dropped).checkpoint
    (Path(saved.path) / "state/elastic.pt").write_bytes(b"")
    three.do(StartTrial("a", (b, c), iterations=4, checkpoint=saved))
    back = three.of(TrialSetBack, "a", lane_id=b)
    before = back.checkpoint.iteration
    assert before in (2, 3), "where iterations take long, the third is saved, too"
    assert "elastic.pt has 0 bytes" in back.reason
    assert three.of(TrialStarted, "a").iteration == before
    again = train(three, "a", 4)
    as_alone([*done[:before], *again])
    three.do(StopTrial("a", (b, c)))
    assert {three.of(TrialReleased, "a").lane_id for _ in range(2)} == {b, c}


@pytest.mark.parametrize("ahead", [True, False])
def test_a_trial_moves_between_lanes_that_have_nothing_in_common(three: Any, ahead: bool) -> None:
    a, b, c = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Paced, {}))
    three.do(StartTrial("a", (a,), iterations=MANY))
    done = train(three, "a", 2)
    three.do(Pause("a", (a,), purpose=PausePurpose.RESIZE, next_lane_ids=(b, c) if ahead else ()))
    iteration = three.of(TrialPaused, "a").iteration
    done += seen(three)
    assert iteration == len(done)
    three.do(Resize("a", (b, c), (a,), iterations=2))
    assert three.of(ResizeDone, "a").lane_id == b
    done += train(three, "a", 2)
    three.do(Resize("a", (a,), (b, c), iterations=2))
    assert three.of(ResizeDone, "a").lane_id == a
    done += train(three, "a", 2)
    as_alone(done)
    assert [len(event.metrics["pids"]) for event in done[-4:]] == [2, 2, 1, 1]


def test_a_trial_is_fetched_although_a_widening_of_it_was_called_off(three: Any) -> None:
    a, b, _ = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Paced, {}))
    three.do(StartTrial("a", (a,), iterations=2))
    three.of(TrialStarted, "a")
    # As it comes to its end: it is done, and the engine does not resize it.
    three.do(Pause("a", (a,), purpose=PausePurpose.RESIZE, next_lane_ids=(a, b)))
    iteration = three.of(TrialPaused, "a").iteration
    done = seen(three)
    assert iteration == len(done)
    three.do(Save("a", (a,), drop=True))
    saved = three.until(TrialSaved, lambda event: event.dropped)
    three.do(StartTrial("a", (b, a), iterations=2, checkpoint=saved.checkpoint))
    assert three.of(TrialStarted, "a").iteration == saved.checkpoint.iteration == iteration
    as_alone(done + train(three, "a", 2))
    three.do(StopTrial("a", (b, a)))
    assert {three.of(TrialReleased, "a").lane_id for _ in range(2)} == {a, b}


def test_a_rank_that_raises_fails_the_trial_and_no_lane(three: Any) -> None:
    a, b, _ = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Paced, {"raises_at": 2}))
    three.do(StartTrial("a", (a, b), iterations=MANY))
    failed = three.of(TrialFailed, "a")
    assert failed.lane_id == b and failed.failure.message == "ValueError: on purpose"
    three.do(StopTrial("a", (a,)))
    assert three.of(TrialReleased, "a").lane_id == a
    three.backend.register("b", payload_of(Paced, {}))
    three.do(StartTrial("b", (b, a), iterations=2))
    as_alone(train(three, "b", 2))


def test_who_is_left_waits_to_be_told_how_to_go_on(three: Any) -> None:
    a, b, c = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Paced, {}))
    three.do(StartTrial("a", (a, b, c), iterations=MANY))
    done = train(three, "a", 2)
    os.kill(done[-1].metrics["pids"][0], signal.SIGKILL)
    assert three.until(LaneLost).lane_id == a
    done += seen(three)
    three.do(Resize("a", (b, c), (b, c), iterations=MANY, done=len(done)))
    assert three.of(ResizeDone, "a").lane_id == b
    done += seen(three)
    done += train(three, "a", 3)
    as_alone(done)
    three.do(StopTrial("a", (b, c)))
    assert {three.of(TrialReleased, "a").lane_id for _ in range(2)} == {b, c}


def test_what_is_not_elastic_cannot_be_in_several_lanes(three: Any) -> None:
    a, b, _ = three.lanes(0, 1, 2)
    three.backend.register("a", payload_of(Rigid, {}))
    with pytest.raises(FluidError, match="one lane only"):
        three.do(StartTrial("a", (a, b), iterations=1))

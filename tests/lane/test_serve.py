"""A lane on its own: messages in, messages out."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lane_messages as to
import pytest
from msgspec import structs

from fluid.engine.commands import Call
from fluid.engine.events import (
    Checkpoint,
    IterationDone,
    LaneReady,
    TrialCalled,
    TrialFailed,
    TrialPaused,
    TrialSaved,
    TrialStarted,
)
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.process.state import read_running_trial
from fluid.lane.protocol import KeepBar, KeptPayload, PayloadMissing, ShipTrainable
from fluid.resources import MemoryNeed
from fluid.trainables.exception_pickle import load_exception
from fluid.trainables.pickling import dump_arguments, dump_config, dump_trainable


class Counter:
    """Counts, and does what its config says on the way."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        if self.count == self.config.get("hang_at"):
            threading.Event().wait()
        return {"count": self.count, "draw": random.random(), "done": self.count == self.config.get("done_at")}

    def add(self, number: int = 1, *, then_raise: BaseException | None = None) -> Any:
        self.count += number
        if then_raise is not None:
            raise then_raise
        return self.count, random.random()

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(str(self.count), encoding="utf-8")
        if self.config.get("save_fails"):
            raise OSError("cannot be saved")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int(Path(folder, "count").read_text(encoding="utf-8"))


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Callable[..., Any]:
    server = make_server()

    def make(lane_id: int = 0, **options: Any) -> Any:
        lane = fork(server, lane_id, **options)
        lane.receive(LaneReady)
        return lane

    return make


@pytest.fixture
def lane(make_lane: Callable[..., Any]) -> Any:
    return make_lane()


def test_a_burst_is_answered_iteration_by_iteration(lane: Any) -> None:
    lane.start("a", Counter, {}, 3)
    started = lane.receive(TrialStarted)
    assert (started.trial_id, started.iteration) == ("a", 0)
    done = [lane.receive(IterationDone) for _ in range(3)]
    assert [(one.iteration, one.metrics["count"], one.finished) for one in done] == [
        (1, 1, False),
        (2, 2, False),
        (3, 3, False),
    ]
    assert started.at <= done[0].at <= done[1].at <= done[2].at
    lane.send(to.run("a", 1), to.run("a", 1))
    assert [lane.receive(IterationDone).iteration for _ in range(2)] == [4, 5]


def test_what_is_done_is_told_while_the_next_iteration_runs(lane: Any) -> None:
    lane.start("a", Counter, {"hang_at": 2}, 2)
    # Short iterations are reported together, but not that late.
    assert lane.receive(IterationDone).iteration == 1


def test_extensions_and_pauses_take_effect_in_a_burst(lane: Any) -> None:
    lane.start("a", Counter, {}, 10**9)
    lane.receive(IterationDone)
    lane.send(to.pause("a"))
    at = lane.receive(TrialPaused).iteration
    lane.send(to.pause("a"), to.run("a", 2))
    assert lane.receive(TrialPaused).iteration == at
    numbers = [message.iteration for message in lane.messages if isinstance(message, IterationDone)]
    while not numbers or numbers[-1] < at + 2:
        numbers.append(lane.receive(IterationDone).iteration)
    assert numbers[-2:] == [at + 1, at + 2]


class Awaited:
    """Each step lasts until a pipe that it opens was closed."""

    def setup(self, config: dict[str, Any]) -> None:
        self.pipe = config["pipe"]

    def step(self) -> dict[str, Any]:
        Path(self.pipe).read_bytes()
        return {}


def test_a_pause_waits_behind_no_messages_that_came_before_it(lane: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lane.start("a", Awaited, {"pipe": str(pipe)}, 9)
    with pipe.open("wb"):  # It is in its first iteration now.
        for _ in range(3):
            lane.send(KeepBar("g", None, None))
        lane.send(to.pause("a"))
    assert lane.receive(TrialPaused).iteration == 1


def test_a_trial_that_says_done_runs_no_further(lane: Any) -> None:
    lane.start("a", Counter, {"done_at": 2}, 5)
    assert [lane.receive(IterationDone).finished for _ in range(2)] == [False, True]
    lane.send(to.run("a", 3))
    nothing = lane.receive(IterationDone)
    assert (nothing.iteration, nothing.metrics, nothing.finished) == (2, {}, True)
    lane.send(to.save("a", True))
    lane.start("a", Counter, {"done_at": 2}, 3, lane.receive(TrialSaved).checkpoint)
    again = lane.receive(IterationDone)
    assert structs.replace(again, at=nothing.at) == nothing


def test_one_trial_may_fail_in_the_middle_of_another(lane: Any) -> None:
    lane.start("long", Counter, {}, 10**9)
    lane.receive(IterationDone)
    lane.send(to.set_up("bad", 99, b"", 1))
    assert lane.receive(TrialFailed).trial_id == "bad"
    lane.send(to.pause("long"))
    lane.receive(TrialPaused)


def test_messages_about_trials_that_are_not_there_are_ignored(lane: Any) -> None:
    lane.send(to.run("a", 1), to.pause("a"), to.save("a", True), to.release("a"))
    lane.start("b", Counter, {}, 1)
    lane.receive(IterationDone)
    assert not [message for message in lane.messages if getattr(message, "trial_id", "b") != "b"]


def test_starting_a_trial_again_replaces_it(lane: Any) -> None:
    lane.start("a", Counter, {}, 3)
    assert [lane.receive(IterationDone).metrics["count"] for _ in range(3)] == [1, 2, 3]
    lane.start("a", Counter, {}, 1)
    assert lane.receive(IterationDone).metrics["count"] == 1


def test_metrics_become_plain_numbers(lane: Any) -> None:
    numpy = pytest.importorskip("numpy")

    class Metrics:
        def __init__(self, config: dict[str, Any]) -> None:
            pass

        def step(self) -> dict[str, Any]:
            return {"scalar": numpy.float32(0.5), "zero": numpy.array(3), "many": numpy.arange(3), "list": [1, (2, {})]}

    lane.start("a", Metrics, {}, 1)
    metrics = lane.receive(IterationDone).metrics
    assert list(metrics.pop("many")) == [0, 1, 2]
    assert metrics == {"scalar": 0.5, "zero": 3, "list": [1, (2, {})]}
    assert [type(metrics[name]) for name in ("scalar", "zero")] == [float, int]


@pytest.mark.slow
def test_short_iterations_of_a_trial_are_one_message(lane: Any) -> None:
    """Whatever the trial does to what it has reported: a message is what it had at the report."""
    from iteration_runs import one_by_one  # Lanes import this file, and are not to load the engine.

    class Appends:
        def __init__(self, config: dict[str, Any]) -> None:
            self.curve: list[int] = []

        def step(self) -> dict[str, Any]:
            self.curve.append(len(self.curve))
            return {"curve": self.curve, "one": {"same": self.curve}}

    lane.start("a", Appends, {}, 200)
    sent: list[Any] = []
    while sum(1 if one.run is None else len(one.run.at) for one in sent) < 200:
        sent += [message for message in lane.wire.receive() if isinstance(message, IterationDone)]
    assert len(sent) < 100, "most are told together"
    runs = [message.run for message in sent if message.run is not None]
    assert all(len(set(map(len, run))) == 1 and sorted(run.at) == list(run.at) for run in runs)
    done = [each for message in sent for each in one_by_one(message)]
    assert [each.iteration for each in done] == list(range(1, 201))
    for each in done:
        assert each.metrics == {"curve": list(range(each.iteration)), "one": {"same": list(range(each.iteration))}}


# -- calls ----------------------------------------------------------------------------------------------------------


def call(trial_id: str, number: int, *args: Any, method: str = "add", **kwargs: Any) -> Call:
    return to.call(trial_id, number, method, dump_arguments(args, kwargs))


def test_a_method_is_called_between_two_iterations(lane: Any) -> None:
    lane.start("a", Counter, {}, 10**9)
    lane.receive(IterationDone)
    lane.send(call("a", 1, 1000), to.pause("a"))
    called = lane.receive(TrialCalled)
    assert (called.trial_id, called.call_id, called.failure) == ("a", 1, None)
    count, _ = pickle.loads(called.result)
    at = lane.receive(TrialPaused).iteration
    assert count == at + 1000, "nothing ran between the call and the pause"


def test_what_a_method_raises_is_brought_along_and_the_trial_goes_on(lane: Any) -> None:
    lane.start("a", Counter, {}, 1)
    assert lane.receive(IterationDone).metrics["count"] == 1
    lane.send(call("a", 1, 5, then_raise=KeyError("why")), call("a", 2, method="nothing"), to.run("a", 1))
    raised = lane.receive(TrialCalled).failure
    assert (raised.kind, raised.message) == ("error", "KeyError: 'why'")
    assert "in add" in raised.traceback
    assert repr(load_exception(raised.exception)) == "KeyError('why')"
    assert "has no attribute 'nothing'" in lane.receive(TrialCalled).failure.message
    assert lane.receive(IterationDone).metrics["count"] == 7


@pytest.mark.parametrize("ends", [SystemExit(3), MemoryError()])
def test_a_method_that_wants_to_end_the_process_does_not(lane: Any, ends: BaseException) -> None:
    lane.start("a", Counter, {}, 1)
    lane.send(call("a", 1, then_raise=ends), to.run("a", 1))
    assert lane.receive(TrialCalled).failure.kind == ("error" if isinstance(ends, SystemExit) else "out_of_memory")
    assert [lane.receive(IterationDone).iteration for _ in range(2)] == [1, 2]


def test_a_result_that_cannot_be_pickled_is_an_error(lane: Any) -> None:
    class Strange(Counter):
        def give(self) -> Any:
            return threading.Lock()

    lane.start("a", Strange, {}, 0)
    lane.send(call("a", 1, method="give"))
    assert "what the method returned cannot be pickled" in lane.receive(TrialCalled).failure.message


def test_generators_and_trials_that_are_not_there_are_not_called(lane: Any) -> None:
    def train(config: dict[str, Any]) -> Any:
        yield {"x": 1}

    lane.start("a", train, {}, 1)
    lane.send(call("b", 1), call("a", 2))
    called = lane.receive(TrialCalled)
    assert called.call_id == 2 and "a function has no methods" in called.failure.message


def test_a_call_sees_the_state_of_its_own_trial(lane: Any) -> None:
    class Seeded(Counter):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            random.seed(config["seed"])

    for name in "ab":
        lane.start(name, Seeded, {"seed": 7}, 0)
        lane.receive(TrialStarted)
    lane.send(call("a", 1), call("b", 2), call("a", 3), call("b", 4))
    draws = [pickle.loads(lane.receive(TrialCalled).result)[1] for _ in range(4)]
    expected = random.Random(7)
    first, second = expected.random(), expected.random()
    assert draws == [first, first, second, second]


class Large(Exception):
    """Carries more than is worth sending."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = bytes(2**21)


class Picky(Exception):
    """Its message is not its argument, which pickle cannot deal with."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("kind", "args", "kept"),
    [(ValueError, ("why",), ("why",)), (Picky, (1, 2), ("1 and 2",)), (Large, (), ())],
)
def test_what_a_trial_raised_is_brought_along(
    lane: Any, tmp_path: Path, kind: type[Exception], args: tuple[Any, ...], kept: tuple[Any, ...]
) -> None:
    class Raises:
        def __init__(self, config: dict[str, Any]) -> None:
            pass

        def step(self) -> dict[str, Any]:
            raise kind(*args)

    lane.start("a", Raises, {}, 1)
    failed = lane.receive(TrialFailed)
    assert kind.__name__ in failed.failure.message
    raised = load_exception(failed.failure.exception)
    assert type(raised) is kind and raised.args == kept
    log = (tmp_path / "trials/a/output.log").read_text(encoding="utf-8")
    assert log.startswith("Traceback") and "raise kind(*args)\n" in log and kind.__name__ in log


# -- automatic saves ------------------------------------------------------------------------------------------------


def test_a_trial_is_saved_once_enough_work_would_be_lost(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=0.0, save_ratio=0.0)
    lane.start("a", Counter, {}, 4)
    told = [lane.receive(TrialSaved) for _ in range(4)]
    saved = [one.checkpoint for one in told]
    assert [one.iteration for one in saved] == [1, 2, 3, 4]
    assert not any(one.dropped or one.checkpoint.in_memory for one in told)
    # The last two are kept.
    assert [Path(one.path).is_dir() for one in saved] == [False, False, True, True]


def test_a_trial_is_not_saved_for_little(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=1e9)
    lane.start("a", Counter, {}, 50)
    for _ in range(50):
        lane.receive(IterationDone)
    lane.send(to.pause("a"))
    lane.receive(TrialPaused)
    assert not any(isinstance(message, TrialSaved) for message in lane.messages)


def test_a_trial_that_comes_to_rest_is_saved_as_it_is(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=1e9, save_ratio=0.0, idle_save_after=0.0)
    lane.start("a", Counter, {}, 3)
    assert [lane.receive(TrialSaved).checkpoint.iteration, lane.receive(IterationDone).iteration] == [3, 1]
    lane.send(call("a", 1))  # It may have changed it.
    assert lane.receive(TrialSaved).checkpoint.iteration == 3
    lane.start("b", Counter, {"done_at": 2}, 3)  # A trial that has no more to do is not continued.
    assert [lane.receive(IterationDone, "b").iteration for _ in range(2)] == [1, 2]
    lane.ask(after="1")
    assert not any(isinstance(message, TrialSaved) for message in lane.messages)


def test_a_trial_that_makes_way_is_saved_as_it_is_unless_it_goes_on_at_once(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=1e9, save_ratio=0.0, idle_save_after=0.0)
    for name, may_move in (("moved", False), ("makes way", True)):
        lane.start(name, Counter, {}, 10**6)
        lane.receive(IterationDone, name)
        lane.send(to.pause(name, may_move))
        paused = lane.receive(TrialPaused)
        if may_move:
            assert lane.receive(TrialSaved).checkpoint.iteration == paused.iteration
    assert not any(isinstance(message, TrialSaved) for message in lane.messages)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"idle_save_after": 9.0}, {"idle_save_after": 0.0, "save_ratio": 1e9}])
def test_one_that_is_quicker_to_wait_for_than_to_save_is_not(make_lane: Callable[..., Any], options: Any) -> None:
    lane = make_lane(save_after=1e9, **options)
    for name in "ab":  # What the first one's save costs is known of the second one.
        lane.start(name, Counter, {}, 1)
        lane.receive(IterationDone, name)
    lane.ask(after="1")
    saved = [message.trial_id for message in lane.messages if isinstance(message, TrialSaved)]
    assert saved == ([] if options["idle_save_after"] else ["a"])


@pytest.mark.slow
def test_a_trial_that_cannot_be_saved_runs_on(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    lane = make_lane(save_after=0.0, save_ratio=0.0)
    lane.start("a", Counter, {"save_fails": True}, 3)
    assert [lane.receive(IterationDone).iteration for _ in range(3)] == [1, 2, 3]
    assert "cannot be saved" in (tmp_path / "trials/a/output.log").read_text(encoding="utf-8")
    lane.send(to.save("a", False))  # Asked for it, it fails.
    assert lane.receive(TrialFailed).failure.message == "OSError: cannot be saved"


def test_an_automatic_save_that_exits_does_not_end_the_lane(make_lane: Callable[..., Any]) -> None:
    class Exits(Counter):
        def save_checkpoint(self, folder: str) -> None:
            raise SystemExit

    lane = make_lane(save_after=0.0, save_ratio=0.0)
    lane.start("a", Exits, {}, 2)
    assert [lane.receive(IterationDone).iteration for _ in range(2)] == [1, 2]


@pytest.mark.slow
def test_saving_does_not_change_what_comes_after(make_lane: Callable[..., Any]) -> None:
    class Noisy(Counter):
        def save_checkpoint(self, folder: str) -> None:
            random.seed(1)
            super().save_checkpoint(folder)

    draws = []
    saved = None
    for options in ({"save_after": 1e9}, {"save_after": 0.0, "save_ratio": 0.0}):
        lane = make_lane(len(draws), **options)
        if saved is None:
            lane.start("a", Noisy, {}, 1)
            lane.receive(IterationDone)
            lane.send(to.save("a", False))
            saved = lane.receive(TrialSaved).checkpoint
            os.rename(saved.path, f"{saved.path}.kept")
        lane.start("a", Noisy, {}, 3, Checkpoint(1, f"{saved.path}.kept"))
        draws.append([lane.receive(IterationDone).metrics["draw"] for _ in range(3)])
    assert draws[0] == draws[1]


@pytest.mark.slow
def test_host_memory_is_used_first_and_disk_when_it_is_full(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    for name, room in (("roomy", 10**6), ("full", 0), ("without a ledger", None)):
        (memory / name).mkdir(parents=True)
        if room is not None:
            StoreLedger(str(memory / name)).create(room, room)
    folders = [memory / "roomy", memory / "full", memory / "without a ledger", tmp_path / "none"]
    for number, folder in enumerate(folders):
        lane, in_memory = make_lane(number, memory_folder=str(folder)), number == 0
        lane.start("a", Counter, {}, 1)
        lane.receive(IterationDone)
        lane.send(to.save("a", False))
        saved = lane.receive(TrialSaved).checkpoint
        assert saved.in_memory is in_memory
        assert Path(saved.path).is_relative_to(memory) is in_memory
        assert Path(saved.path, "state/count").read_text(encoding="utf-8") == "1"


def test_a_lane_killed_while_it_saves_leaves_the_older_checkpoint(make_lane: Callable[..., Any]) -> None:
    class Dies(Counter):
        def save_checkpoint(self, folder: str) -> None:
            super().save_checkpoint(folder)
            if self.count == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    lane = make_lane(0)
    lane.start("a", Dies, {}, 1)
    lane.receive(IterationDone)
    lane.send(to.save("a", False))
    saved = lane.receive(TrialSaved).checkpoint
    other = make_lane(1)
    lane.send(to.run("a", 1))
    lane.receive(IterationDone)
    lane.send(to.save("a", False))
    with pytest.raises(AssertionError, match="the lane ended"):
        lane.receive(TrialSaved)
    other.start("a", Counter, {}, 1, saved)
    assert other.receive(IterationDone).metrics["count"] == 2


# -- what belongs to a resident -----------------------------------------------------------------------------------


class Nomad:
    """Goes to a folder of its own, and logs through a handler that the first of its kind set up."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.chdir(config["folder"])
        random.seed(config["seed"])
        if not logging.getLogger("nomad").handlers:
            logging.getLogger("nomad").addHandler(logging.StreamHandler())
        self.name = config["name"]

    def step(self) -> dict[str, Any]:
        logging.getLogger("nomad").warning("from %s", self.name)
        print("to stderr", file=sys.stderr)
        return {"folder": os.getcwd(), "draw": random.random()}


def test_residents_do_not_see_each_other(lane: Any, tmp_path: Path) -> None:
    names = ["a", "b"]
    for seed, name in enumerate(names):
        (tmp_path / name).mkdir()
        lane.start(name, Nomad, {"folder": str(tmp_path / name), "seed": seed, "name": name}, 0)
    draws: dict[str, list[float]] = {name: [] for name in names}
    for name in names * 3:
        lane.send(to.run(name, 1))
        metrics = lane.receive(IterationDone).metrics
        assert metrics["folder"] == str(tmp_path / name)
        draws[name].append(metrics["draw"])
    for seed, name in enumerate(names):
        expected = random.Random(seed)
        assert draws[name] == [expected.random() for _ in range(3)]
        log = (tmp_path / "trials" / name / "output.log").read_text(encoding="utf-8")
        assert log == f"from {name}\nto stderr\n" * 3


class Reader:
    """Reads the lane's note while its own code runs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def step(self) -> dict[str, Any]:
        return {"note": read_running_trial(self.config["note"])}


def test_the_note_tells_whose_code_runs(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    note = str(tmp_path / "note")
    lane = make_lane(note=note)
    assert read_running_trial(note) is None
    for name in ("kåre/2", "x" * 10):
        lane.start(name, Reader, {"note": note}, 2)
        assert [lane.receive(IterationDone).metrics for _ in range(2)] == [{"note": name}] * 2
        assert read_running_trial(note) is None


@pytest.mark.slow
def test_a_lane_notices_that_the_driver_is_gone(make_lane: Callable[..., Any], processes: Any) -> None:
    idle, busy = make_lane(0), make_lane(1)
    for lane in (idle, busy):
        processes.watch(lane.ask(pid="os.getpid()")["pid"])
    busy.start("a", Counter, {"hang_at": 1}, 1)
    busy.receive(TrialStarted)
    for lane in (idle, busy):
        lane.wire.close()
    assert processes.have_ended(within=30.0)


def test_a_process_of_a_trial_does_not_keep_the_connection(make_lane: Callable[..., Any], processes: Any) -> None:
    class Forks(Counter):
        def step(self) -> dict[str, Any]:
            child = os.fork()
            if child == 0:
                threading.Event().wait()
            return {"child": child, "pid": os.getpid()}

    lane = make_lane()
    lane.start("a", Forks, {}, 1)
    metrics = lane.receive(IterationDone).metrics
    processes.watch(metrics["child"])
    os.kill(metrics["pid"], signal.SIGKILL)
    with pytest.raises(AssertionError, match="the lane ended"):
        lane.receive(IterationDone)
    assert processes.have_ended(within=30.0)


# -- several trials with iterations left ----------------------------------------------------------------------------


class Timed:
    """Takes 20 ms for each iteration, by a clock that is its own: that of the lane is put aside."""

    passed = 0.0

    def __init__(self, config: dict[str, Any]) -> None:
        from fluid._clock import MonotonicClock

        MonotonicClock.now = lambda clock: type(self).passed  # type: ignore[method-assign]

    def step(self) -> dict[str, Any]:
        type(self).passed += 0.02
        return {}


def order_of(lane: Any, iterations: dict[str, int]) -> str:
    """Which trial ran, iteration by iteration; all that is asked for comes at once."""
    lane.send(ShipTrainable(0, dump_trainable(Timed), ()))
    lane.send(*(to.set_up(name, 0, dump_config({}), count) for name, count in iterations.items()))
    return "".join(lane.receive(IterationDone).trial_id for _ in range(sum(iterations.values())))


def test_srtf_runs_the_shortest_first(make_lane: Callable[..., Any]) -> None:
    order = order_of(make_lane(policy="srtf"), {"a": 30, "b": 3, "c": 20})
    assert order == "cab" + "b" * 2 + "c" * 19 + "a" * 29, "once an iteration of each has told"


def test_pack_runs_the_longest_first(make_lane: Callable[..., Any]) -> None:
    order = order_of(make_lane(policy="longest_first"), {"a": 3, "b": 30, "c": 5})
    assert order.startswith("cab" + "b" * 24)
    assert order[-4:] != "bbbb" and {"a", "b", "c"} == set(order[-8:]), "what is left at any time is even"


@pytest.mark.slow
def test_fair_runs_all_alike(make_lane: Callable[..., Any]) -> None:
    order = order_of(make_lane(policy="fair"), {"a": 40, "b": 40})
    leads = [order[:count].count("a") - order[:count].count("b") for count in range(1, 81)]
    assert -4 <= min(leads) < 0 < max(leads) <= 4, "in turns, and none is far ahead"


class Refuses:
    """Cannot be pickled, and wants to end the process."""

    def __reduce__(self) -> Any:
        raise SystemExit


class BadMetrics(Counter):
    """Reports a metric that cannot be pickled."""

    def step(self) -> dict[str, Any]:
        return {"good": 1, "bad": Refuses()}


@pytest.mark.slow
def test_a_metric_whose_pickling_exits_fails_its_trial_only(lane: Any) -> None:
    lane.start("b", Counter, {}, 0)
    lane.start("a", BadMetrics, {}, 1)
    failed = lane.receive(TrialFailed, "a")
    assert failed.failure.message.startswith("TypeError: these metrics cannot be pickled: bad")
    lane.send(to.run("b", 1))
    assert lane.receive(IterationDone, "b").iteration == 1


# -- faults that are contagious -------------------------------------------------------------------------------------


class Faults:
    """Raises when asked to; its device is then found to be of no use, as after a fault under MPS."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.fatal = config["fatal"]

    def step(self) -> dict[str, Any]:
        from fluid.lane.device.device import DeviceMemoryMeter

        DeviceMemoryMeter.is_usable = lambda self, error="", **_: False  # type: ignore[method-assign]
        raise MemoryError if not self.fatal else RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "fatal", "told"),
    [
        ((("CUDA_MPS_PIPE_DIRECTORY", "/x"),), True, False),
        ((("CUDA_MPS_PIPE_DIRECTORY", "/x"),), False, True),
        ((), True, True),
    ],
)
def test_under_mps_a_lane_whose_device_failed_names_no_trial(
    make_lane: Callable[..., Any], tmp_path: Path, environment: Any, fatal: bool, told: bool
) -> None:
    """What the trial raised may be another one's doing; who dies with whom tells, and the note says who ran."""
    note = str(tmp_path / "note")
    lane = make_lane(environment=environment, note=note)
    lane.start("a", Faults, {"fatal": fatal}, 1)
    if told:
        failed = lane.receive(TrialFailed)
        assert (failed.trial_id, failed.failure.kind) == ("a", "device" if fatal else "out_of_memory")
        assert read_running_trial(note) is None
        return
    with pytest.raises(AssertionError, match="the lane ended"):
        lane.receive(TrialFailed)
    assert read_running_trial(note) == "a"
    assert "unspecified launch failure" in (tmp_path / "logs" / "lane-0.log").read_text(encoding="utf-8")


def test_a_lane_has_the_environment_it_is_given(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(environment=(("CUDA_MPS_PIPE_DIRECTORY", "/x"), ("CUDA_VISIBLE_DEVICES", "GPU-1")), visible="")
    asked = lane.ask(pipe="os.environ['CUDA_MPS_PIPE_DIRECTORY']", gpu="os.environ['CUDA_VISIBLE_DEVICES']")
    assert asked == {"pipe": "/x", "gpu": "GPU-1"}


@pytest.mark.slow
def test_a_lane_reads_payloads_that_its_host_keeps(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    folders = (str(tmp_path / "memory"), str(tmp_path / "disk"))
    lane = make_lane(payload_folders=folders)
    for folder, name, data in zip(folders, ("t", "c"), (dump_trainable(Timed), dump_config({})), strict=True):
        os.makedirs(folder)
        Path(folder, name).write_bytes(data)
    lane.send(ShipTrainable(0, KeptPayload("t"), ()), to.set_up("a", 0, KeptPayload("c"), 1))
    lane.receive(IterationDone, "a")
    os.unlink(os.path.join(folders[0], "t"))  # It was read.
    lane.send(to.set_up("b", 0, KeptPayload("none"), 1), to.set_up("c", 0, dump_config({}), 1))
    assert lane.receive(PayloadMissing).name == "none"
    failed = lane.receive(TrialFailed, "b")
    assert "FileNotFoundError: none is in none of" in failed.failure.message
    lane.receive(IterationDone, "c")


class Fragmenting:
    """Keeps 50 MB in tensors, which hold segments of 90 MB, and takes 300 MB meanwhile, of a stand-in for PyTorch."""

    def setup(self, config: dict[str, Any]) -> None:
        self.usage = {"allocated_bytes": {"current": 0.0, "peak": 0.0}, "reserved_bytes": {"current": 0.0, "peak": 0.0}}
        self.emptied = 0
        self.share = 1.0
        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            synchronize=lambda gpu=0: None,
            reset_peak_memory_stats=lambda gpu: None,
            memory_stats_as_nested_dict=lambda gpu: {name: {"all": part} for name, part in self.usage.items()},
            memory_reserved=lambda gpu: self.usage["reserved_bytes"]["current"],
            mem_get_info=lambda gpu: (8e9, 10e9),
            empty_cache=self.empty_cache,
            get_device_properties=lambda gpu: SimpleNamespace(total_memory=10e9),
            set_per_process_memory_fraction=self.set_share,
        )
        sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]

    def set_share(self, share: float, gpu: int) -> None:
        self.share = share

    def empty_cache(self) -> None:
        self.emptied += 1
        self.usage["reserved_bytes"]["current"] = 90e6

    def step(self) -> dict[str, Any]:
        self.usage["allocated_bytes"] = {"current": 50e6, "peak": 300e6}
        self.usage["reserved_bytes"] = {"current": 300e6, "peak": 300e6}
        return {"emptied": self.emptied, "share": self.share}

    def cleanup(self) -> None:
        del sys.modules["torch"]


def test_what_a_trial_holds_is_what_stays_reserved(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Fragmenting, {}, 3)
    done = [lane.receive(IterationDone) for _ in range(3)]
    assert [one.memory for one in done] == [MemoryNeed(90e6, 210e6)] * 3
    assert [one.metrics["emptied"] for one in done] == [0, 1, 1], "later iterations find their memory cached"


def test_a_limit_holds_until_another_is_told(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Fragmenting, {}, 1)
    assert lane.receive(IterationDone).metrics["share"] == 1.0
    lane.send(to.limit("a", 5e9), to.run("a", 2), to.limit("a", 2e9), to.limit("b", 1e9))
    assert [lane.receive(IterationDone).metrics["share"] for _ in range(2)] == [0.2, 0.2]
    lane.send(to.run("a", 2))
    assert [lane.receive(IterationDone).metrics["share"] for _ in range(2)] == [0.2, 0.2], "beside the same trials"
    lane.send(to.limit("a", None), to.run("a", 1))
    assert lane.receive(IterationDone).metrics["share"] == 1.0

"""Which trainables are replayed, how trials fail or end, and what starts, saves, packing and widening take."""

import functools
import json

import pytest
from rich.console import Console

import fluid
from fluid.cli import main
from fluid.display.dashboard import render
from fluid.engine.commands import Fork, ForkSaved, StartLane, StartTrial
from fluid.engine.events import IterationDone, TrialForked
from fluid.errors import InvalidFieldError
from fluid.rehearsal import Overheads, RehearsalBackend, RehearsalPlan, ReplayedIteration, rehearsing
from fluid.resources import Device
from fluid.trainables.payload import payload_of


def minutes(config, iterations):
    return [ReplayedIteration({"loss": 1.0 / i}, 60.0) for i in iterations]


class Static:
    replay = staticmethod(minutes)


class Stateful:
    def __init__(self, seconds):
        self.seconds = seconds

    def replay(self, config, iterations):
        return [ReplayedIteration({"loss": 1.0 / i}, self.seconds) for i in iterations]


def train(config):
    raise AssertionError("it is replayed, not run")


train.replay = minutes


class Elastic(Static):
    fluid_elastic = True


@pytest.fixture
def rehearse(tmp_path):
    """Runs trials of a trainable; returns their handle, and the session's time at the end."""
    ran = []

    def run(trainable, *, trials=1, budget=2, overheads=None, devices=1, trial=(), **options):
        made = [fluid.Trial(trainable, {"lr": i}, budget=budget, **dict(trial)) for i in range(trials)]
        plan = RehearsalPlan(devices=devices, overheads=Overheads() if overheads is None else overheads)
        folder = tmp_path / f"run-{len(ran)}"
        ran.append(folder)
        with rehearsing(plan), fluid.FluidExecutor(run_dir=folder, verbose=0, **options) as executor:
            handle = executor.submit_trialgroup(fluid.TrialGroup(made))
            handle.wait()
            return handle, executor._session.clock.now()

    return run


@pytest.mark.parametrize(
    "trainable", [Static, Static(), Stateful(60.0), train], ids=["class", "object", "state", "def"]
)
def test_trainables_that_are_only_replayed(rehearse, trainable):
    handle, end = rehearse(trainable)
    assert [result.metrics for result in handle.results()] == [{"loss": 1.0}, {"loss": 0.5}]
    assert end == 120.0


@pytest.mark.parametrize("trainable", [Static, Static(), Stateful(60.0)], ids=["class", "object", "state"])
def test_real_devices_refuse_them_at_once(tmp_path, trainable):
    with fluid.FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        group = fluid.TrialGroup([fluid.Trial(trainable, budget=1)])
        with pytest.raises(InvalidFieldError, match="it can only be rehearsed") as refused:
            executor.submit_trialgroup(group)
    assert refused.value.field == "trainable"
    assert refused.value.value is trainable


def test_what_cannot_be_replayed_is_refused_at_submission_and_the_session_goes_on(tmp_path):
    class Runs:
        def step(self):
            return {"loss": 1.0}

    def runs(config):
        yield {"loss": 1.0}

    with fluid.FluidExecutor(backend="simulated", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Static, budget=1)]))
        for trainable in (Runs, runs, functools.partial(runs)):
            for submit in (handle.add, lambda trial: executor.submit_trialgroup(fluid.TrialGroup([trial]))):
                with pytest.raises(InvalidFieldError, match="has no replay") as refused:
                    submit(fluid.Trial(trainable, budget=1))
                assert refused.value.value is trainable
        assert handle.wait()


class Breaks:
    """Its third iteration raises; asked for all at once, so do those before it."""

    @staticmethod
    def replay(config, iterations):
        if 3 in iterations:
            raise ValueError("no table has this config")
        return minutes(config, iterations)


def test_an_error_of_replay_fails_the_trial_as_in_a_lane(rehearse):
    handle, _ = rehearse(Breaks, budget=4, max_failures=0)
    (failure,) = handle.failures.values()
    assert failure.kind == "error"
    assert "no table has this config" in failure.message
    assert "in replay" in failure.traceback
    with pytest.raises(fluid.TrialFailedError, match="no table has this config"):
        handle.raise_failures()


class Flaky:
    calls = 0

    @classmethod
    def replay(cls, config, iterations):
        cls.calls += 1
        if cls.calls == 1:
            raise OSError("busy")
        return minutes(config, iterations)


def test_a_trial_that_failed_is_tried_again(rehearse):
    handle, end = rehearse(Flaky(), budget=2, max_failures=1)
    assert not handle.failures
    assert [result.iteration for result in handle.results()] == [1, 2]
    assert end == 120.0


WRONG = {
    "too many": (lambda c, i: minutes(c, range(len(i) + 1)[1:] or [1]) * 3, "at most the 2 iterations"),
    "no sequence": (lambda c, i: None, "must return a sequence"),
    "no iterations": (lambda c, i: [(1.0, {})], "must be a ReplayedIteration"),
    "negative": (lambda c, i: [ReplayedIteration({}, -1.0)], "seconds of iteration 1"),
    "nan": (lambda c, i: [ReplayedIteration({}, float("nan"))], "seconds of iteration 1"),
    "metrics": (lambda c, i: [ReplayedIteration(1.0, 1.0)], "must be a mapping"),
    "memory": (lambda c, i: [ReplayedIteration({}, 1.0, memory_bytes=-1)], "memory_bytes of iteration 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_replay_returns_is_checked(rehearse, name):
    function, reason = WRONG[name]

    class Wrong:
        replay = staticmethod(function)

    handle, _ = rehearse(Wrong, max_failures=0)
    (failure,) = handle.failures.values()
    assert reason in failure.message


@pytest.mark.parametrize(("has", "reported"), [(3, 3), (5, 5), (0, 0)])
def test_a_trial_ends_by_itself_with_its_last_iteration(rehearse, has, reported):
    class Ends:
        @staticmethod
        def replay(config, iterations):
            return minutes(config, [i for i in iterations if i <= has])

    handle, end = rehearse(Ends, budget=5)
    assert not handle.failures
    assert [result.iteration for result in handle.results()] == list(range(1, reported + 1))
    assert end == 60.0 * reported


def test_lanes_starts_and_restores_take_their_time(rehearse):
    overheads = Overheads(lane_s=7.0, start_s=11.0, source="given")
    _, end = rehearse(Static, budget=2, overheads=overheads)
    assert end == pytest.approx(7.0 + 11.0 + 120.0)
    two = {"trials": 2, "budget": 1, "overheads": overheads}
    _, end = rehearse(Static, isolation="lane", **two)  # The lane is used again.
    assert end == pytest.approx(7.0 + 2 * (11.0 + 60.0), abs=0.1)


def test_each_trial_with_a_process_of_its_own_waits_for_a_lane_unless_there_is_a_spare_one(rehearse):
    """A spare lane starts as soon as the last one was taken; one that is needed sooner is waited for."""
    given = {"trials": 4, "budget": 1, "overheads": Overheads(lane_s=7.0, start_s=11.0, source="given")}
    _, end = rehearse(Static, spare_lanes=0, **given)
    assert end == pytest.approx(4 * (7.0 + 11.0 + 60.0), abs=0.1)
    _, end = rehearse(Static, **given)
    assert end == pytest.approx(7.0 + 4 * (11.0 + 60.0), abs=0.1)
    given["overheads"] = Overheads(lane_s=100.0, start_s=11.0, source="given")
    _, end = rehearse(Static, **given)
    assert end == pytest.approx(4 * 100.0 + 11.0 + 60.0, abs=0.1)


def test_the_first_lanes_of_a_host_wait_until_it_has_loaded_what_trials_import(rehearse):
    given = {"trials": 3, "budget": 1, "overheads": Overheads(server_s=20.0, lane_s=1.0, source="given")}
    _, end = rehearse(Static, spare_lanes=0, **given)
    assert end == pytest.approx(20.0 + 3 * (1.0 + 60.0), abs=0.1)
    devices = [Device(index, kind="gpu", host="ab"[index]) for index in (0, 1)]
    _, end = rehearse(Static, spare_lanes=0, devices=devices, **{**given, "trials": 4})
    assert end == pytest.approx(20.0 + 2 * (1.0 + 60.0), abs=0.1), "each host loads, at the same time"


def test_a_trial_that_makes_room_is_saved_and_restored(tmp_path):
    plan = RehearsalPlan(devices=1, overheads=Overheads(save_s=5.0, restore_s=3.0))
    with rehearsing(plan), fluid.FluidExecutor(run_dir=tmp_path / "run", verbose=0) as executor:
        low = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Static, budget=4)], "low"))
        assert not low.wait(timeout=90.0)
        high = executor.submit_trialgroup(
            fluid.TrialGroup([fluid.Trial(Static, budget=2)], "high"), priority=9.0, preempt=True
        )
        assert high.wait()
        assert executor._session.clock.now() <= 120.0 + 5.0 + 120.0 + 1.0
        assert low.wait()
        assert [result.iteration for result in low.results()] == [1, 2, 3, 4]
        assert executor._session.clock.now() >= 360.0


@pytest.mark.slow
def test_nothing_is_packed_unless_it_is_known_to_pay(rehearse):
    assert rehearse(Static, trials=4)[1] == pytest.approx(480.0, abs=1.0)
    handle, end = rehearse(Static, trials=4, budget=20, overheads=Overheads(alpha=1.2))
    assert end < 0.9 * 4 * 20 * 60.0
    assert any(result.width < 1.0 for result in handle.results())
    assert "packed" not in Overheads(alpha=1.2).source
    for unknown in (Overheads(), Overheads(beta=1.3)):
        assert unknown.source.endswith("; trials are not packed, as it is not known what that costs")


def test_what_says_that_it_is_elastic_is_widened(rehearse):
    overheads = Overheads(beta=1.1, epsilon=2.0)
    assert rehearse(Static, devices=4, budget=20, overheads=overheads)[1] == pytest.approx(1200.0, abs=1.0)
    handle, end = rehearse(Elastic, devices=4, budget=20, overheads=overheads)
    assert max(result.width for result in handle.results()) == 4.0
    assert end < 900.0
    handle, _ = rehearse(Static, devices=4, budget=20, overheads=overheads, trial={"max_width": 2})
    assert max(result.width for result in handle.results()) == 2.0


@pytest.mark.parametrize("devices", [2.5, "auto", [], [0, 1], [Device(0), "1"], True, 0])
def test_devices_that_cannot_be_rehearsed(devices):
    with pytest.raises(InvalidFieldError) as refused:
        RehearsalBackend(devices)
    assert refused.value.field == "devices"


def test_options_that_mean_nothing_are_refused(tmp_path):
    for field, value in (("process_group", "gloo"), ("lane_policy", "serial"), ("keep", "best")):
        with pytest.raises(InvalidFieldError) as refused:
            fluid.FluidExecutor(backend="simulated", devices=1, run_dir=tmp_path / field, verbose=0, **{field: value})
        assert refused.value.field == field
    with pytest.raises(InvalidFieldError, match="have no checkpoints"):
        fluid.FluidExecutor(backend=RehearsalBackend(1), run_dir=tmp_path / "object", verbose=0, keep="last")


def test_what_ends_early_is_not_said_to_go_on(tmp_path, rehearse, caplog):
    with fluid.FluidExecutor(backend="simulated", devices=1, run_dir=tmp_path / "closed") as executor:
        executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Static, budget=5)])).wait(timeout=90.0)
    with pytest.raises(fluid.LimitReachedError, match="the deadline of 2 min 30 s has come") as ended:
        rehearse(Static, budget=5, deadline=150.0)
    assert "1 trial that had not ended was dropped" in caplog.text
    assert "resume" not in caplog.text + str(ended.value)


def test_views_and_reports_say_that_it_was_rehearsed(tmp_path, capsys):
    folder = tmp_path / "run"
    with fluid.FluidExecutor(backend="simulated", devices=2, run_dir=folder, verbose=0) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Static, {"lr": 1}, budget=2)]))
        assert handle.wait()
        assert executor.status().rehearsed
        with (console := Console(width=100)).capture() as captured:
            console.print(render(executor.status(), 100))
        assert " rehearsed" in captured.get().splitlines()[0]
        assert len(handle.dataframe()) == 1
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "Rehearsed: trials were replayed" in shown
    assert main(["why", str(folder), next(iter(handle.states))]) == 0


def test_the_run_folder_says_that_it_was_rehearsed_and_is_not_resumed(tmp_path, rehearse):
    rehearse(Static, overheads=Overheads(lane_s=1.0, source="measured there"))
    facts = json.loads((tmp_path / "run-0" / "session.json").read_text())
    assert facts["rehearsed"] is True
    assert facts["overheads"]["lane_s"] == 1.0
    assert facts["overheads"]["source"] == "measured there"
    assert facts["devices"][0]["kind"] == "gpu"
    with pytest.raises(InvalidFieldError, match="rehears"):
        fluid.FluidExecutor.resume(tmp_path / "run-0", backend="local", devices=1, verbose=0)


class EndsWithTheFifth:
    """Has five iterations, of which it tells when it is asked for more."""

    @staticmethod
    def replay(config, iterations):
        return minutes(config, [i for i in iterations if i <= 5])


def test_a_trial_that_lost_its_device_repeats_its_iterations_and_ends_where_it_did(tmp_path):
    with fluid.FluidExecutor(
        backend="simulated", devices=2, max_width=1, run_dir=tmp_path / "run", verbose=0
    ) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(EndsWithTheFifth, budget=9)]))
        for result in handle.results():
            if result.iteration == 2:
                executor.session.remove_device(result.device_ids[0])
                break
        assert handle.wait()
        assert not handle.failures
        assert [result.iteration for result in handle.results()][-5:] == [1, 2, 3, 4, 5]


def test_a_fork_takes_as_long_as_a_save_and_its_parent_goes_on():
    backend = RehearsalBackend(1, overheads=Overheads(save_s=5.0))
    backend.register("a", payload_of(train, {}))
    start = StartTrial("a", (0,), iterations=3)
    backend.execute([StartLane(0, 0), start, Fork("a", (0,), child="b", at=1), Fork("a", (0,), child="c", at=9)])
    heard = [event for _ in range(5) for event in backend.poll()]
    (forked,) = [event for event in heard if isinstance(event, TrialForked)]
    done = [event.at for event in heard if isinstance(event, IterationDone)]
    assert (forked.trial_id, forked.at, forked.seconds) == ("b", 65.0, 5.0) and forked.checkpoint.iteration == 1
    assert done == [60.0, 120.0, 180.0]
    backend.execute([ForkSaved("d", "a", forked.checkpoint), Fork("a", (0,), child="e", at=1)])
    saved, past = backend.poll()
    assert saved == TrialForked(180.0, "d", parent="a", lane_id=None, checkpoint=forked.checkpoint)
    assert past.is_past and past.checkpoint is None and "3 iterations" in past.problem
    backend.close()

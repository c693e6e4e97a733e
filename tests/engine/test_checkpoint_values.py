"""What the engine tells the stores of hosts: the worth of checkpoints, and what to fetch ahead."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known

from fluid.engine.commands import CheckpointValue, Command, PrefetchCheckpoint, StartTrial, ValueCheckpoints
from fluid.engine.events import Checkpoint, CheckpointPlaced, Restoring, RungReached, TrialStarted
from fluid.errors import InvalidFieldError
from fluid.search_shape import Rung
from fluid.trialgroup import TrialState

NINE = Rung(iterations=1, size=9, places=3)


class Sweep(Hand):
    """Nine trials of one iteration on one device that keeps no state; each is saved to memory as it ends."""

    def __init__(self, devices: int = 1, *, budget: int = 1) -> None:
        super().__init__(devices, planner="fifo", profile=Known(packing=1, width=1), max_packing=1, resident_limit=0)
        self.names = [f"t{number}" for number in range(9)]
        self.submit(*self.names, group="sweep", budget=budget, follow_up_iterations=8)

    def run(self, name: str, score: float, rung: Rung = NINE, *, in_memory: bool = True) -> list[Command]:
        """Runs a trial to its rung, and tells its score; returns what was told then."""
        lane = self.lane(name)
        if self.trial(name).state is TrialState.STARTING:
            self.started(name, self.trial(name).progress.done)
        done = self.trial(name).progress.budget
        self.iterate(name, done - self.trial(name).progress.done)
        self.saved(name, lane, done, dropped=True, in_memory=in_memory)
        return self.do(RungReached(self.now, name, rung, score))

    def move(self, name: str, *, in_memory: bool, **more: str) -> list[Command]:
        newest = self.trial(name).residence.checkpoint
        moved = Checkpoint(newest.iteration, f"{name}/moved", in_memory=in_memory, **more)
        return self.do(CheckpointPlaced(self.now, name, moved))

    @property
    def told(self) -> dict[str, CheckpointValue]:
        """What the stores know by now."""
        found: dict[str, CheckpointValue] = {}
        for command in self.log:
            if isinstance(command, ValueCheckpoints):
                found.update(command.values)
        return found


def fetched(commands: list[Command]) -> list[tuple[str, str]]:
    return [(each.trial_id, each.host) for each in commands if isinstance(each, PrefetchCheckpoint)]


def values(commands: list[Command]) -> list[ValueCheckpoints]:
    return [each for each in commands if isinstance(each, ValueCheckpoints)]


def test_nothing_is_told_of_checkpoints_that_are_not_in_memory() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names[:7]):  # None is about to be fetched, either.
        sweep.run(name, number, in_memory=False)
    assert not values(sweep.log)


def test_trials_are_worth_their_odds_to_be_promoted_and_the_best_are_pinned() -> None:
    sweep = Sweep()
    sweep.run("t0", 5.0)
    assert sweep.told["t0"] == (pytest.approx(1 / 3), True)  # the only one: its rank says nothing yet
    sweep.run("t1", 1.0)
    sweep.run("t2", 9.0)
    told = sweep.told
    assert told["t1"].pinned and not told["t0"].pinned and not told["t2"].pinned
    assert told["t1"].returns == pytest.approx(64 / 84, abs=0.02)  # as in the docstring of odds_at
    assert told["t1"].returns > told["t0"].returns > told["t2"].returns


def test_one_command_tells_what_has_changed_and_no_more() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names[:8]):
        sweep.run(name, number)
    commands = values(sweep.run("t8", 8.0))
    assert len(commands) == 1
    # All came: the best three go on for sure, the other six do not, and t0 to t2 as good as did before.
    assert all(sweep.told[name].returns >= 0.98 for name in ("t0", "t1", "t2"))
    assert all(sweep.told[name].returns == 0.0 for name in sweep.names[3:])
    assert not values(sweep.tick())


def test_a_promoted_trial_is_pinned_until_it_runs_and_an_ended_one_is_worth_nothing() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names):
        sweep.run(name, number)
    sweep.extend("t1", 2)
    sweep.extend("t0", 2)
    assert sweep.told["t0"] == (pytest.approx(1.0, abs=0.02), True)
    start = next(each for each in reversed(sweep.log) if isinstance(each, StartTrial))
    sweep.started(start.trial_id, 1)
    assert start.trial_id == "t1" and sweep.told["t1"].returns == pytest.approx(0.05)
    sweep.stop("t5")
    assert sweep.told["t5"] == CheckpointValue(0.0)


def test_the_best_of_the_highest_rung_stays_pinned_though_it_has_ended() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names):
        sweep.run(name, number)
    sweep.extend("t2", 2)
    sweep.run("t2", 7.0, Rung(iterations=3, size=1))
    assert sweep.told["t2"] == CheckpointValue(0.0, pinned=True)


def test_without_rungs_follow_up_iterations_tell() -> None:
    sweep = Sweep()
    sweep.started("t0")
    sweep.iterate("t0")
    sweep.saved("t0", 0, 1, dropped=True, in_memory=True)
    assert sweep.told.get("t0", CheckpointValue(0.5)).returns == 0.5
    sweep.extend("t0", 2)  # and none follow
    while sweep.trial("t0").state is not TrialState.STARTING:
        name = next(each for each in sweep.names if sweep.trial(each).state is TrialState.STARTING)
        sweep.started(name)
        sweep.iterate(name)
        sweep.saved(name, 0, 1, dropped=True, in_memory=True)
    sweep.started("t0", 1)
    sweep.iterate("t0", 2)
    sweep.saved("t0", 0, 3, dropped=True, in_memory=True)
    assert sweep.told["t0"].returns == pytest.approx(0.05)


def test_the_worst_of_a_population_lose_their_states_and_the_best_are_copied() -> None:
    sweep, rung = Sweep(), Rung(iterations=1, size=8, places=6, parents=2)
    for number, name in enumerate(sweep.names[:8]):
        sweep.run(name, number, rung)
    told = sweep.told
    assert [told[name].pinned for name in sweep.names[:8]] == [True, True, *[False] * 6]
    assert [round(told[name].returns, 6) for name in sweep.names[2:8]] == [1.0] * 4 + [0.0] * 2


def test_the_best_are_fetched_once_when_nearly_all_came() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names[:7]):
        assert not fetched(sweep.run(name, number, in_memory=False))
    # Eight of nine are over 80 %: the best three are on disk.
    commands = sweep.run("t7", 7.0, in_memory=False)
    assert fetched(commands) == [("t0", "localhost"), ("t1", "localhost"), ("t2", "localhost")]
    sweep.move("t0", in_memory=True)
    assert sweep.told["t0"].pinned
    assert fetched(sweep.run("t8", 0.5, in_memory=False)) == [("t8", "localhost")]


def test_a_promoted_trial_that_had_to_leave_memory_is_asked_for_again() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names):
        sweep.run(name, number)
    assert not fetched(sweep.log)
    for name in ("t0", "t1", "t2"):
        sweep.extend(name, 2)
    waiting = next(name for name in ("t1", "t2") if sweep.trial(name).state is TrialState.QUEUED)
    commands = sweep.move(waiting, in_memory=False)
    assert fetched(commands) == [(waiting, "localhost")]
    assert not fetched(sweep.tick()), "the store keeps the wish"
    assert not fetched(sweep.move(waiting, in_memory=True))
    assert fetched(sweep.move(waiting, in_memory=False)) == [(waiting, "localhost")]
    assert sweep.told[waiting] == CheckpointValue(pytest.approx(1.0), pinned=True)


def test_the_store_hears_what_a_checkpoint_is_worth_before_it_is_asked_for_it_and_when_it_need_not_bring_it() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names[:7]):
        sweep.run(name, number, in_memory=False)
    commands = [each for each in sweep.run("t7", 0.5, in_memory=False) if not isinstance(each, StartTrial)]
    kinds = [type(each) for each in commands if isinstance(each, (ValueCheckpoints, PrefetchCheckpoint))]
    assert kinds == [ValueCheckpoints] + [PrefetchCheckpoint] * 3
    assert fetched(commands) == [("t0", "localhost"), ("t7", "localhost"), ("t1", "localhost")]
    assert all(sweep.told[name].pinned for name in ("t0", "t1", "t7"))
    sweep.run("t8", 0.2, in_memory=False)
    assert not sweep.told["t1"].pinned and sweep.told["t8"].pinned
    sweep.extend("t8", 2)
    assert sweep.told["t8"].pinned
    sweep.started("t8", 1)
    assert sweep.told["t8"] == CheckpointValue(pytest.approx(0.05), pinned=False)


def test_a_checkpoint_of_a_host_without_devices_is_fetched_to_another() -> None:
    sweep = Sweep()
    for number, name in enumerate(sweep.names[:7]):
        sweep.run(name, number)
    sweep.move("t0", in_memory=True, host="elsewhere")
    assert fetched(sweep.run("t7", 7.0)) == [("t0", "localhost")]


def test_a_moved_checkpoint_is_where_the_store_says() -> None:
    sweep = Sweep()
    sweep.run("t0", 1.0)
    assert sweep.trial("t0").residence.durable is None
    sweep.move("t0", in_memory=False)
    residence = sweep.trial("t0").residence
    assert residence.checkpoint.path == residence.durable.path == "t0/moved"
    sweep.move("t0", in_memory=True)
    residence = sweep.trial("t0").residence
    assert residence.checkpoint.in_memory and not residence.durable.in_memory
    sweep.do(CheckpointPlaced(sweep.now, "t0", Checkpoint(0, "older")))
    assert residence.checkpoint.path == "t0/moved" and residence.durable.iteration == 1
    sweep.do(CheckpointPlaced(sweep.now, "unknown", Checkpoint(0, "older")))  # It was forgotten.


def test_the_rung_of_an_unknown_trial_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="trial_id"):
        Sweep().do(RungReached(0.0, "unknown", NINE, 1.0))


def test_a_forgotten_trial_is_told_no_more_and_its_rung_goes_with_the_last() -> None:
    sweep, rung = Sweep(), Rung(iterations=1, size=2, places=1)
    for name in ("t0", "t1"):
        sweep.run(name, 1.0, rung)
    for name in ("t0", "t1"):
        sweep.stop(name)
        sweep.forget(name)
    assert not sweep.state.checkpoints.told


def test_a_score_that_is_no_number_is_the_worst() -> None:
    sweep = Sweep()
    sweep.run("t0", float("nan"))
    sweep.run("t1", 3.0)
    assert sweep.told["t1"].returns > sweep.told["t0"].returns


def test_restores_are_learnt_by_source() -> None:
    sweep = Sweep()
    sweep.run("t0", 1.0)
    sweep.extend("t0")
    for name in sweep.names[1:]:
        if sweep.trial("t0").state is TrialState.STARTING:
            break
        sweep.run(name, 2.0)
    restoring = Restoring("memory", 0.25, 1000)
    sweep.do(TrialStarted(sweep.now, "t0", sweep.lane("t0"), iteration=1, seconds=0.75, restoring=restoring))
    key = sweep.trial("t0").spec.profile_key
    assert sweep.state.profile.restores.of(key) == {"memory": 0.25}
    estimate = sweep.state.estimates.of_key(sweep.trial("t0"))
    assert estimate.set_ups[-1] == pytest.approx(0.5)
    # Set-up and restore, and a save, which was not measured and so counts as much.
    assert estimate.interruption() == pytest.approx(2 * (0.5 + 0.25) if not estimate.saves else 0.75)

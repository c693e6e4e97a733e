"""Watching: since when each trial's lanes owe an answer, and when to look at them, as a trial may hang."""

from __future__ import annotations

from typing import NamedTuple

from fluid.engine import tuning
from fluid.engine.commands import Command, KillLane
from fluid.engine.deadlines import Deadlines
from fluid.engine.estimates import Estimates
from fluid.engine.events import Failure
from fluid.engine.lane_record import Killing
from fluid.engine.lanes import Lanes
from fluid.engine.records import TrialRecord


class IterationDeadline(NamedTuple):
    """When to look at a trial that runs."""

    row: int


class DrainDeadline(NamedTuple):
    """When to look at a lane that a trial was told to leave."""

    lane_id: int
    trial_id: str


class CleanUpDeadline(NamedTuple):
    """When to look at a lane that a trial which has ended was told to leave, and whether another one waits."""

    lane_id: int
    trial_id: str


def far_longer_than(longest: float) -> float:
    """Seconds without an answer after which a lane is killed whose trial took at most so many before."""
    return max(tuning.LEAST_KILL_S, tuning.KILL_FACTOR * longest)


class Watching:
    """Times what lanes do, and marks those that are killed; :mod:`fluid.engine.hung_trials` looks at them.

    Args:
        deadlines: takes those of trials that run, and of lanes that trials are to leave.
        estimates: have the iterations measured by profile key.
        lanes: all there are.
    """

    def __init__(self, deadlines: Deadlines, estimates: Estimates, lanes: Lanes) -> None:
        self._deadlines = deadlines
        self._estimates = estimates
        self._lanes = lanes

    def launched(self, trial: TrialRecord, now: float, *, iterates: bool) -> None:
        """Records that a trial's lanes set it up from now on, or, if it ``iterates``, run its iterations."""
        trial.placement.iterates = iterates
        self.answered(trial, now)
        timeout = trial.spec.iteration_timeout_s
        if timeout is not None:
            first = tuning.LEAST_DUMP_S if isinstance(timeout, str) else tuning.DUMP_SHARE * timeout
            self._deadlines.set(IterationDeadline(trial.row), now + first)

    def answered(self, trial: TrialRecord, now: float) -> None:
        """Records a sign of progress: the time of what the trial does next begins."""
        trial.placement.since = now
        trial.placement.dumped = False

    def released(self, trial: TrialRecord) -> None:
        """Records that a trial holds no lanes any more."""
        trial.placement.iterates = False
        self._deadlines.clear(IterationDeadline(trial.row))

    def draining(self, trial: TrialRecord, lane_id: int, now: float) -> None:
        """Records that a trial was told to leave a lane in which it may run."""
        timeout = trial.spec.iteration_timeout_s
        # A trial without a limit has one here: what it still does there is thrown away, and others wait for the lane.
        longest = timeout if isinstance(timeout, float) else self._estimates.of_key(trial).longest
        self._deadlines.set(DrainDeadline(lane_id, trial.trial_id), now + far_longer_than(longest))

    def cleaning_up(self, trial_id: str, lane_id: int, now: float) -> None:
        """Records that a trial at rest was told to leave its lane."""
        self._deadlines.set(CleanUpDeadline(lane_id, trial_id), now + tuning.CLEAN_UP_S)

    def saving_last(self, trial_id: str, lane_id: int, now: float) -> None:
        """Records that a trial that has ended was told to save its state and leave its lane."""
        self._deadlines.set(CleanUpDeadline(lane_id, trial_id), now + tuning.LEAST_KILL_S)

    def left(self, trial_id: str, lane_id: int) -> None:
        """Records that a trial has left a lane."""
        self._deadlines.clear(CleanUpDeadline(lane_id, trial_id))

    def kill(
        self, trial_id: str, lane_ids: tuple[int, ...], reason: str, now: float, failure: Failure | None = None
    ) -> list[Command]:
        """Has lanes killed because of a trial; what becomes of the trials there follows when the lanes are lost.

        Args:
            trial_id: the trial.
            lane_ids: the lanes; those that are being killed already are left out.
            reason: why, to be read after "lane 3".
            now: the time, seconds.
            failure: what the trial is to blame for; ``None`` if it is stopped.
        """
        commands: list[Command] = []
        for lane_id in lane_ids:
            if lane_id in self._lanes and self._lanes[lane_id].killing is None:
                self._lanes[lane_id].killing = Killing(trial_id, failure)
                commands.append(KillLane(lane_id, reason, at=now))
        return commands

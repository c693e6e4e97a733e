"""Hung trials: iterations and set-ups that take far too long. Their stacks are dumped, then their lanes are killed.

Every launched trial owes an answer: that of its set-up, of its resize, or of its iteration. Its time runs from the last
one. A deadline is only a time to look, so an iteration that ends in time costs nothing.

It is there for safety, and has no figure: without it, one trial that hangs keeps its device for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from fluid.engine import tuning
from fluid.engine.commands import DumpStacks, NoteHung
from fluid.engine.core import DrainDeadline, IterationDeadline, SessionState, far_longer_than
from fluid.engine.estimates.key_estimates import KeyEstimate
from fluid.engine.events import Failure
from fluid.engine.policy import Handler, Policy
from fluid.engine.records import TrialRecord
from fluid.trialgroup import TrialState

LEAST_MEASURED = 5
USUAL_QUANTILE = 0.99
#: Stacks are dumped after so many times that long, and at least so many seconds.
DUMP_FACTOR = 10.0
#: Displays show it after so many times that long, and at least so many seconds.
LEAST_SHOWN_S = 10.0


class Limit(NamedTuple):
    """Seconds without an answer after which a trial's stacks are dumped, and after which its lanes are killed.

    Lanes of a whole job are not killed (``kill_after`` is ``None``): how long others took tells nothing of it.
    """

    dump_after: float
    kill_after: float | None


class HungTrials(Policy):
    """Looks at trials, and at lanes that trials were told to leave, when their deadlines come."""

    def __init__(self, core: SessionState) -> None:
        self._core = core

    def deadlines(self) -> Mapping[type, Handler]:
        """When to look at trials, and at lanes."""
        return {IterationDeadline: self.look, DrainDeadline: self.look_at_drain}

    def look(self, deadline: IterationDeadline) -> None:
        """Dumps a trial's stacks, or kills its lanes, if it is time for that; sets the next deadline."""
        core = self._core
        trial = core.trials.by_row.get(deadline.row)
        if trial is None or not trial.placement.launched:
            return
        place, limit, since = trial.placement, self.limit_of(trial), self._since(trial)
        silent = core.now - since
        if limit is None:
            core.deadlines.set(deadline, core.now + tuning.LEAST_DUMP_S)
        elif self._waits_for_submitter(trial):
            core.deadlines.set(deadline, core.now + limit.dump_after)
        # As the deadline was computed: a difference of times may be rounded to less, and the deadline come again.
        elif limit.kill_after is not None and core.now >= since + limit.kill_after:
            self._end(trial, silent)
            # It may have left those lanes before they are gone.
            core.deadlines.set(deadline, core.now + limit.kill_after)
        else:
            if core.now >= since + limit.dump_after and not place.dumped:
                place.dumped = True
                self._dump(trial, silent, limit)
            following = limit.kill_after if place.dumped else limit.dump_after
            core.deadlines.set(deadline, core.now + tuning.LEAST_KILL_S if following is None else since + following)

    def look_at_drain(self, deadline: DrainDeadline) -> None:
        """Kills a lane that a trial was told to leave and has not left."""
        core, lane_id = self._core, deadline.lane_id
        if lane_id in core.lanes and deadline.trial_id in core.lanes[lane_id].draining:
            reason = f"was killed: trial {deadline.trial_id!r} did not leave it"
            core.commands += core.watching.kill(deadline.trial_id, (lane_id,), reason, core.now)

    def woke_late(self) -> None:
        """Lets the time of every trial begin now: the driver was suspended, and has not read what lanes reported."""
        for trial in self._core.trials.values():
            if trial.state.holds_devices and trial.placement.launched:
                self._core.watching.answered(trial, self._core.now)

    def silence(self, trial: TrialRecord, now: float) -> float | None:
        """Seconds for which a trial has given no result, if that is far longer than usual; ``None`` otherwise."""
        if not trial.state.holds_devices:
            return None
        place = trial.placement
        if not place.launched or self._waits_for_submitter(trial):
            return None
        silent, estimates = now - self._since(trial), self._core.estimates
        if place.iterates and self._is_whole_job(trial):
            return silent if place.dumped else None
        usual = _usual(estimates.of_key(trial), iterates=place.iterates)
        if usual is None and place.iterates and estimates.is_measured(trial):
            usual = estimates.pace(trial) * estimates.stretch(trial)
        longer = usual is not None and silent >= max(LEAST_SHOWN_S, DUMP_FACTOR * usual)
        return silent if longer or place.dumped else None

    def limit_of(self, trial: TrialRecord) -> Limit | None:
        """The limit of what a trial does now; ``None`` if it has none, or too little was measured."""
        timeout, iterates = trial.spec.iteration_timeout_s, trial.placement.iterates
        if timeout is None:
            return None
        if not isinstance(timeout, str):
            kill_after = timeout if iterates else max(timeout, tuning.LEAST_KILL_S)
            return Limit(tuning.DUMP_SHARE * kill_after, kill_after)
        estimate = self._core.estimates.of_key(trial)
        usual = _usual(estimate, iterates=iterates)
        if usual is None:
            return None
        dump_after = max(tuning.LEAST_DUMP_S, DUMP_FACTOR * usual)
        # One validation in a thousand iterations is not in the sample.
        kill_after = far_longer_than(max(dump_after, estimate.longest) if iterates else dump_after)
        return Limit(kill_after, None) if iterates and self._is_whole_job(trial) else Limit(dump_after, kill_after)

    def _is_whole_job(self, trial: TrialRecord) -> bool:
        """Whether a trial's iteration may be all that it does, as no trial of its key has done a second one."""
        return not self._core.estimates.of_key(trial).repeats

    def _since(self, trial: TrialRecord) -> float:
        """When a trial, or another one of its lane, gave its latest sign of progress, seconds.

        A trial that shares a lane may wait there for long until it is its turn.
        """
        hosts = trial.placement.hosts if trial.sharing_group is not None else ()
        lanes = (self._core.lanes.get(lane_id) for lane_id in hosts)
        return max((trial.placement.since, *(lane.since for lane in lanes if lane is not None)))

    def _waits_for_submitter(self, trial: TrialRecord) -> bool:
        """Whether a trial waits for the answer to a request, and so is not silent by its own fault."""
        asking = trial.placement.asking if trial.state is not TrialState.STOPPING else ()
        return any(lane_id in self._core.lanes for lane_id, _ in asking)

    def _dump(self, trial: TrialRecord, silent: float, limit: Limit) -> None:
        core = self._core
        core.commands.append(DumpStacks(trial.trial_id, trial.placement.hosts))
        core.log(trial, f"has given no result for {silent:.0f} s: its stacks are dumped")
        if isinstance(trial.spec.iteration_timeout_s, str):
            core.commands.append(NoteHung(trial.trial_id, at=core.now, seconds=silent, limit=limit.kill_after))

    def _end(self, trial: TrialRecord, silent: float) -> None:
        core, lanes = self._core, trial.placement.hosts
        if all(lane_id not in core.lanes or core.lanes[lane_id].killing is not None for lane_id in lanes):
            return
        doing = "its iteration" if trial.placement.iterates else "its set-up"
        reason = f"was killed: trial {trial.trial_id!r} gave no result for {silent:.0f} s in {doing}"
        limit = f"iteration_timeout_s={trial.spec.iteration_timeout_s!r}; None sets no limit"
        failure = Failure("timeout", f"{doing} gave no result for {silent:.0f} s ({limit})")
        core.log(trial, f"has given no result for {silent:.0f} s: its lanes are killed")
        core.commands.append(NoteHung(trial.trial_id, at=core.now, seconds=silent, limit=silent, killed=True))
        core.commands += core.watching.kill(trial.trial_id, lanes, reason, core.now, failure)


def _usual(estimate: KeyEstimate, *, iterates: bool) -> float | None:
    """What a key's iterations, or set-ups, take at most but for one in a hundred; ``None`` if too few were measured."""
    sample = estimate.latest if iterates else estimate.starts
    if len(sample) < LEAST_MEASURED:
        return None
    return sorted(sample)[ceil(USUAL_QUANTILE * len(sample)) - 1]

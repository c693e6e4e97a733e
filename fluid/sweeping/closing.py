"""The end of a sweep by a deadline of its own, in a session that goes on: implements SweepInTime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from fluid.sweeping.plan import SweepTrial
from fluid.sweeping.submitting import SweepTrials


class SweepClosing:
    """Has what cannot end by the deadline rest, and lets the others run. Three methods are for the session's thread.

    Args:
        trials: of the sweep.
        take: has a piece of work done where the sweep's decisions are made.
        rest: has a trial go on only when the sweep is resumed.
        end: ends the sweep, but for the trials that run on.
        has_all: whether the sweep has started all its trials.

    Attributes:
        reason: why nothing starts any more; ``None`` while trials may start.
        run_on: the trials that run on to their end then.
        cut_by: why trials went to rest before; ``None`` if none did.
    """

    def __init__(
        self,
        trials: SweepTrials,
        take: Callable[[Callable[[], None]], None],
        rest: Callable[[SweepTrial], None],
        end: Callable[[str | None], None],
        has_all: Callable[[], bool],
    ) -> None:
        self.reason: str | None = None
        self.run_on: Collection[str] = ()
        self.cut_by: str | None = None
        self._trials = trials
        self._take = take
        self._rest = rest
        self._end = end
        self._has_all = has_all

    @property
    def is_closed(self) -> bool:
        """Whether nothing starts any more."""
        return self.reason is not None

    def open_trials(self) -> list[str]:
        """Ids of the trials that run, or wait for a device, and were not stopped."""
        return [trial.trial_id for trial in list(self._trials.by_number.values()) if self._is_open(trial)]

    def _is_open(self, trial: SweepTrial) -> bool:
        return trial.is_open and trial.stop is None and trial.trial_id not in self._trials.resting

    def cut(self, reason: str, trial_ids: Sequence[str]) -> None:
        """Has trials rest after their iteration, as no further one would be over in time."""
        self._take(partial(self._cut, reason, trial_ids))

    def close(self, reason: str, run_on: Sequence[str]) -> None:
        """Starts nothing any more, and has all trials but these rest after their iteration."""
        self._take(partial(self._close, reason, frozenset(run_on)))

    def _cut(self, reason: str, trial_ids: Sequence[str]) -> None:
        for trial in map(self._trials.by_id.__getitem__, trial_ids):
            if self._is_open(trial):
                self.cut_by = reason
                self._rest(trial)

    def _close(self, reason: str, run_on: frozenset[str]) -> None:
        self.reason, self.run_on = reason, run_on
        if not (self._has_all() and run_on.issuperset(self.open_trials())):
            self._end(reason)  # Else nothing is cut, unless a trial is promoted.

"""What the trials of a sweep have reported of its metrics, and which trials fail as they reported none.

A result without the metric is an ordinary one, as of an epoch without validation: what compares trials takes the last
value of each. A trial that has none where one is needed fails, and the sweep goes on; it ends only if no trial reports
the metric, or the name is misspelt.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from fluid._logs import logger_of
from fluid.engine.events import Failure
from fluid.keeping import value_of
from fluid.results.iterations import flat
from fluid.results.metrics import Goal
from fluid.results.records import Result, short_text
from fluid.sweeping.plan import SweepPlan, SweepTrial, UnreportedMetricError, WorstValues

#: The logger of the sweep's loop.
_log = logger_of("fluid.sweeping.loop")

#: Iterations by which a trial may report the metric later than the first trial that did.
_LATER = 3
#: So many trials at least must have failed before a sweep is given up as none has reported the metric.
_FIRST_TRIALS = 8
#: After so many results, or when the first trial ends, the sweep warns of metrics that no trial reported.
_FIRST_RESULTS = 10
#: How alike a name must be to be the metric's, misspelt; and to be worth asking about.
_MISSPELT, _ALIKE = 0.85, 0.5


class SweepMetrics:
    """Follows what the trials of a sweep report.

    Args:
        plan: of the sweep.

    Attributes:
        worst: the worst values so far.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self.worst = WorstValues(plan.goals)
        #: The iteration at which the first trial had reported all metrics; ``None`` before.
        self._first_at: int | None = None
        #: Metrics of which no trial has reported a number, and names that were compared with them.
        self._unreported = {goal.metric: goal for goal in plan.goals}
        self._seen: set[str] = set()
        #: Trials that had reported something when the first one failed for want of the metric, by id; and those that
        #: failed so.
        self._first: set[str] = set()
        self._failed: dict[str, SweepTrial] = {}
        #: Results until the user is warned.
        self._until_warning = _FIRST_RESULTS

    def take(self, trial: SweepTrial, result: Result) -> tuple[float | None, ...]:
        """Takes a result; returns what it has of each metric."""
        found = tuple([result.number(goal.metric) for goal in self._plan.goals])
        trial.iteration = result.iteration
        trial.results.append(result)
        if None not in found:
            trial.latest = found
        else:
            trial.latest = tuple(
                [old if new is None else new for new, old in zip(found, trial.latest or found, strict=True)]
            )
        if self._unreported:
            for goal, number in zip(self._plan.goals, found, strict=True):
                if number is not None:
                    self._unreported.pop(goal.metric, None)
        if (self._plan.oom_is_worst or self._first_at is None) and (values := trial.values) is not None:
            self.worst.add(values)
            if self._first_at is None:
                self._first_at = trial.iteration
        return found

    def require_spelling(self, trial: SweepTrial, result: Result) -> None:
        """Ends the sweep if a trial reports a metric of which none has reported a number, by a name misspelt.

        Raises:
            UnreportedMetricError: it does.
        """
        if not self._unreported:
            return
        names = [name for name in _names(result) if name not in self._seen]
        self._seen.update(names)
        for goal in self._unreported.values():
            meant = next(
                (name for name in names if is_misspelt(name, goal.metric) and result.number(name) is not None), ""
            )
            if meant:
                raise UnreportedMetricError(goal.metric, _reason(trial, goal, meant))

    def is_overdue(self, trial: SweepTrial) -> bool:
        """Whether a trial has not reported all metrics, though others did iterations ago."""
        return trial.values is None and self._first_at is not None and trial.iteration >= self._first_at + _LATER

    def may_come(self, trial: SweepTrial, rung: int) -> bool:
        """Whether a trial at its rung may report the metrics before it comes to the next one, as by a later validation.

        Args:
            trial: has not reported all metrics.
            rung: iterations at the rung.
        """
        plan = self._plan
        if trial.iteration < trial.budget or trial.budget >= plan.budget or plan.shape is None:
            return False
        return trial.iteration < next((one for one in plan.shape.rungs if one > rung), plan.budget)

    def failure_of(self, trial: SweepTrial) -> Failure:
        """Why a trial fails that has not reported all metrics."""
        return Failure("metric", str(self._error_of(trial)))

    def note_failed(self, trial: SweepTrial, trials: Iterable[SweepTrial]) -> None:
        """Takes note of a trial that has failed so.

        Args:
            trial: the trial.
            trials: all that were started.

        Raises:
            UnreportedMetricError: all first trials have failed so.
        """
        if not self._failed:
            self._first = {one.trial_id for one in trials if one.results or not one.is_open}
        self._failed[trial.trial_id] = trial
        if self._first_at is None and len(self._failed) >= _FIRST_TRIALS and self._first <= self._failed.keys():
            self._give_up()

    def forget_failed(self, trial_id: str) -> None:
        """A trial that had failed so is tried again."""
        self._failed.pop(trial_id, None)

    def require_any(self, trials: Iterable[SweepTrial]) -> None:
        """Checks, at the end, that not all trials have failed so.

        Raises:
            UnreportedMetricError: all have.
        """
        if self._failed and all(trial.trial_id in self._failed for trial in trials):
            self._give_up()

    def _give_up(self) -> None:
        first, number = next(iter(self._failed.values())), len(self._failed)
        raise self._error_of(first, f"; nor did the other {number - 1} trials" if number > 1 else "")

    def warn(self, result: Result, *, trial_ended: bool = False) -> None:
        """Warns once, after the first results, of metrics and stop rules of which no trial has reported a number.

        Args:
            result: the latest one.
            trial_ended: whether its trial has ended.
        """
        if self._until_warning <= 0:
            return
        self._until_warning = 0 if trial_ended else self._until_warning - 1
        if self._until_warning:
            return
        name, known = self._plan.name, ", ".join(map(repr, _names(result))) or "nothing"
        for metric in self._unreported:
            _log.warning("no trial of the sweep %r has reported a number as %r so far, but %s", name, metric, known)
        for metric in self._plan.rules.unreported:
            text = "stop[%r] stops no trial of the sweep %r so far: the trials report no such number, but %s"
            _log.warning(text, metric, name, known)

    def _error_of(self, trial: SweepTrial, others: str = "") -> UnreportedMetricError:
        missing = (goal for goal, value in zip(self._plan.goals, trial.latest, strict=False) if value is None)
        goal = next(missing, self._plan.goals[0])
        is_compared = trial.budget < self._plan.budget and trial.iteration >= trial.budget
        later = f"; if it comes after iteration {trial.iteration}, raise min_budget=" if is_compared else ""
        return UnreportedMetricError(goal.metric, f"{_reason(trial, goal)}{others}{later}")


def _reason(trial: SweepTrial, goal: Goal, meant: str = "") -> str:
    """What a trial has reported in place of a metric."""
    given = next((value for one in reversed(trial.results) if (value := _value(one, goal.metric)) is not None), None)
    if given is not None:
        return f"must be a number; trial {trial.trial_id!r} reported {short_text(given)}"
    names = [name for name in (_names(trial.results[-1]) if trial.results else []) if name != goal.metric]
    if not names:
        return f"was not reported by trial {trial.trial_id!r}, which reported nothing"
    meant = meant or next(iter(difflib.get_close_matches(goal.metric, names, 1, _ALIKE)), "")
    hint = f"; did you mean {meant!r}?" if meant else ""
    late = f" in {trial.iteration} iterations" if trial.iteration > 1 else ""
    return f"was not reported by trial {trial.trial_id!r}, but {', '.join(map(repr, names))}{late}{hint}"


def is_misspelt(name: str, metric: str) -> bool:
    """Whether a name is a metric's, misspelt: not that of another metric, which may well be reported more often.

    The names may differ in case and in what separates their words; or by a letter or two within a word, but not in its
    first letter or a digit.

    Example:
        >>> [is_misspelt(name, "val_loss") for name in ("Val/Loss", "val_los", "loss", "train_loss", "val_mse")]
        [True, True, False, False, False]
    """
    ours, theirs = _words(name), _words(metric)
    if "".join(ours) == "".join(theirs):
        return name != metric
    return len(ours) == len(theirs) and all(map(_is_same_word, ours, theirs))


def _is_same_word(one: str, other: str) -> bool:
    if one == other or _undoubled(one) == _undoubled(other):
        return True
    if one[:1] != other[:1] or min(len(one), len(other)) < 4 or re.findall(r"\d", one) != re.findall(r"\d", other):
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= _MISSPELT


def _undoubled(word: str) -> str:
    return re.sub(r"(\D)\1+", r"\1", word)


def _words(name: str) -> list[str]:
    """The words of a name, in lower case: ``valLoss``, ``val_loss`` and ``val/loss`` have the same."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _names(result: Result) -> list[str]:
    """Names of what a result has."""
    return list(flat(result.plain()))


def _value(result: Result, metric: str) -> Any:
    """What a result has as a metric, for people."""
    found = value_of(result.plain(), metric)
    return None if found is None else repr(found)

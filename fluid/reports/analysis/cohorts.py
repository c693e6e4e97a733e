"""Cohorts of a run: trials of one profile key, parted by their configs, and how well configs told what they take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fluid.display.format import count, duration, percent
from fluid.measure.json_input import without_surrogates
from fluid.measure.profile import Profile
from fluid.reports.story.history import RunHistory
from fluid.reports.story.words import bytes_name
from fluid.results.iterations import StoredIteration


@dataclass(frozen=True, kw_only=True)
class ShownCohort:
    """One cohort.

    Attributes:
        conditions: in words, ``"batch_size > 96"``.
        trials: how many were measured.
        seconds: median per iteration, alone on a device of speed 1; ``None`` if none was measured.
        peak_bytes: most memory of one of them; ``None`` if none was measured.
        alpha, c: packing overhead of its trials, and how many of them a device runs; ``None`` if packing was not
            measured for them.
    """

    conditions: str
    trials: int
    seconds: float | None
    peak_bytes: float | None
    alpha: float | None = None
    c: int | None = None

    @property
    def text(self) -> str:
        """In words: ``"batch_size > 96: 3.1 s, 9 GiB (41 trials)"``."""
        facts = [] if self.seconds is None else [duration(self.seconds)]
        facts += [] if self.peak_bytes is None else [bytes_name(self.peak_bytes)]
        return f"{self.conditions}: {', '.join(facts) or 'not measured'} ({count(self.trials, 'trial')})"


@dataclass(frozen=True, kw_only=True)
class KeyCohorts:
    """The cohorts of one profile key.

    Attributes:
        key: the profile key.
        cohorts: none if its trials are too much alike to be parted.
        predicted: trials whose seconds per iteration were predicted from their configs before their first iteration.
        compared: those of them that ran alone on a device, so that their seconds can be compared.
        error: the median of the errors of these predictions, relative to the predicted seconds; ``None`` if there are
            none.
    """

    key: str
    cohorts: tuple[ShownCohort, ...]
    predicted: int = 0
    compared: int = 0
    error: float | None = None

    @property
    def error_text(self) -> str:
        """How good predictions were, in words; empty if none can be compared."""
        if self.error is None:
            return ""
        trials = count(self.compared, "trial")
        return (
            f"seconds of {trials} predicted from configs before the first iteration: median error {percent(self.error)}"
        )

    def as_json(self) -> dict[str, Any]:
        """In the output of ``fluid report --json``, in the list ``cohorts``: trials of a key whose configs differ.

        * ``key``: the profile key
        * ``cohorts``: a list of ``conditions``, ``trials`` measured, ``seconds`` per iteration, ``peak_bytes``,
          ``alpha`` and ``c``
        * ``predicted_trials``, those predicted before their first iteration; ``compared_trials``, those of them that
          ran alone on a device; and ``median_error`` of their predicted seconds
        """
        return {
            "key": self.key,
            "cohorts": [asdict(cohort) for cohort in self.cohorts],
            "predicted_trials": self.predicted,
            "compared_trials": self.compared,
            "median_error": self.error,
        }


def cohorts_of(
    profile: Profile | None, history: RunHistory, done: Mapping[str, Sequence[StoredIteration]]
) -> tuple[KeyCohorts, ...]:
    """The cohorts of each profile key that has some, or of which trials were predicted.

    Args:
        profile: what the session measured; ``None`` if it has not written that.
        history: the run's journal.
        done: the finished iterations, by trial.
    """
    errors, predicted = _errors(history, done)
    found = []
    trees = {} if profile is None else profile.cohorts
    for key in dict.fromkeys([*trees, *predicted]):
        leaves = trees[key].cohorts if key in trees else []
        shown = [
            ShownCohort(
                conditions=without_surrogates(leaf.conditions),
                trials=leaf.trials,
                seconds=leaf.seconds,
                peak_bytes=leaf.peak_bytes,
                **_packing(profile, f"{key} [{leaf.conditions}]"),
            )
            for leaf in (leaves if len(leaves) > 1 else [])
        ]
        known = errors.get(key, [])
        error = statistics.median(known) if known else None
        if shown or predicted.get(key):
            name, number = without_surrogates(key), predicted.get(key, 0)
            found.append(KeyCohorts(key=name, cohorts=tuple(shown), predicted=number, compared=len(known), error=error))
    return tuple(found)


def _packing(profile: Profile | None, key: str) -> dict[str, Any]:
    packing = 0 if profile is None else profile.measured_packing(key)
    if profile is None or packing < 2:
        return {}
    return {"alpha": profile.alpha(key), "c": profile.packing_limit(key, packing)}


def _errors(
    history: RunHistory, done: Mapping[str, Sequence[StoredIteration]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Errors of the predictions, and the number of trials that were predicted, by profile key."""
    errors: dict[str, list[float]] = {}
    predicted: dict[str, int] = {}
    for trial, entries in history.of_trial.items():
        first = next((entry for entry in entries if entry.what == "NotePlaced"), None)
        seconds = None if first is None else first.fields.get("predicted_s")
        if not isinstance(seconds, (int, float)) or seconds <= 0.0:
            continue
        key = history.key_of.get(trial, "")
        predicted[key] = predicted.get(key, 0) + 1
        alone = [each.seconds for each in done.get(trial, ()) if each.width == 1.0 and each.rows == 1]
        # The first iteration may load or compile something. Devices of several models have several speeds.
        alone = alone[1:] or alone
        if alone and len(set(history.models.values())) <= 1:
            errors.setdefault(key, []).append(abs(statistics.median(alone) / seconds - 1.0))
    return errors, predicted


def predicted_text(fields: Mapping[str, Any], facts: dict[str, Any]) -> str:
    """What a trial was expected to take when it was placed, as the end of a sentence; added to the facts."""
    seconds, cohort = fields.get("predicted_s"), fields.get("cohort")
    if not isinstance(seconds, (int, float)) or seconds <= 0.0:
        return ""
    facts["predicted_s"], facts["cohort"] = seconds, cohort
    whose = f" (cohort {cohort})" if isinstance(cohort, str) else ""
    return f"; expected to take {duration(seconds)} an iteration, as its config tells{whose}"

"""How much each hyperparameter matters for a metric: Optuna's functional ANOVA on the trials of a run.

A random forest predicts the best value of a trial from its config; the importance of a hyperparameter is its share of
the variance of these predictions (Hutter, Hoos, Leyton-Brown: An Efficient Approach for Assessing Hyperparameter
Importance, ICML 2014). With many trials the mean decrease in impurity of such a forest is used, which is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid._imports import try_import
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.reports.tables.hyperparameters import differing, value_text
from fluid.reports.tables.ranking import value_of
from fluid.results.best import NOT_BEST
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, is_bookkeeping, is_number
from fluid.search.schedules import with_parts
from fluid.trialgroup import TrialState

#: Fewest trials to judge by, and most trials times hyperparameters for functional ANOVA.
FEWEST_TRIALS, _MOST_FOR_ANOVA = 8, 1000
#: Most different values of a hyperparameter that has no order.
_MOST_CHOICES = 32
#: A positive hyperparameter whose values span this factor is taken on a logarithmic scale.
_LOG_SPAN = 100.0
#: The forest works with single precision; larger numbers are taken as values without an order.
_LARGEST = 3e38
#: Most metrics of a run for which they are computed.
_MOST_METRICS = 4
#: Of the forest.
_TREES, _SEED = 64, 0


@dataclass(frozen=True)
class Importances:
    """How much the hyperparameters of a run matter.

    Attributes:
        metric: for this metric.
        shares: the importance of each hyperparameter, the most important one first; they add up to 1. Empty if there
            are none.
        method: ``"fANOVA"`` or ``"mean decrease in impurity"``; empty if there are none.
        trials: how many trials they are from.
        note: why there are none, or what they leave out; empty if there is nothing to say.
    """

    metric: str
    shares: Mapping[str, float] = field(default_factory=dict)
    method: str = ""
    trials: int = 0
    note: str = ""


class JudgedTrial(NamedTuple):
    """What counts of a trial.

    Attributes:
        state: how it ended.
        iterations: how many it has finished.
        config: its hyperparameters.
        value: its best value of the metric; ``None`` if it reported none.
    """

    state: str
    iterations: int
    config: Mapping[str, Any]
    value: float | None


def importances(trials: Sequence[TrialRun], goal: Goal) -> Importances:
    """The importances of the hyperparameters of a run: see :func:`importances_of`.

    Args:
        trials: the trials of a run.
        goal: the metric, of which each trial's best value counts.
    """
    judged = (JudgedTrial(trial.state, trial.iterations, trial.config, value_of(trial, goal)) for trial in trials)
    return importances_of(tuple(judged), goal.metric)


def importances_of(trials: Sequence[JudgedTrial], metric: str) -> Importances:
    """Computes importances; says why where it cannot.

    They are of the trials that are done or ran as long as any, if these are enough, else of all that reported a number
    and did not fail.

    Args:
        trials: the trials.
        metric: what their values are of.
    """
    valued = [trial for trial in trials if trial.state not in NOT_BEST and trial.value is not None]
    longest = max((trial.iterations for trial in valued), default=0)
    whole = [trial for trial in valued if trial.state == TrialState.DONE or trial.iterations == longest]
    used = whole if len(whole) >= FEWEST_TRIALS else valued
    if len(used) < FEWEST_TRIALS:
        note = f"needs {FEWEST_TRIALS} trials that reported it; there are {len(used)}"
        return Importances(metric, trials=len(used), note=note)
    values = [float(trial.value or 0.0) for trial in used]
    columns, left_out = _columns([with_parts(flat(trial.config)) for trial in used])
    if len(columns) < 2:
        which = f"only {next(iter(columns))} differs" if columns else "no hyperparameter differs"
        return Importances(metric, trials=len(used), note=f"{which} between the trials")
    if min(values) == max(values):
        return Importances(metric, trials=len(used), note=f"all trials have the same {metric}")
    found = _evaluate(columns, values)
    if isinstance(found, str):
        return Importances(metric, trials=len(used), note=found)
    notes = [] if len(used) == len(whole) else ["some of these trials ended early"]
    notes += [f"left out: {', '.join(left_out)}"] if left_out else []
    return Importances(metric, found[1], found[0], len(used), "; ".join(notes))


def by_metric(run: RecordedRun, known: Importances | None = None) -> dict[str, Sequence[tuple[str, float]] | str]:
    """The importances for a run's metrics: names and shares, or why there are none.

    They are computed for the goals of the run's searches and its first other metrics, not for bookkeeping.

    Args:
        run: the run.
        known: some that were computed already.
    """
    metrics = [metric for metric in run.metrics if not is_bookkeeping(metric)][:_MOST_METRICS]
    found: dict[str, Sequence[tuple[str, float]] | str] = {}
    for metric in metrics:
        one = known
        mode = run.mode_of(metric)
        if one is None or one.metric != metric:
            if mode is None:
                one = Importances(metric, note="it may mean either, so that the best values of trials are unknown")
            else:
                one = importances(run.trials, Goal(metric, mode == "min"))
        found[metric] = list(one.shares.items()) or one.note
    return {**dict.fromkeys(run.metrics, "not computed for this metric"), **found}


@dataclass(frozen=True)
class _Values:
    """A hyperparameter's values, one for each trial."""

    values: Sequence[Any]
    is_number: bool


def _columns(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, _Values], list[str]]:
    """The hyperparameters to judge, and those that cannot be: some trials lack them, or they have too many values."""
    columns: dict[str, _Values] = {}
    left_out = []
    for name in differing(configs):
        values = [config.get(name) for config in configs]
        if not all(name in config for config in configs):
            left_out.append(name)
        elif all(is_number(value) and abs(value) < _LARGEST for value in values):
            columns[name] = _Values(values, True)
        elif len(set(map(value_text, values))) <= _MOST_CHOICES:
            columns[name] = _Values([value_text(value) for value in values], False)
        else:
            left_out.append(name)
    return columns, left_out


def _evaluate(columns: Mapping[str, _Values], values: Sequence[float]) -> tuple[str, dict[str, float]] | str:
    """The method and the shares; why there are none if a package cannot be imported."""
    # Both take a second to import, which most runs that are too small for them need not wait for.
    with try_import("Optuna", extra="optuna") as of_optuna:
        import optuna
    with try_import("scikit-learn", extra="sklearn") as of_sklearn:
        import sklearn.ensemble  # noqa: F401  Optuna's evaluators import it when they run.
    for package, imports in (("Optuna", of_optuna), ("scikit-learn", of_sklearn)):
        if imports.problem:
            return f"needs {package}, which {imports.problem}"
    chosen = {name: _as_choices(optuna.distributions, column) for name, column in columns.items()}
    distributions = {name: distribution for name, (distribution, _) in chosen.items()}
    anova = len(values) * len(columns) <= _MOST_FOR_ANOVA
    make = optuna.importance.FanovaImportanceEvaluator
    if not anova:
        make = optuna.importance.MeanDecreaseImpurityImportanceEvaluator
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # Optuna logs that a study was made.
    try:
        study = optuna.create_study()
    finally:
        optuna.logging.set_verbosity(level)
    for row, value in enumerate(values):
        params = {name: each[row] for name, (_, each) in chosen.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    found = optuna.importance.get_param_importances(study, evaluator=make(n_trees=_TREES, seed=_SEED))
    return "fANOVA" if anova else "mean decrease in impurity", {name: float(share) for name, share in found.items()}


def _as_choices(kinds: Any, column: _Values) -> tuple[Any, Sequence[Any]]:
    """The distribution that spans a hyperparameter's values, and the values as it has them."""
    if not column.is_number:
        return kinds.CategoricalDistribution(list(dict.fromkeys(column.values))), column.values
    low, high = min(column.values), max(column.values)
    log = low > 0 and high / low >= _LOG_SPAN
    if all(isinstance(value, int) for value in column.values):
        return kinds.IntDistribution(low, high, log=log), column.values
    return kinds.FloatDistribution(float(low), float(high), log=log), [float(value) for value in column.values]

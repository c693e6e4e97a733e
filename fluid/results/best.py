"""The best trial, and how it is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult, short_text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BestTrial:
    """A trial and its best iteration.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, load
        >>> def train(config):
        ...     for step in range(3):
        ...         yield {"loss": (step - 1) ** 2 + config["lr"]}
        >>> with FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, budget=3, trial_id="a")])
        ...     done = executor.submit_trialgroup(group).wait()
        >>> best = load("run", metric="loss", mode="min").best
        >>> best.trial_id, best.value, best.iteration, best.metrics, best.config, best.trial.metrics
        ('a', 0.5, 2, {'loss': 0.5}, {'lr': 0.5}, {'loss': 1.5})

    Attributes:
        trial: the trial.
        metric: what it is best at; several for an element of :attr:`SweepResult.pareto`.
        value: the value of the metric; several for several metrics.
        iteration: the iteration with this value.
        metrics: what that iteration reported.
    """

    trial: TrialResult
    metric: str | tuple[str, ...]
    value: float | tuple[float, ...]
    iteration: int
    metrics: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"BestTrial({self.text})"

    @property
    def text(self) -> str:
        """Value, iteration, trial and config in one line."""
        names = self.metric if isinstance(self.metric, tuple) else (self.metric,)
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        shown = ", ".join(f"{name}={value:.6g}" for name, value in zip(names, values, strict=True))
        return f"{shown} at iteration {self.iteration} of trial {self.trial_id!r}, config={short_text(self.config)}"

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return self.trial.trial_id

    @property
    def config(self) -> Mapping[str, Any]:
        """The trial's hyperparameters."""
        return self.trial.config

    @property
    def checkpoint(self) -> Path | None:
        """The folder that ``save_checkpoint`` filled after the best iteration.

        If that checkpoint is not kept, the newest that is; ``None`` if none is. :attr:`checkpoint_iteration` tells.
        """
        kept = self.trial.checkpoints
        exact = [found for found in kept if found.iteration == self.iteration]
        return (exact or kept)[-1].path if kept else None

    @property
    def checkpoint_iteration(self) -> int | None:
        """Iterations done at :attr:`checkpoint`; ``None`` if no checkpoint is kept."""
        path = self.checkpoint
        return next((found.iteration for found in self.trial.checkpoints if found.path == path), None)

    def load_checkpoint(self) -> Any:
        """Loads :attr:`checkpoint`, as :meth:`TrialResult.load_checkpoint` does."""
        return self.trial.load_checkpoint(self.checkpoint)


def best_of(trials: Iterable[TrialResult], goal: Goal) -> BestTrial | None:
    """The trial with the best value at any of its iterations; ``None`` if none has reported a finite number.

    Of trials with equal values, the first one whose checkpoint is kept; else the first one.
    """
    best: list[tuple[float, TrialResult, Result]] = []
    for trial in eligible(trials):
        found = best_result(trial, goal)
        if found is None or (best and goal.is_better(best[0][0], found[0])):
            continue
        if best and goal.is_better(found[0], best[0][0]):
            best = []
        best.append((found[0], trial, found[1]))
    if not best:
        return None
    kept = (one for one in best if any(checkpoint.iteration == one[2].iteration for checkpoint in one[1].checkpoints))
    value, trial, result = best[0] if len(best) == 1 else next(kept, best[0])
    return BestTrial(trial=trial, metric=goal.metric, value=value, iteration=result.iteration, metrics=result.metrics)


def best_result(trial: TrialResult, goal: Goal) -> tuple[float, Result] | None:
    """A trial's best value and its iteration, the first of equals; ``None`` if it has reported no finite number."""
    best: tuple[float, Result] | None = None
    for result in trial.results:
        value = goal.value_in(result.metrics)
        if value is not None and (best is None or goal.is_better(value, best[0])):
            best = value, result
    return best


def eligible(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """The trials that may be best: those that have not failed, or all if all have."""
    listed = list(trials)
    return [trial for trial in listed if trial.state != "FAILED"] or listed

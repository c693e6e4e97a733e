"""The best trial, and how it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fluid.directions import direction_text
from fluid.errors import FluidError
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult, short_text
from fluid.trialgroup import TrialState


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
        mode: ``"min"`` if less of the metric is better, or ``"max"``; several for several metrics.
        value: the value of the metric; several for several metrics.
        iteration: the iteration with this value.
        metrics: what that iteration reported.
    """

    trial: TrialResult
    metric: str | tuple[str, ...]
    mode: str | tuple[str, ...]
    value: float | tuple[float, ...]
    iteration: int
    metrics: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"BestTrial({self.text})"

    @property
    def text(self) -> str:
        """Value, iteration, trial and config in one line."""
        names = self.metric if isinstance(self.metric, tuple) else (self.metric,)
        modes = self.mode if isinstance(self.mode, tuple) else (self.mode,)
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        each = zip(names, values, modes, strict=True)
        shown = ", ".join(f"{name}={value:.6g} ({direction_text(mode)})" for name, value, mode in each)
        failed = ", which failed" if has_failed(self.trial) else ""
        where = f"at iteration {self.iteration} of trial {self.trial_id!r}{failed}"
        return f"{shown} {where}, config={short_text(self.config)}"

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
        """The folder that ``save_checkpoint`` filled after the best iteration; ``None`` if that one is not kept.

        :attr:`TrialResult.checkpoints` has those of other iterations.
        """
        exact = [found.path for found in self.trial.checkpoints if found.iteration == self.iteration]
        return exact[-1] if exact else None

    @property
    def checkpoint_iteration(self) -> int | None:
        """:attr:`iteration`, if its checkpoint is kept; else ``None``."""
        return None if self.checkpoint is None else self.iteration

    def load_checkpoint(self) -> Any:
        """Loads the checkpoint of the best iteration, as :meth:`TrialResult.load_checkpoint` does.

        Raises:
            FluidError: it is not kept, or it is damaged; the error says of which iterations there are checkpoints.
        """
        path, kept = self.checkpoint, self.trial.checkpoints
        if path is None and kept:
            others = ", ".join(str(found.iteration) for found in kept)
            raise FluidError(
                f"the checkpoint of iteration {self.iteration}, the best of trial {self.trial_id!r}, is not kept; "
                f"there are those of iterations {others}: best.trial.load_checkpoint() loads the newest"
            )
        return self.trial.load_checkpoint(path)


class Merit(NamedTuple):
    """How good a trial is among those it is compared with: less is better. This is the one rule of what is best.

    * A trial that has failed comes after all others, whether they have ended or not. So it is the best only if all have
      failed.
    * A trial that has reported no finite number of the metric comes after those that have, and is never the best.
    * The best value of any iteration decides, and of equal values that of the trial that was submitted first. Within a
      trial it is the first iteration with that value.

    Attributes:
        failed: whether the trial has failed.
        valueless: whether it has no value.
        loss: its best value, with the sign that makes less better; 0 if it has none.
    """

    failed: bool
    valueless: bool
    loss: float

    @classmethod
    def of(cls, value: float | None, *, failed: bool, less: bool) -> Merit:
        """The merit of a trial.

        Args:
            value: its best value; ``None`` if it has none.
            failed: whether it has failed.
            less: whether less is better.
        """
        return cls(failed, value is None, 0.0 if value is None else value if less else -value)


T = TypeVar("T")


def ranked(trials: Iterable[T], merit: Callable[[T], Merit]) -> list[T]:
    """Trials in order of merit, the best first; equal ones in the order given, which is that of submission."""
    return sorted(trials, key=merit)


def best_among(trials: Iterable[T], merit: Callable[[T], Merit]) -> T | None:
    """The best of some trials, given in order of submission; ``None`` if no trial that may be the best has a value."""
    best = min(trials, key=merit, default=None)
    return None if best is None or merit(best).valueless else best


def eligible(trials: Iterable[T], failed: Callable[[T], bool]) -> list[T]:
    """The trials that may be best: those that have not failed, or all if all have."""
    listed = list(trials)
    return [trial for trial in listed if not failed(trial)] or listed


def has_failed(trial: TrialResult) -> bool:
    """Whether a trial has failed."""
    return trial.state == TrialState.FAILED


def best_of(trials: Iterable[TrialResult], goal: Goal) -> BestTrial | None:
    """The best trial, by :class:`Merit`; ``None`` if no trial that may be the best has reported a finite number."""
    found = [(trial, best_result(trial, goal)) for trial in trials]
    best = best_among(found, lambda one: _merit(*one, goal))
    if best is None or best[1] is None:
        return None
    trial, (value, result) = best[0], best[1]
    return BestTrial(
        trial=trial,
        metric=goal.metric,
        mode=goal.mode,
        value=value,
        iteration=result.iteration,
        metrics=result.metrics,
    )


def merit_of(trial: TrialResult, goal: Goal) -> Merit:
    """How good a trial is."""
    return _merit(trial, best_result(trial, goal), goal)


def _merit(trial: TrialResult, best: tuple[float, Result] | None, goal: Goal) -> Merit:
    return Merit.of(None if best is None else best[0], failed=has_failed(trial), less=goal.less)


def best_result(trial: TrialResult, goal: Goal) -> tuple[float, Result] | None:
    """A trial's best value and its iteration, the first of equals; ``None`` if it has reported no finite number."""
    best: tuple[float, Result] | None = None
    for result in trial.results:
        value = goal.value_of(result)
        if value is not None and (best is None or goal.is_better(value, best[0])):
            best = value, result
    return best

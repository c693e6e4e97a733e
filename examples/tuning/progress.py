"""Prints the progress of a sweep."""

from __future__ import annotations

import time
from typing import Any

from ray.tune.logger import LoggerCallback


class Progress(LoggerCallback):  # type: ignore[misc]
    """Prints a line whenever a trial is better than all before and whenever one has ended.

    On a terminal the lines are printed above Fluid's live view.

    Args:
        metric: the metric to compare trials by.
        mode: ``"max"`` or ``"min"``.
    """

    def __init__(self, metric: str, mode: str) -> None:
        self._metric, self._sign = metric, 1.0 if mode == "max" else -1.0
        self._ended = 0
        self._best: float | None = None

    def setup(self, **_: Any) -> None:
        self._begun = time.monotonic()

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        value = result[self._metric]
        if self._best is None or self._sign * value > self._sign * self._best:
            self._best = value
            self._say(trial, result, "the best so far")

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        self._ended += 1
        self._say(trial, trial.last_result, f"ended, {self._ended} in all; best so far {self._best:.4g}")

    def _say(self, trial: Any, result: dict[str, Any], what: str) -> None:
        print(
            f"{time.monotonic() - self._begun:6.1f} s  {trial.trial_id}  {self._metric} {result[self._metric]:.4g} "
            f"after {result['training_iteration']:2d} iterations: {what}",
            flush=True,
        )

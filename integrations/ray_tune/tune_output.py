"""Tune's own output beside Fluid's live view, which shows the same: it is left out unless the user asks for it."""

from __future__ import annotations

from typing import Any

import ray.tune

from fluid.display.notebook import NotebookView
from fluid.executor import FluidExecutor


class SilentReporter(ray.tune.ProgressReporter):  # type: ignore[misc]
    """Reports nothing. Tune's own reporter for notebooks clears the output of the cell, with the live view in it."""

    def should_report(self, trials: Any, done: bool = False) -> bool:
        """Whether there is something to report: never."""
        return False

    def report(self, trials: Any, done: bool, *sys_info: Any) -> None:
        """Does nothing."""


def output_options(executor: FluidExecutor, verbose: Any, reporter: Any) -> dict[str, Any]:
    """What to pass to Tune as ``verbose`` and ``progress_reporter``; empty where its output stays as it is.

    Args:
        executor: runs the sweep.
        verbose, reporter: what the user has passed; ``None`` if nothing.
    """
    if verbose is not None or reporter is not None or not executor.is_live:
        return {}
    # Elsewhere Tune warns of a reporter.
    return {"verbose": 0, **({"progress_reporter": SilentReporter()} if NotebookView.wanted() else {})}

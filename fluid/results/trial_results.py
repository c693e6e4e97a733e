"""Makes the records that users get of trials: of submitted trials and their reported iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fluid.results.iterations import ReportedIteration
from fluid.results.records import Result, TrialFiles, TrialResult
from fluid.results.submitted import SubmittedTrial


def result_of(reported: ReportedIteration, trial: SubmittedTrial) -> Result:
    """An iteration of a submitted trial, numbered as in the trial it is shown as, with that trial's metrics."""
    metrics = reported.metrics
    if trial.inner is not None:
        inner = metrics.get(trial.inner) if isinstance(metrics, Mapping) else None
        metrics = inner
        if isinstance(inner, Mapping):  # Ray Tune fills in what it knows nothing of.
            metrics = {name: value for name, value in inner.items() if value is not None}
    return Result(
        trial_id=trial.shown_id,
        iteration=reported.number + trial.before,
        metrics=metrics if isinstance(metrics, Mapping) else {},
        seconds=reported.seconds,
        width=reported.width,
        device_ids=reported.devices,
        rows=reported.rows,
        config=trial.config,
    )


def trial_result(
    group: str,
    parts: Sequence[SubmittedTrial],
    results_of: Callable[[SubmittedTrial], Sequence[Result]],
    files: TrialFiles,
) -> TrialResult:
    """A trial, made of the submitted trials that are shown as it; the last determines its state.

    Args:
        group: name of its group.
        parts: the submitted trials, in order.
        results_of: gives the iterations of one of them, in order.
        files: where the trial's files are.
    """
    last = parts[-1]
    results = tuple(result for part in parts for result in results_of(part))
    return TrialResult(
        trial_id=last.shown_id,
        group=group,
        config=last.config,
        state=last.state,
        iteration=max((result.iteration for result in results), default=0),
        metrics=results[-1].metrics if results else {},
        results=results,
        failure=last.failure,
        seeds=last.seeds,
        files=files,
    )


def files_of(run_dir: Path, parts: Sequence[SubmittedTrial]) -> TrialFiles:
    """Where the files of the submitted trials are."""
    return TrialFiles(run_dir, tuple((part.trial_id, part.before) for part in parts))

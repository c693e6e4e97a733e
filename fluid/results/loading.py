"""Reads a run folder as a :class:`fluid.SweepResult`. Its session may run, have ended, or have been killed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluid.results.folder_files import is_locked
from fluid.results.iterations import FinishedIteration, read_iterations
from fluid.results.metrics import goals_of
from fluid.results.records import Result, TrialFiles, TrialResult
from fluid.results.run_files import RunFiles
from fluid.results.submitted import UNFINISHED, LoadedGroup, LoadedTrial, SubmittedTrials
from fluid.results.sweep import SweepResult
from fluid.trialgroup import Search


def load(
    run_dir: str | Path,
    metric: str | Sequence[str] | None = None,
    mode: str | Sequence[str] | None = None,
) -> SweepResult:
    """Reads the trials of a session from its run folder. The session may still run, or may have been killed.

    Nothing is unpickled before a checkpoint is loaded, and the folder is not changed.

    Example:
        >>> import fluid
        >>> def train(config):
        ...     for step in (1, 2):
        ...         yield {"loss": config["lr"] / step}
        >>> trials = [fluid.Trial(train, {"lr": lr}, budget=2) for lr in (0.5, 0.25)]
        >>> with fluid.FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     done = executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
        >>> best = fluid.load("run", metric="loss", mode="min").best
        >>> best.config, best.value, best.iteration
        ({'lr': 0.25}, 0.125, 2)

    Args:
        run_dir: the run folder.
        metric: what the sweep optimizes, or several such names; ``None``, the default, for what its search says.
        mode: ``"min"`` or ``"max"``, one per metric; ``None``, the default, for what its search says, else by the
            metric's name: less is better for a loss or an error.

    Raises:
        InvalidFieldError: the path is not a run folder, cannot be read, or is of a newer Fluid; or metric or mode
            cannot be used.
    """
    files = RunFiles(run_dir, "run_dir")
    session, journal, done = files.session(), files.journal(), read_iterations(files)
    groups = SubmittedTrials(files, journal, done).groups()
    trials = tuple(_trial(files.path, group, trial) for group in groups for trial in group.trials)
    known = goals_of(*completed(metric, mode, [group.search for group in groups]))
    metrics, modes = tuple(goal.metric for goal in known), tuple(goal.mode for goal in known)
    return SweepResult(
        trials=trials,
        metric=metrics if len(known) > 1 else metrics[0] if known else None,
        mode=modes if len(known) > 1 else modes[0] if known else None,
        run_dir=files.path,
        name=_name(files.path, session, groups),
        state="RUNNING" if is_locked(files.path) else _state(trials),
        notes=tuple(files.notes),
    )


def completed(metric: Any, mode: Any, searches: Iterable[Search | None]) -> tuple[Any, Any]:
    """Returns metric and mode, taken from the searches where the caller names none.

    Args:
        metric, mode: what the caller names.
        searches: those of the groups; where they optimize different metrics, none of these is taken.
    """
    known = {search.metric: search.mode for search in searches if search is not None and search.metric}
    if metric is None and len(known) == 1:
        (metric,) = known
    if mode is None and isinstance(metric, str):
        mode = known.get(metric)
    return metric, mode


def _trial(run_dir: Path, group: LoadedGroup, trial: LoadedTrial) -> TrialResult:
    results = tuple(_result(trial, iteration) for iteration in trial.finished)
    return TrialResult(
        trial_id=trial.trial_id,
        group=group.name,
        config=trial.config,
        state=trial.state,
        iteration=max((result.iteration for result in results), default=0),
        metrics=results[-1].metrics if results else {},
        results=results,
        failure=trial.failure,
        files=TrialFiles(run_dir, trial.parts),
    )


def _result(trial: LoadedTrial, iteration: FinishedIteration) -> Result:
    return Result(
        trial_id=trial.trial_id,
        iteration=iteration.number,
        metrics=iteration.reported if isinstance(iteration.reported, Mapping) else {},
        seconds=iteration.end - iteration.start,
        width=iteration.width,
        device_ids=iteration.devices,
        config=trial.config,
    )


def _name(run_dir: Path, session: Mapping[str, Any], groups: Sequence[LoadedGroup]) -> str:
    """The session's own name; else that of its only group; else that of the folder."""
    return str(session.get("name") or (groups[0].name if len(groups) == 1 else run_dir.resolve().name))


def _state(trials: Sequence[TrialResult]) -> str:
    return UNFINISHED if any(trial.state == UNFINISHED for trial in trials) else "DONE"

"""Reads a run folder as a :class:`fluid.SweepResult`. Its session may run, have ended, or have been killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluid.results.code_changes import code_notes
from fluid.results.folder_files import is_locked
from fluid.results.gaps import IterationGaps
from fluid.results.iterations import ReportedIteration, reported_lines
from fluid.results.metrics import goals_of
from fluid.results.records import Result, TrialResult
from fluid.results.run_files import RunFiles
from fluid.results.submitted import UNFINISHED, SubmittedGroup, SubmittedTrial, SubmittedTrials
from fluid.results.sweep import SweepResult
from fluid.results.trial_results import files_of, result_of, trial_result
from fluid.trialgroup import PAUSED_BY_USER, Search


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
        mode: ``"min"`` or ``"max"``, one per metric; ``None``, the default, for what its search says, else for
            what the metric's name says (``docs/sweeps.md``).

    Raises:
        InvalidFieldError: the path is not a run folder, cannot be read, or is of a newer Fluid; metric or mode
            cannot be used; or a metric without a mode is named that may mean either.
    """
    files = RunFiles(run_dir, "run_dir")
    session, noted = files.session(), len(files.notes)
    journal, has_journal = files.journal(), len(files.notes) == noted
    reported = reported_lines(files)
    group_of: dict[str, str] = {}
    gaps = IterationGaps()
    for one in reported:
        group_of.setdefault(one.trial_id, one.group_id)
        gaps.take(one.trial_id, one.number)
    entries = files.trials()
    files.notes += [*gaps.notes(journal.reported), *code_notes(entries)]
    submitted = SubmittedTrials(entries, journal, group_of)
    groups, is_running = submitted.groups(), is_locked(files.path)
    if not is_running:  # Else files that are read later have more.
        files.notes += submitted.lost(has_journal=has_journal)
    trials = tuple(_trials(files.path, groups, reported))
    wanted = completed(metric, mode, [group.search for group in groups])
    if metric is not None:
        goals_of(*wanted)  # Raises.
    return SweepResult.make(
        trials,
        *wanted,
        run_dir=files.path,
        name=_name(files.path, session, groups),
        state="RUNNING" if is_running else _state(trials),
        notes=tuple(files.notes),
    )


def completed(metric: Any, mode: Any, searches: Iterable[Search | None]) -> tuple[Any, Any]:
    """Returns metric and mode, taken from the searches where the caller names none.

    Args:
        metric, mode: what the caller names.
        searches: those of the groups; where they optimize different metrics, none of these is taken.
    """
    described = [search for search in searches if search is not None and search.metric]
    known = {search.metric: search.mode for search in described}
    if metric is None and mode is None and len(goals := {(search.metric, search.besides) for search in described}) == 1:
        ((first, besides),) = goals
        if besides:
            names, modes = zip(*besides, strict=True)
            return (first, *names), (known[first], *modes)
    if metric is None and len(known) == 1:
        (metric,) = known
    if mode is None and isinstance(metric, str):
        mode = known.get(metric)
    return metric, mode


def _trials(
    run_dir: Path, groups: Iterable[SubmittedGroup], reported: Iterable[ReportedIteration]
) -> Iterator[TrialResult]:
    of_trial: dict[str, list[ReportedIteration]] = {}
    for one in reported:
        of_trial.setdefault(one.trial_id, []).append(one)

    def results_of(part: SubmittedTrial) -> list[Result]:
        return [result_of(one, part) for one in of_trial.get(part.trial_id, ())]

    for group in groups:
        for parts in group.trials.values():
            yield trial_result(group.name, parts, results_of, files_of(run_dir, parts))


def _name(run_dir: Path, session: Mapping[str, Any], groups: Sequence[SubmittedGroup]) -> str:
    """The session's own name; else that of its only group; else that of the folder."""
    return str(session.get("name") or (groups[0].name if len(groups) == 1 else run_dir.resolve().name))


def _state(trials: Sequence[TrialResult]) -> str:
    return UNFINISHED if any(trial.state in (UNFINISHED, PAUSED_BY_USER) for trial in trials) else "DONE"

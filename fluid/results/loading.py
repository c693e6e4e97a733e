"""Reads a run folder as a :class:`fluid.SweepResult`. Its session may run, have ended, or have been killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fluid.errors import FluidError
from fluid.results.damage import IterationGaps, tell_damage
from fluid.results.iterations import (
    StoredIteration,
    TimeAxis,
    files_of,
    only_of,
    read_iteration,
    result_of,
    trial_result,
)
from fluid.results.metrics import goals_of
from fluid.results.records import Result, TrialResult
from fluid.results.run_files import BROKEN, RESULTS, TRIALS, JsonLines, as_written
from fluid.results.stored_run import StoredRun, read_run
from fluid.results.submitted import UNFINISHED, SubmittedTrial
from fluid.results.sweep import SweepResult
from fluid.trialgroup import PAUSED_BY_USER, Search, Trial
from fluid.user_calls import user_call


@user_call
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
    return sweep_in(read_run(run_dir), metric, mode)


def sweep_in(run: StoredRun, metric: Any = None, mode: Any = None) -> SweepResult:
    """The trials of a run folder, with metric and mode as for :func:`load`."""
    groups, is_running = run.groups, run.is_running
    trials = tuple(_trials(run))
    wanted = completed(metric, mode, [group.search for group in groups])
    if metric is not None:
        goals_of(*wanted)  # Raises.
    return SweepResult.make(
        trials,
        *wanted,
        run_dir=run.folder,
        name=run.name,
        state="RUNNING" if is_running else _state(trials),
        notes=(*run.notes, *run.losses()),
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


def _trials(run: StoredRun) -> Iterator[TrialResult]:
    def results_of(part: SubmittedTrial) -> list[Result]:
        return [result_of(one, part) for one in run.of_trial.get(part.trial_id, ())]

    for group in run.groups:
        for parts in group.trials.values():
            yield trial_result(group.name, parts, results_of, files_of(run.path, parts))


def _state(trials: Sequence[TrialResult]) -> str:
    return UNFINISHED if any(trial.state in (UNFINISHED, PAUSED_BY_USER) for trial in trials) else "DONE"


# -- earlier -------------------------------------------------------------------------------------
#
# The results of a session that is resumed. They stay in ``results.jsonl``, and are read when someone asks for them.


@dataclass
class GroupResults:
    """The earlier results of one group.

    Attributes:
        folder: the run folder.
        group_id: the group.
        start, end: the bytes of ``results.jsonl`` that hold them, among those of other groups.
        first_start, last_end: seconds, on the axis of :class:`EarlierResults`.
    """

    folder: Path
    group_id: str
    start: int
    end: int
    first_start: float = math.inf
    last_end: float = -math.inf

    def read(self, trial_of: Callable[[str], Trial | None]) -> Iterator[Result]:
        """Gives the results in the order written; their metrics are what JSON makes of them.

        Args:
            trial_of: a trial, by its id; ``None`` for one that was forgotten, whose config is then read from
                ``trials.jsonl``, as JSON has it.

        Raises:
            FluidError: the file was deleted meanwhile.
        """
        if not (self.folder / RESULTS).is_file():
            raise FluidError(f"the results of the sessions before are gone: {self.folder / RESULTS} was deleted")
        forgotten: dict[str, Mapping[str, Any]] | None = None
        lines = JsonLines(self.folder / RESULTS, self.start, only_of([self.group_id]))
        for line in lines.there(self.end):
            if (reported := line.value) is None or reported is BROKEN:
                continue
            config: Any = trial_of(reported.trial_id)
            if config is None:
                forgotten = self._lines() if forgotten is None else forgotten
                line_of = forgotten.get(reported.trial_id, {})
                if line_of.get("is_shared_run") is True:
                    continue  # The trials that share it have its iterations.
                config = known if isinstance(known := line_of.get("config"), dict) else {}
            yield Result(
                trial_id=reported.trial_id,
                iteration=reported.number,
                metrics=reported.metrics,
                seconds=reported.seconds,
                width=reported.width,
                device_ids=reported.devices,
                rows=reported.rows,
                usage=reported.usage,
                source=reported.source,
                config=config,
            )

    def _lines(self) -> dict[str, Mapping[str, Any]]:
        """The lines of the group's trials in ``trials.jsonl``, by trial."""
        entries = (line.entry for line in JsonLines(self.folder / TRIALS, read=as_written).there())
        return {entry["trial"]: entry for entry in entries if entry.get("group") == self.group_id and "trial" in entry}


@dataclass
class EarlierResults:
    """What ``results.jsonl`` holds when a session is resumed.

    Times are on one axis, that of the files; where an older Fluid wrote there after a reboot, what follows its reset is
    set behind the latest result.

    Attributes:
        reported: newest iteration, by trial id.
        gaps: which iterations there are.
        groups: by group id.
        axis: on which times are.
        damage: lines that are damaged, repeated or missing, as :class:`fluid.checksums.LineChecks` counts them.
    """

    reported: dict[str, int] = field(default_factory=dict)
    gaps: IterationGaps = field(default_factory=IterationGaps)
    groups: dict[str, GroupResults] = field(default_factory=dict)
    axis: TimeAxis = field(default_factory=TimeAxis)
    damage: int = 0

    @classmethod
    def scan(
        cls, folder: Path, least: int = 0, hear: Callable[[StoredIteration], None] = lambda _: None
    ) -> EarlierResults:
        """Reads a run folder's results, and keeps where they are. Damaged lines are skipped, and told in the log.

        Args:
            folder: the run folder.
            least: the offset to which the file went on at least.
            hear: called with each result, in the order written.
        """
        found, lines = cls(), JsonLines(folder / RESULTS, read=partial(read_iteration, read=as_written))
        for line in lines.there():
            reported = line.value
            if not isinstance(reported, StoredIteration):
                if reported is not BROKEN:
                    lines.checks.refuse()
                continue
            trial_id, group_id = reported.trial_id, reported.group_id
            found.reported[trial_id] = max(reported.number, found.reported.get(trial_id, 0))
            found.gaps.take(trial_id, reported.number)
            offset = found.axis.offset_of(reported)
            if group_id not in found.groups:
                found.groups[group_id] = GroupResults(folder, group_id, line.start, line.end)
            group = found.groups[group_id]
            group.end = line.end
            if not reported.source:
                group.first_start = min(group.first_start, reported.start + offset)
                group.last_end = max(group.last_end, reported.at + offset)
            hear(reported)
        found.damage = lines.checks.damage
        tell_damage(folder / RESULTS, lines.checks, least)
        return found

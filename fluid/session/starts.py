"""From what trials start: the states of others, and runs that Fluid adds for those that agree until an iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fluid.engine.events import Checkpoint, StartState
from fluid.errors import FluidError, InvalidFieldError
from fluid.lane.checkpoints.paths import host_of, trial_folder_name, trial_of_folder
from fluid.random_state import Seeds
from fluid.results.checkpoints import kept_checkpoints
from fluid.results.run_files import TRIALS, JsonLines, as_written
from fluid.search.prefixes import Member, plan_prefixes
from fluid.search.schedules import schedules_in, with_schedules
from fluid.trainables.trainable import can_restore, can_save
from fluid.trial_fields import StartFrom
from fluid.trialgroup import Trial
from fluid.user_values import is_same_value, text_of

#: Folders between a checkpoint and its run: the trial's kept ones, the trial, all trials.
_IN_RUN = 3

# -- start states --------------------------------------------------------------------------------


def start_state(trial: Trial, start: StartFrom, run_dir: Path) -> StartState:
    """The state from which a trial starts, as the engine is to know it.

    Args:
        trial: as the user submitted it.
        start: its ``start_from``.
        run_dir: the run folder, which may have kept a checkpoint of an iteration that the parent has long left behind.

    Raises:
        InvalidFieldError: its trainable cannot be restored.
    """
    if not can_restore(trial.trainable):
        reason = "give its function a second parameter `state`, or its class load_checkpoint()"
        reason = f"is a state that the trainable of trial {trial.id!r} cannot go on from: {reason}"
        raise InvalidFieldError("start_from", start.parent or start.path, reason)
    if start.path:
        name = start.parent or trial_of_folder(trial_folder_name(start.path)) or trial_folder_name(start.path)
        assert start.at is not None
        checkpoint = Checkpoint(start.at, start.path, host_of(start.path))
        return StartState(name, start.at, checkpoint, is_shared=start.is_shared)
    if start.at is not None and not start.is_shared:
        for found in reversed(kept_checkpoints(run_dir, start.parent)):
            folder = found.path.parent
            if found.iteration == start.at and folder.parent.name == "kept":
                return StartState(start.parent, start.at, Checkpoint(start.at, str(folder), host_of(str(folder))))
    return StartState(start.parent, start.at, is_shared=start.is_shared)


def kept_seeds(start: StartFrom) -> Seeds | None:
    """The seeds of the trial of whose checkpoint this is the path, in its run folder; ``None`` if they are unknown."""
    checkpoint = Path(start.path)
    trial_id = trial_of_folder(trial_folder_name(start.path))
    if trial_id is None or len(checkpoint.parents) <= _IN_RUN:
        return None
    with suppress(OSError, FluidError):
        lines = JsonLines(checkpoint.parents[_IN_RUN] / TRIALS, read=as_written).there()
        found = [line.entry.get("seeds") for line in lines if line.entry.get("trial") == trial_id]
        return Seeds.read(found[-1]) if found else None
    return None


def require_no_start(trials: Sequence[Trial]) -> None:
    """Refuses trials that start from another one's state, where several drivers work a folder.

    Raises:
        InvalidFieldError: one does.
    """
    for trial in trials:
        if trial.start_from is not None:
            reason = "cannot be in a shared folder: the state is this driver's alone"
            raise InvalidFieldError("start_from", trial.start_from.parent or trial.start_from.path, reason)


# -- shared runs ---------------------------------------------------------------------------------


#: The fields in which the trials of a shared run may differ.
_OWN = frozenset({"config", "budget", "trial_id", "follow_up_iterations", "shown", "start_from", "at", "priority"})
_ALIKE = tuple(each.name for each in fields(Trial) if each.name not in _OWN)


class SharedTrials(NamedTuple):
    """Trials of one call, and the runs that some of them share.

    Attributes:
        trials: the runs, those that others start from first; then the trials, each as it starts.
        roots: by id of each run, and of each trial that shares one: the trial whose seeds it has, the tree's first.
    """

    trials: list[Trial]
    roots: dict[str, str]


def share_prefixes(trials: list[Trial], new_id: Callable[[], str], *, replays: bool = False) -> SharedTrials:
    """Makes runs of what trials of one call have in common until their schedules part.

    Args:
        trials: the trials.
        new_id: makes ids of runs.
        replays: whether no code of theirs runs: then a run has the config of its first trial, whose course is known.
    """
    places = [place for place, trial in enumerate(trials) if _may_share(trial)]
    if len(places) < 2:
        return SharedTrials(trials, {})
    sharing = [trials[place] for place in places]
    kinds = _Kinds()
    members = [Member(kinds.of(trial), trial.config, _extent(trial)) for trial in sharing]
    names: list[str] = []

    def name_of(number: int) -> str:
        while len(names) <= number:
            names.append(new_id())
        return names[number]

    plan = plan_prefixes(members, name_of)
    below: dict[int, list[Trial]] = {run.number: [] for run in plan.runs}
    roots: dict[str, str] = {}
    made = list(trials)
    for place, trial, fork in zip(places, sharing, plan.forks, strict=True):
        number = top = fork.run
        while number is not None:
            below[number].append(trial)
            top, number = number, plan.runs[number].parent
        if fork.run is not None and top is not None:
            made[place] = trial.changed(start_from=StartFrom(names[fork.run], fork.at, is_shared=True), at=fork.at)
            roots[trial.id] = below[top][0].id
    runs = []
    for run in plan.runs:
        of_run = below[run.number]
        start = None if run.parent is None else StartFrom(names[run.parent], run.begin, is_shared=True)
        roots[names[run.number]] = roots[of_run[0].id]
        runs.append(
            of_run[0].changed(
                config=of_run[0].config if replays else dict(run.config),
                budget=min(run.until, max(trial.budget for trial in of_run)),
                priority=max(trial.priority for trial in of_run),
                follow_up_iterations=0,
                trial_id=names[run.number],
                profile_key=of_run[0].key,
                shown=None,
                start_from=start,
                at=None if start is None else start.at,
                is_shared_run=True,
            )
        )
    return SharedTrials([*runs, *made], roots)


def _may_share(trial: Trial) -> bool:
    return trial.prefix and trial.start_from is None and can_save(trial.trainable) and bool(schedules_in(trial.config))


def _extent(trial: Trial) -> int:
    """Iterations that a trial may run in all, with those that its search may add."""
    return trial.budget + trial.follow_up_iterations


class _Kinds:
    """Numbers trials by what must be alike. Those that repeat each other are of two kinds: each has its own seed."""

    def __init__(self) -> None:
        #: By a text: what must be alike of each kind that has it, and its number.
        self._seen: dict[str, list[tuple[tuple[Any, ...], int]]] = {}
        self._kinds = 0
        #: How many trials have a kind and schedules.
        self._repeats = Counter[Hashable]()

    def of(self, trial: Trial) -> tuple[int, int]:
        """The number of the trial's kind, and how many trials before it had the same config."""
        rest = with_schedules(trial.config, lambda _: None)
        kind = self._number(text_of(rest), (*(getattr(trial, name) for name in _ALIKE), rest))
        whole = kind, frozenset(schedules_in(trial.config).items())
        self._repeats[whole] += 1
        return kind, self._repeats[whole] - 1

    def _number(self, text: str, values: tuple[Any, ...]) -> int:
        alike = self._seen.setdefault(text, [])
        for seen, number in alike:
            if all(one is other or is_same_value(one, other) for one, other in zip(values, seen, strict=True)):
                return number
        number = self._kinds = self._kinds + 1
        alike.append((values, number))
        return number

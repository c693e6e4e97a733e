"""States of earlier runs from which trials of equal content start (docs/sweeps.md).

The content of a trial is its code, its config, its seed and what the user says of its data, until an iteration. Run
folders that lie beside a session's own, and are of the same user, say of which content their trials were; what of a
state is left there is what was kept for a session that goes on, or by ``keep=``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fluid._logs import logger_of
from fluid._version import __version__
from fluid.engine.commands import Report
from fluid.errors import InvalidFieldError
from fluid.policies.forking.shared_runs import IterationsKnown
from fluid.random_state import SeedOrigin, Seeds
from fluid.results.checkpoints import kept_checkpoints
from fluid.results.run_files import RESULTS, TRIALS, JsonLines
from fluid.search.schedules import Schedule, schedules_in, with_schedules
from fluid.session.starts import SharedTrials
from fluid.trainables.encoded_metrics import EncodedMetrics, numbers_in
from fluid.trainables.trainable import can_save, profile_name
from fluid.trainables.trainable_code import code_of, objects_of, value_text
from fluid.trial_fields import StartFrom
from fluid.trialgroup import Trial

_logger = logger_of("fluid.session")
#: Of the digests; another form has another number.
_VERSION = 2
#: What a trial asks of its process and devices that may change what it computes.
_FIELDS = ("devices", "threads", "max_width", "chdir")


class Content(NamedTuple):
    """What a trial computes until an iteration.

    Attributes:
        base: digest of all but the values of schedules.
        extent: the iteration.
        prefix: digest of the values of the schedules until then.
    """

    base: str
    extent: int
    prefix: str


class KnownIteration(NamedTuple):
    """An iteration that an earlier run has reported.

    Attributes:
        iteration, seconds: as it was.
        metrics: in their JSON form.
    """

    iteration: int
    seconds: float
    metrics: Any


@dataclass(frozen=True)
class KnownState:
    """A state of an earlier run.

    Attributes:
        run: its run folder.
        trial_id: the trial there.
        content: its content.
    """

    run: Path
    trial_id: str
    content: Content

    def start(self) -> StartFrom | None:
        """From where a trial starts that starts from it; ``None`` if no checkpoint is left."""
        for found in reversed(kept_checkpoints(self.run, self.trial_id)):
            if found.iteration == self.content.extent:
                return StartFrom(self.trial_id, found.iteration, str(found.path.parent), is_shared=True)
        return None

    def iterations(self) -> list[KnownIteration] | None:
        """What it has reported until then, in order; ``None`` if some of it is gone."""
        found: dict[int, KnownIteration] = {}
        for line in JsonLines(self.run / RESULTS).there():
            entry = line.entry
            if entry.get("trial") == self.trial_id and isinstance(number := entry.get("iteration"), int):
                found.setdefault(number, KnownIteration(number, float(entry.get("seconds", 0.0)), entry.get("metrics")))
        wanted = range(1, self.content.extent + 1)
        return [found[number] for number in wanted] if all(number in found for number in wanted) else None


class Reused(NamedTuple):
    """Trials that start from states of earlier runs, where there are some.

    Attributes:
        shared: the trials, and runs that they share.
        seeds: of trials whose seeds follow from their content, by id.
        contents: of trials, by id, for later runs.
        known: by id of each trial that starts so: what was reported before, and whose run it was.
    """

    shared: SharedTrials
    seeds: Mapping[str, Seeds]
    contents: Mapping[str, Content]
    known: Mapping[str, tuple[list[KnownIteration], str]]

    def events(self, group_id: str, at: float) -> list[IterationsKnown]:
        """What the engine is to be told of a group's trials, at a time of the session's clock."""
        return [
            IterationsKnown(at, trial_id, tuple(_report(trial_id, group_id, at, each, whose) for each in iterations))
            for trial_id, (iterations, whose) in self.known.items()
        ]


NOTHING_REUSED = Reused(SharedTrials([], {}), {}, {}, {})


def _report(trial_id: str, group_id: str, at: float, known: KnownIteration, whose: str) -> Report:
    text = json.dumps(known.metrics)
    return Report(
        trial_id,
        group_id,
        iteration=known.iteration,
        metrics=EncodedMetrics(text, numbers_in(known.metrics)),
        seconds=known.seconds,
        width=1.0,
        device_ids=(0,),
        at=at,
        source=whose,
    )


@dataclass
class Reuse:
    """Finds states of earlier runs for the trials of a sweep.

    Args:
        data: what the user says of the data: another text, another content.
        seed: the sweep's: the seeds of its trials follow from it and their content, not from their order.
    """

    data: str
    seed: int
    _origin: SeedOrigin = field(init=False)
    #: Digest of the code of each trainable, by its id(), which stays its own as long as it is kept; empty if unknown.
    _codes: dict[int, tuple[Any, str]] = field(init=False, default_factory=dict)
    _repeats: Counter[str] = field(init=False, default_factory=Counter)
    _has_warned: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._origin = SeedOrigin((b"",) * len(Seeds._fields), f"content {self.seed}")

    def apply(self, shared: SharedTrials, run_dir: Path) -> Reused:
        """Has trials, and runs that they share, start from the latest states that there are.

        Args:
            shared: trials of one call, and their runs.
            run_dir: the session's run folder, beside which others are looked at.
        """
        own = [trial for trial in shared.trials if not trial.is_shared_run]
        places = self._places_of(own)
        bases = {trial.id: self._base(trial, places[trial.id]) for trial in own}
        seeds = {}
        contents: dict[str, Content] = {}
        known: dict[str, tuple[list[KnownIteration], str]] = {}
        trials: list[Trial] = []
        states = known_states(run_dir) if any(bases.values()) else {}
        for trial in shared.trials:
            root = shared.roots.get(trial.id, trial.id)
            base, place = bases.get(root, ""), places.get(root, "")
            start: StartFrom | None = trial.start_from
            if place and (start is None or start.is_shared):
                seeds[trial.id] = self._origin.seeds(int(place[:15], 16))
            if not base or (start is not None and not start.is_shared):
                trials.append(trial)
                continue
            extent = trial.budget + trial.follow_up_iterations
            begin = 0 if start is None else start.at or 0
            if trial.is_shared_run:
                extent = _end_of_run(trial, shared.trials)
            if prefix := _prefix(trial.config, extent):
                contents[trial.id] = Content(base, extent, prefix)
            if (found := _latest(trial, states.get(base, ()), begin, extent)) is not None:
                earlier, iterations, whose = found
                known[trial.id] = iterations, whose
                trial = trial.changed(start_from=earlier, at=earlier.at)
            trials.append(trial)
        return Reused(SharedTrials(_without_idle_runs(trials), shared.roots), seeds, contents, known)

    def _places_of(self, trials: Sequence[Trial]) -> dict[str, str]:
        """Digests, by id, of what the seeds of trials follow from: their configs, and how often each came before.

        Code, packages and data are not part of it: the same sweep has the same seeds after any of them has changed.
        """
        places = {}
        for trial in trials:
            rest = with_schedules(trial.config, lambda _: None)
            place = _digest(rest, *sorted(map(repr, schedules_in(trial.config))), self.seed)
            if place:
                whole = f"{place} {schedules_in(trial.config)!r}"
                self._repeats[whole] += 1
                place = _digest(place, self._repeats[whole])
            places[trial.id] = place
        return places

    def _base(self, trial: Trial, place: str) -> str:
        """Digest of all that a trial's results follow from but its schedules; empty where that is not known."""
        code = self._code(trial.trainable)
        reason = ""
        if not can_save(trial.trainable):
            reason = "it cannot be saved"
        elif not code:
            reason = (
                "not all of its code can be compared: it imports modules of yours within functions, or refers to"
                " objects that cannot be pickled"
            )
        elif not place:
            reason = "its config has values that cannot be compared; plain ones, lists and dicts can"
        if reason:
            self._warn(f"reuse={self.data or True!r}: {trial.id!r} starts from no earlier run, as {reason}")
            return ""
        return _digest(place, code, *(getattr(trial, name) for name in _FIELDS), self.data)

    def _warn(self, text: str) -> None:
        if not self._has_warned:  # What is said of one trial holds for most of the others.
            self._has_warned = True
            _logger.warning("%s", text)

    def _code(self, trainable: Any) -> str:
        if id(trainable) not in self._codes:
            code, objects = code_of(trainable), objects_of(trainable)
            digest = ""
            if code is not None and objects is not None:
                parts = sorted(code.parts.items())
                digest = _digest(_VERSION, profile_name(trainable), code.compiled_by, *parts, *objects, *_versions())
            self._codes[id(trainable)] = trainable, digest
        return self._codes[id(trainable)][1]


def reuse_of(reuse: object, seed: int | None) -> Reuse | None:
    """What a user's ``reuse=`` means: True, or a text that names the data; ``None`` for False.

    Raises:
        InvalidFieldError: it is none of these, or the sweep has another seed every time.
    """
    if reuse is False:
        return None
    if reuse is not True and not (isinstance(reuse, str) and reuse):
        reason = "must be True, False or a text that names the data, which are not compared, such as 'cifar10 v2'"
        raise InvalidFieldError("reuse", reuse, reason)
    if seed is None:
        raise InvalidFieldError("reuse", reuse, "cannot be with seed=None, which means other results each time")
    return Reuse(reuse if isinstance(reuse, str) else "", seed)


def known_states(run_dir: Path) -> dict[str, list[KnownState]]:
    """The states that run folders beside this one have, by the bases of their contents; the newest run first."""
    found: dict[str, list[KnownState]] = {}
    folders = [folder for folder in _siblings(run_dir) if _is_own(folder)]
    for folder in sorted(folders, key=lambda folder: folder.name, reverse=True):
        for line in JsonLines(folder / TRIALS).there():
            entry = line.entry.get("content")
            with suppress(TypeError, ValueError):
                content = Content(str(entry[0]), int(entry[1]), str(entry[2])) if isinstance(entry, list) else None
                if content is not None:
                    found.setdefault(content.base, []).append(KnownState(folder, str(line.entry["trial"]), content))
    return found


def _latest(
    trial: Trial, states: Sequence[KnownState], begin: int, extent: int
) -> tuple[StartFrom, list[KnownIteration], str] | None:
    """The latest state from which a trial can start, what was reported by then, and whose it is; ``None`` for none.

    Args:
        trial: a trial, or a run of several.
        states: of its base.
        begin: iterations that are done for it anyway.
        extent: iterations that it may do in all.
    """
    usable = [state for state in states if begin < state.content.extent <= extent]
    for state in sorted(usable, key=lambda state: -state.content.extent):
        same = state.content.prefix == _prefix(trial.config, state.content.extent)
        if same and (start := state.start()) is not None and (iterations := state.iterations()) is not None:
            return start, iterations, f"{state.run.name}/{state.trial_id}"
    return None


def _end_of_run(run: Trial, trials: Sequence[Trial]) -> int:
    """The iteration at which the last of its trials parts from a run."""
    starts = (trial.start_from for trial in trials)
    return max((start.at or 0 for start in starts if start is not None and start.parent == run.id), default=run.budget)


def _without_idle_runs(trials: list[Trial]) -> list[Trial]:
    """The trials without runs from which none starts any more."""
    while True:
        parents = {trial.start_from.parent for trial in trials if trial.start_from is not None}
        left = [trial for trial in trials if not trial.is_shared_run or trial.id in parents]
        if len(left) == len(trials):
            return left
        trials = left


def _siblings(run_dir: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(run_dir.parent) as entries:
        for entry in entries:
            if entry.name != run_dir.name and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _is_own(folder: Path) -> bool:
    """Whether a folder has trials, and is of this user: to load a checkpoint runs code."""
    try:
        return folder.stat().st_uid == os.geteuid() and (folder / TRIALS).is_file()
    except OSError:
        return False


def _prefix(config: Mapping[str, Any], extent: int) -> str:
    """Digest of the values of a config's schedules until an iteration; empty where they cannot be had."""
    schedules: list[tuple[str, Schedule]] = sorted((repr(path), each) for path, each in schedules_in(config).items())
    try:
        return _digest(*((name, each.at(number)) for name, each in schedules for number in range(extent)))
    except Exception:  # A function of the user's may raise anything.
        return ""


def _digest(*values: Any) -> str:
    """Digest of values; empty where they are more than plain values and lists, tuples and dicts of these."""
    try:
        texts = [value_text(value) for value in values]
    except RecursionError:  # A list that holds itself.
        return ""
    return "" if None in texts else hashlib.sha256("\0".join(map(str, texts)).encode()).hexdigest()


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    """Of all installed packages: any may change what a trial computes."""
    return (__version__, *sorted(f"{found.name} {found.version}" for found in metadata.distributions()))

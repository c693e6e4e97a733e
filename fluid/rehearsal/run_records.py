"""The trials of a run folder as they are replayed: metrics, and seconds alone on a device of speed 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.measure.cohorts.nodes import ConfigTexts
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import residents_at, stretch_of
from fluid.policies.fusing.groups import text_of
from fluid.rehearsal.fusion import RecordedFusion
from fluid.rehearsal.overheads import Overheads, overheads_in
from fluid.rehearsal.replayable import ReplayedIteration
from fluid.resources import Device
from fluid.results.iterations import StoredIteration, flat, result_of
from fluid.results.loading import completed
from fluid.results.metrics import Goal, goals_of
from fluid.results.run_files import devices_in
from fluid.results.stored_run import StoredRun, read_run
from fluid.results.submitted import SubmittedTrial
from fluid.trialgroup import TrialState

#: A longer text in a config is data, and tells no trials apart.
_LONGEST_TEXT = 200
#: What Ray Tune adds to each result by itself: in a rehearsal under Ray Tune it does so again, and elsewhere it says
#: nothing.
_OF_TUNE = frozenset(
    {"timestamp", "done", "training_iteration", "trial_id", "date", "time_this_iter_s", "time_total_s", "pid"}
    | {"hostname", "node_ip", "time_since_restore", "iterations_since_restore", "config", "checkpoint_dir_name"}
    | {"timesteps_total", "episodes_total", "timesteps_since_restore", "should_checkpoint", "experiment_tag"}
)


@dataclass
class RecordedTrial:
    """A trial as it was recorded.

    Attributes:
        trial_id: its id.
        config: its hyperparameters, as JSON has them.
        iterations: those recorded, by number; seconds are those alone on one device of speed 1.
        ended: whether it ended by itself with the last of them, before its budget was used up.
        failed: whether it failed.
        memory_bytes: its peak device memory; ``None`` if that was not measured.
    """

    trial_id: str
    config: Mapping[str, Any]
    iterations: dict[int, ReplayedIteration]
    ended: bool = False
    failed: bool = False
    memory_bytes: float | None = None
    texts: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = texts_of(self.config)

    @property
    def last(self) -> int:
        """Its last iteration."""
        return max(self.iterations)

    @property
    def mean_seconds(self) -> float:
        """Of an iteration; the first one, which may warm up, counts only where there is no other."""
        later = [one.seconds for number, one in self.iterations.items() if number > 1]
        known = later or [one.seconds for one in self.iterations.values()]
        return sum(known) / len(known)

    @property
    def config_texts(self) -> ConfigTexts:
        """Texts of its config by name."""
        return tuple(self.texts.items())


@dataclass(frozen=True)
class RunRecords:
    """What one run folder tells.

    Attributes:
        path: the folder.
        name: of the session, or of its only group.
        date: when it began; empty if unknown.
        goals: what its search optimizes.
        trials: those with at least one iteration.
        overheads: as they were measured there.
        fusion: which trials were fused there, and what that took.
        notes: one sentence for each thing that could not be read.
    """

    path: Path
    name: str
    date: str
    goals: tuple[Goal, ...]
    trials: tuple[RecordedTrial, ...]
    overheads: Overheads
    fusion: RecordedFusion
    notes: tuple[str, ...]


def read_records(run_dir: str | Path, metric: object = None, mode: object = None) -> RunRecords:
    """Reads a run folder, whose session may have ended, been killed, or run on.

    Args:
        run_dir: the folder.
        metric, mode: what is optimized; ``None`` for what its search says.

    Raises:
        InvalidFieldError: it is not a run folder, or no trial has finished an iteration there.
    """
    run = read_run(run_dir)
    if not run.reported:
        raise InvalidFieldError("run_dir", str(run_dir), "holds no finished iteration: there is nothing to replay")
    profile = run.newest_profile
    overheads = overheads_in(profile, run.entries, str(run_dir), run.date, run.ran)
    gangs = {trial for trial, history in run.journal.histories.items() if history.trial.gang}
    fusion = _fusion_in(run, overheads)
    alone = _AloneSeconds(profile, overheads, fusion, devices_in(run.session), gangs)
    trials = tuple(_with_parents(run, list(_trials(run, alone, _ended_early(run.entries), _memory_of(profile)))))
    goals = goals_of(*completed(metric, mode, [group.search for group in run.groups]))
    return RunRecords(run.path, run.name, run.date, goals, trials, overheads, fusion, tuple(run.notes))


def _fusion_in(run: StoredRun, overheads: Overheads) -> RecordedFusion:
    keys = {
        str(entry.get("trial_id")): str(entry["fusion_key"])
        for entry in run.entries
        if entry.get("what") == "TrialStarted" and entry.get("fusion_key") is not None
    }
    parts = [part for group in run.groups for parts in group.all.values() for part in parts]
    texts = {part.trial_id: texts_of(part.config) for part in parts if part.trial_id in keys}
    return RecordedFusion(keys, texts, run.ran, overheads)


def texts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a config's values, nested names joined by dots, but for those of data."""
    texts = {name.replace("/", "."): _text(value) for name, value in flat(config).items()}
    return {name: text for name, text in texts.items() if len(text) <= _LONGEST_TEXT and " at 0x" not in text}


def _text(value: object) -> str:
    """A value's text: of a whole number, the same whether it is an int or a float; of a tuple, as of a list."""
    if isinstance(value, tuple):
        value = list(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return text_of(value)


def _trials(
    run: StoredRun, alone: _AloneSeconds, ended: set[str], memory: Mapping[str, float]
) -> Iterator[RecordedTrial]:
    for group in run.groups:
        for parts in group.trials.values():
            iterations: dict[int, ReplayedIteration] = {}
            for part in parts:
                # What was repeated, after a loss, counts as it was last.
                for one in run.of_trial.get(part.trial_id, ()):
                    result = result_of(one, part)
                    metrics = result.metrics
                    if part.inner is not None:
                        metrics = {name: value for name, value in metrics.items() if name not in _OF_TUNE}
                    iterations[result.iteration] = ReplayedIteration(metrics, alone.of(one, part))
            if iterations:
                last = parts[-1]
                known = [memory[part.trial_id] for part in parts if part.trial_id in memory]
                yield RecordedTrial(
                    trial_id=last.shown_id,
                    config=last.config,
                    iterations=dict(sorted(iterations.items())),
                    ended=last.trial_id in ended,
                    failed=last.state == TrialState.FAILED.value,
                    memory_bytes=max(known, default=None),
                )


def _with_parents(run: StoredRun, trials: Sequence[RecordedTrial]) -> Iterator[RecordedTrial]:
    """The trials, those that start from another's state with what that had done until then: it led to what they did."""
    starts = {name: parts[0].start for group in run.groups for name, parts in group.trials.items()}
    known = {trial.trial_id: trial for trial in trials}
    for trial in trials:
        start, before = starts[trial.trial_id], dict[int, ReplayedIteration]()
        seen = {trial.trial_id}
        while start is not None and start.parent in known and start.parent not in seen and not start.path:
            seen.add(start.parent)
            until = start.at if start.at is not None else min(trial.iterations) - 1
            done = known[start.parent].iterations
            before = {number: one for number, one in done.items() if number <= until} | before
            start = starts[start.parent]
        yield replace(trial, iterations={**before, **trial.iterations})


class _AloneSeconds:
    """Converts recorded seconds to those alone on a device of speed 1."""

    def __init__(
        self,
        profile: Profile,
        overheads: Overheads,
        fusion: RecordedFusion,
        devices: Mapping[int, Device],
        gangs: set[str],
    ) -> None:
        self._profile = profile
        self._fusion = fusion
        self._overheads = overheads
        self._devices = devices
        self._gangs = gangs
        #: Of device models, by profile key.
        self._speeds: dict[str, Mapping[str | None, float]] = {}

    def of(self, one: StoredIteration, trial: SubmittedTrial) -> float:
        """Of a recorded iteration of a trial."""
        ran_by = one.source or one.trial_id
        if one.rows > 1:
            rates = self._fusion.of_trial(ran_by)
            stretch = 1.0 if rates is None else rates.stretch(one.rows)
        elif ran_by in self._gangs:
            stretch = 1.0
        else:
            width = 1.0 / residents_at(one.width) if one.width < 1.0 else one.width
            stretch = stretch_of(self._overheads.alpha, self._overheads.beta, width)
        return one.seconds * self._speed(one.devices, trial.key) / stretch

    def _speed(self, used: Sequence[int], key: str) -> float:
        """That of the slowest of a trial's devices."""
        devices = [self._devices[index] for index in used if index in self._devices]
        models = list(dict.fromkeys(device.model for device in self._devices.values()))
        if not devices:
            return 1.0
        if len(models) < 2 or any(device.speed != 1.0 for device in self._devices.values()):
            return min(device.speed for device in devices)
        if key not in self._speeds:
            self._speeds[key] = self._profile.speeds(key, models) if key else {}
        return min(self._speeds[key].get(device.model, 1.0) for device in devices)


def _ended_early(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """The trials that were done before they had run the iterations that they were given."""
    given: dict[str, int] = {}
    ended: set[str] = set()
    for entry in entries:
        what, trial = entry.get("what"), entry.get("trial_id")
        with suppress(KeyError, TypeError, AttributeError):  # An entry of a journal that is damaged.
            if what in ("GroupSubmitted", "TrialsAdded"):
                given.update((each["trial_id"], each["budget"]) for each in entry["trials"])
            elif what == "GroupRecovered":
                given.update((each["trial"]["trial_id"], each["budget"]) for each in entry["trials"])
            elif what == "BudgetExtended" and trial in given:
                given[trial] += entry["iterations"]
                ended.discard(trial)
            elif what == "ReportEnd" and trial in given and entry["state"] == TrialState.DONE.value:
                ended.update([trial] if 0 < entry["iteration"] < given[trial] else [])
    return ended


def _memory_of(profile: Profile) -> dict[str, float]:
    """Measured peak memory in bytes, by trial id."""
    found: dict[str, float] = {}
    for tree in profile.cohorts.values():
        trials: Any = tree.to_json()["trials"]
        for trial in trials:
            if trial["bytes"] is not None and math.isfinite(sum(trial["bytes"])):
                found[trial["id"]] = float(sum(trial["bytes"]))
    return found

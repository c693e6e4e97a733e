"""What a session did, read from its folder: who ran where and when, what came of each trial, what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fluid.profile import Profile
from fluid.report.run_files import RunFiles, device_from
from fluid.report.steps import Step, read_steps, segments_of
from fluid.report.timeline import Timeline
from fluid.resources import Device
from fluid.strips import Segment

#: State of a trial that had not ended when the folder was read, and of one of which nothing is known.
UNFINISHED, UNKNOWN = "UNFINISHED", "UNKNOWN"
#: Words in names of metrics of which less is better.
_LESS_IS_BETTER = frozenset(
    {"loss", "err", "error", "mse", "mae", "rmse", "mape", "nll", "perplexity", "ppl", "cost", "regret", "latency"}
    | {"distance", "divergence", "deviance", "brier", "wer", "cer"}
)
#: Bookkeeping that Ray Tune, or the trial, adds to every result.
_BOOKKEEPING = frozenset(
    {"pid", "timestamp", "time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore"}
    | {"training_iteration", "timesteps_total", "episodes_total", "timesteps_since_restore", "should_checkpoint"}
    | {"done", "step", "epoch", "iteration"}
)


@dataclass(frozen=True)
class TrialRun:
    """One trial.

    Attributes:
        trial_id, group_id: the trial and its group.
        key: its profile key; empty where unknown.
        config: its hyperparameters.
        state: ``"DONE"``, ``"STOPPED"``, ``"FAILED"``, ``"UNFINISHED"`` or ``"UNKNOWN"``.
        budget: iterations it might run; ``None`` where unknown.
        failure: why it failed; empty if it did not.
        steps: its finished iterations, in order.
    """

    trial_id: str
    group_id: str
    key: str
    config: Mapping[str, Any]
    state: str
    budget: int | None
    failure: str
    steps: tuple[Step, ...]

    @property
    def iterations(self) -> int:
        """Iterations done."""
        return max((step.iteration for step in self.steps), default=0)

    @property
    def seconds(self) -> float:
        """Wall time of its iterations together."""
        return math.fsum(step.end - step.start for step in self.steps)

    @cached_property
    def widths(self) -> Mapping[float, float]:
        """Seconds it ran at each width, by width in order of first use."""
        found: dict[float, float] = {}
        for step in self.steps:
            found[step.width] = found.get(step.width, 0.0) + step.end - step.start
        return found

    @cached_property
    def last(self) -> Mapping[str, Any]:
        """The newest value of every metric."""
        return {name: value for step in self.steps for name, value in step.metrics.items()}

    @cached_property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """Least and greatest value of every numeric metric."""
        found: dict[str, tuple[float, float]] = {}
        for step in self.steps:
            for name, value in step.metrics.items():
                if is_number(value):
                    low, high = found.get(name, (value, value))
                    found[name] = (min(low, value), max(high, value))
        return found

    def best(self, metric: str) -> float | None:
        """The least or the greatest value of a metric, as :func:`less_is_better` has it; ``None`` if there is none."""
        if metric not in self.ranges:
            return None
        return self.ranges[metric][0 if less_is_better(metric) else 1]


@dataclass(frozen=True)
class GroupRun:
    """One TrialGroup.

    Attributes:
        group_id, name: the group.
        trials: its trials, in order of submission.
    """

    group_id: str
    name: str
    trials: tuple[TrialRun, ...]

    @property
    def states(self) -> Mapping[str, int]:
        """Number of trials by state."""
        return Counter(trial.state for trial in self.trials)

    @property
    def iterations(self) -> int:
        """Finished iterations."""
        return sum(trial.iterations for trial in self.trials)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last finish."""
        steps = [step for trial in self.trials for step in trial.steps]
        return max(step.end for step in steps) - min(step.start for step in steps) if steps else 0.0


@dataclass(frozen=True)
class KeyFacts:
    """What was measured about one profile key.

    Attributes:
        key: the profile key.
        seconds: per iteration, alone on one device; ``None`` where unknown.
        alpha, beta: packing and scaling overhead.
        packing: most trials on a device that were measured.
        c: how many of them are worth having.
    """

    key: str
    seconds: float | None
    alpha: float
    beta: float
    packing: int
    c: int


@dataclass(frozen=True)
class Run:
    """A session.

    Attributes:
        path: its folder.
        session: what ``session.json`` says.
        groups: in order of submission.
        timeline: who ran where and when; a row per trial, in the order of :attr:`trials`.
        keys: what was measured.
        notes: what could not be read, a sentence each.
    """

    path: Path
    session: Mapping[str, Any]
    groups: tuple[GroupRun, ...]
    timeline: Timeline
    keys: tuple[KeyFacts, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the session calls itself, else the folder's name."""
        return str(self.session.get("name") or self.path.resolve().name)

    @cached_property
    def trials(self) -> tuple[TrialRun, ...]:
        """All trials, by group."""
        return tuple(trial for group in self.groups for trial in group.trials)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the numeric metrics, most telling first: what trials report themselves, then bookkeeping."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.ranges)
        return tuple(sorted(names, key=_is_bookkeeping))

    @cached_property
    def resizes(self) -> int:
        """How often a trial changed its width between two iterations; only its neighbours do from 1/p to 1/q."""
        return sum(
            max(before.width, 1.0) != max(after.width, 1.0) or (before.width < 1.0) != (after.width < 1.0)
            for trial in self.trials
            for before, after in zip(trial.steps, trial.steps[1:], strict=False)
        )


def load_run(path: str | Path) -> Run:
    """Reads the folder of a session, which may still run or have been killed.

    Args:
        path: the folder.

    Raises:
        InvalidFieldError: it is no run folder, or cannot be read; the message names the path.
    """
    files = RunFiles(path)
    session = files.session()
    steps, groups_of = read_steps(files)
    zero = min((step.start for found in steps.values() for step in found), default=0.0)
    groups = _read_groups(files, steps, groups_of, zero)
    trials = [trial for group in groups for trial in group.trials]
    segments = segments_of([trial.steps for trial in trials])
    timeline = Timeline(
        _devices(session, segments),
        tuple(segments),
        tuple(trial.trial_id for trial in trials),
        max((segment.end for segment in segments), default=0.0),
    )
    keys = _key_facts(files.profile())
    return Run(files.path, session, groups, timeline, keys, tuple(files.notes))


def is_number(value: object) -> bool:
    """Whether a metric's value can be drawn: a finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def less_is_better(metric: str) -> bool:
    """Whether less of a metric is better, judged by its name."""
    words = metric.lower().replace("/", "_").replace("-", "_").replace(".", "_").split("_")
    return any(word in _LESS_IS_BETTER or word.endswith("loss") for word in words)


def _is_bookkeeping(metric: str) -> bool:
    return metric.split("/")[0] in _BOOKKEEPING


# --- Trials and groups


def _read_groups(
    files: RunFiles, steps: Mapping[str, Sequence[Step]], groups_of: Mapping[str, str], zero: float
) -> tuple[GroupRun, ...]:
    """Groups and trials in the order of ``trials.jsonl``; then those that only the journal or the results know."""
    names: dict[str, str] = {}
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in files.trials():
        if "trial" in entry:
            entries.setdefault(str(entry["trial"]), entry)
        else:
            names[str(entry.get("group", ""))] = str(entry.get("name", ""))
    journal = files.journal()
    known = {trial: (group, found) for group, trials in journal.groups.items() for trial, found in trials.items()}
    members: dict[str, list[TrialRun]] = {}
    for trial in dict.fromkeys([*entries, *known, *steps]):
        if known and trial not in known and trial not in steps:
            continue  # It was refused when it was submitted.
        entry, config = entries.get(trial, {}), entries.get(trial, {}).get("config")
        group, history = known.get(trial, (groups_of.get(trial, ""), None))
        state = UNKNOWN if history is None else history.ended or UNFINISHED
        run = TrialRun(
            trial,
            str(entry.get("group", group)),
            str(entry.get("key", "" if history is None else history.trial.profile_key)),
            config if isinstance(config, Mapping) else {},
            state,
            None if history is None else history.budget,
            journal.failures[trial].message if state == "FAILED" and trial in journal.failures else "",
            tuple(replace(step, start=step.start - zero, end=step.end - zero) for step in steps.get(trial, ())),
        )
        members.setdefault(run.group_id, []).append(run)
    return tuple(GroupRun(group, names.get(group) or group, tuple(runs)) for group, runs in members.items())


# --- The timeline


def _devices(session: Mapping[str, Any], segments: Iterable[Segment]) -> tuple[Device, ...]:
    """The devices the session began with, and those that joined and were used."""
    devices: dict[int, Device] = {}
    listed = session.get("devices")
    for fields in listed if isinstance(listed, list) else ():
        try:
            device = device_from(fields)
        except (KeyError, TypeError, ValueError):
            continue
        devices.setdefault(device.index, device)
    kind = next(iter(devices.values())).kind if devices else "gpu"
    for index in {device for segment in segments for device in segment.devices} - devices.keys():
        devices[index] = Device(index, kind=kind)
    return tuple(devices[index] for index in sorted(devices))


def _key_facts(profile: Profile | None) -> tuple[KeyFacts, ...]:
    if profile is None:
        return ()
    found = []
    keys = profile.keys()
    for key in keys:
        packing = profile.measured_packing(key)
        found.append(
            KeyFacts(
                key,
                profile.seconds_per_iteration(key),
                profile.alpha(key),
                profile.beta(key),
                packing,
                profile.packing_limit(key, max(packing, 1)),
            )
        )
    return tuple(found)

"""What a session did: who ran where and when, what came of each trial, what was measured. Read by ``reading``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fluid.report.segments import Step
from fluid.report.timeline import Timeline
from fluid.trialgroup import Search

#: State of a trial that had not ended when the folder was read, of one that waited for a decision of its search then,
#: and of one of which nothing is known.
UNFINISHED, PAUSED, UNKNOWN = "UNFINISHED", "PAUSED", "UNKNOWN"
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
        trial_id, group_id: the trial, by the name that people know it by, and its group.
        key: its profile key; empty where unknown.
        config: its hyperparameters.
        state: ``"DONE"``, ``"STOPPED"``, ``"FAILED"``, ``"PAUSED"``, ``"UNFINISHED"`` or ``"UNKNOWN"``.
        budget: iterations it might run; ``None`` where unknown, or a search algorithm decides as it goes.
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

    def best(self, metric: str, *, less: bool) -> float | None:
        """The least or the greatest value of a metric; ``None`` if there is none."""
        return self.ranges[metric][0 if less else 1] if metric in self.ranges else None


@dataclass(frozen=True)
class GroupRun:
    """One TrialGroup.

    Attributes:
        group_id, name: the group.
        trials: its trials, in order of submission.
        search: what it is about, if a search algorithm submitted its trials.
    """

    group_id: str
    name: str
    trials: tuple[TrialRun, ...]
    search: Search | None = None

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
class KeyMeasurements:
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
    keys: tuple[KeyMeasurements, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the session calls itself; else the name of its search, if it is but one; else the folder's."""
        search = self.groups[0].name if self.is_one_search else ""
        return str(self.session.get("name") or search or self.path.resolve().name)

    @property
    def is_one_search(self) -> bool:
        """Whether the session did nothing but run one search algorithm's trials, such as a sweep of Ray Tune."""
        return len(self.groups) == 1 and self.groups[0].search is not None

    @property
    def sharing(self) -> str:
        """How trials shared GPUs, and why not by MPS; empty where there is none, or nothing was said."""
        way, why = self.session.get("sharing"), self.session.get("sharing_why")
        if not isinstance(way, str) or all(device.kind != "gpu" for device in self.timeline.devices):
            return ""
        if way == "mps":
            return "NVIDIA MPS"
        return "time slices" + (f" (no MPS: {why})" if why else "")

    @cached_property
    def trials(self) -> tuple[TrialRun, ...]:
        """All trials, by group."""
        return tuple(trial for group in self.groups for trial in group.trials)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the numeric metrics, most telling first: what searches go by, what trials report, bookkeeping."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.ranges)
        goals = {group.search.metric for group in self.groups if group.search is not None}
        return tuple(sorted(names, key=lambda name: (name not in goals, _is_bookkeeping(name))))

    def less_is_better(self, metric: str) -> bool:
        """Whether less of a metric is better: as its search says, or judged by its name."""
        for group in self.groups:
            if group.search is not None and group.search.metric == metric and group.search.mode is not None:
                return group.search.mode == "min"
        return less_is_better(metric)

    @cached_property
    def resizes(self) -> int:
        """How often a trial changed its width between two iterations; only its neighbours do from 1/p to 1/q."""
        return sum(
            max(before.width, 1.0) != max(after.width, 1.0) or (before.width < 1.0) != (after.width < 1.0)
            for trial in self.trials
            for before, after in zip(trial.steps, trial.steps[1:], strict=False)
        )


def is_number(value: object) -> bool:
    """Whether a metric's value can be drawn: a finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def less_is_better(metric: str) -> bool:
    """Whether less of a metric is better, judged by its name."""
    words = metric.lower().replace("/", "_").replace("-", "_").replace(".", "_").split("_")
    return any(word in _LESS_IS_BETTER or word.endswith("loss") for word in words)


def _is_bookkeeping(metric: str) -> bool:
    return metric.split("/")[0] in _BOOKKEEPING

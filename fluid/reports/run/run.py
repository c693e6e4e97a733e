"""A recorded session as data: its groups and trials, the timeline of its devices and its measurements.

:mod:`fluid.reports.run.loader` builds a :class:`RecordedRun` from a run folder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from fluid.directions import known_mode
from fluid.display.format import count, duration, percent
from fluid.packing import PACKINGS
from fluid.reports.analysis.cohorts import KeyCohorts
from fluid.reports.analysis.costs import Costs, Paid, goals_in
from fluid.reports.analysis.forecasts import SHARES, ComparedForecast, WrittenForecast, compared, forecast_text
from fluid.reports.analysis.idle import IdleTime
from fluid.reports.analysis.key_measurements import KeyMeasurements
from fluid.reports.analysis.resizes import ResizeGains
from fluid.reports.analysis.restores import Restores
from fluid.reports.run.timeline import Timeline
from fluid.reports.story.words import StoryLine
from fluid.results.iterations import StoredIteration, ran_itself
from fluid.results.metrics import Goal, is_bookkeeping, is_number, known_goals
from fluid.results.records import TrialFiles
from fluid.results.submitted import UNFINISHED, GroupLine, SubmittedTrial
from fluid.trainables.usage import Usage
from fluid.trialgroup import PAUSED_BY_USER

#: States of trials that have not ended.
_NOT_ENDED = (UNFINISHED, PAUSED_BY_USER)
#: Most lines of forecasts: those of two groups that have ended.
_MOST_FORECASTS = 2 * len(SHARES)


@dataclass(frozen=True, kw_only=True)
class TrialRun(SubmittedTrial):
    """A trial as it is shown: the last of the submitted trials that it is made of, by the name that the user knows.

    Attributes:
        budget: of a trial of a search whose shape is known, the most iterations that one of its trials runs.
        finished: the finished iterations of all of them, in order.
        files: where its output and its checkpoints are; ``None`` if unknown.
    """

    finished: tuple[StoredIteration, ...]
    files: TrialFiles | None = None

    @property
    def failure_text(self) -> str:
        """Why it failed; empty if it did not."""
        return "" if self.failure is None else self.failure.message

    @property
    def traceback(self) -> str:
        """Of the failure; empty if there is none."""
        return "" if self.failure is None else self.failure.traceback

    @cached_property
    def iterations(self) -> int:
        """Number of finished iterations."""
        return max((iteration.number for iteration in self.finished), default=0)

    @cached_property
    def own(self) -> Sequence[StoredIteration]:
        """The finished iterations that it ran itself, in order: time and devices count once, with who used them."""
        return ran_itself(self.finished)

    @cached_property
    def seconds(self) -> float:
        """Total wall time of the iterations that it ran itself."""
        return math.fsum(iteration.seconds for iteration in self.own)

    @cached_property
    def device_seconds(self) -> float:
        """Seconds of devices that these used; of devices that trials shared, its part."""
        return math.fsum(iteration.device_seconds for iteration in self.own)

    @cached_property
    def most_fused(self) -> int:
        """The most trials with which it was fused in one step, itself included; 1 if it never was."""
        return max((iteration.rows for iteration in self.own), default=1)

    @cached_property
    def usage(self) -> Usage:
        """What these used in all, besides time, as far as that was measured."""
        return Usage.total(iteration.usage for iteration in self.own)

    @cached_property
    def widths(self) -> Mapping[float, float]:
        """Seconds at each width; the widths in order of first use."""
        found: dict[float, float] = {}
        for iteration in self.own:
            found[iteration.width] = found.get(iteration.width, 0.0) + iteration.seconds
        return found

    @cached_property
    def last(self) -> Mapping[str, Any]:
        """The newest value of every metric."""
        return {name: value for iteration in self.finished for name, value in iteration.metrics.items()}

    @cached_property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """Minimum and maximum of every numeric metric."""
        found: dict[str, tuple[float, float]] = {}
        for iteration in self.finished:
            for name, value in iteration.metrics.items():
                if is_number(value):
                    low, high = found.get(name, (value, value))
                    found[name] = (min(low, value), max(high, value))
        return found

    @cached_property
    def span(self) -> tuple[float, float]:
        """When its first iteration started and its last one ended, of its own, seconds; infinite if it has none."""
        return (
            min((iteration.start for iteration in self.own), default=math.inf),
            max((iteration.end for iteration in self.own), default=-math.inf),
        )

    @cached_property
    def resizes(self) -> int:
        """Number of its resizes: changes of width between two iterations.

        A change from 1/p to 1/q does not count, because only the number of co-resident trials changed, nor does one
        from 1 to 1/p of a trial that is fused at some time: others came to its process.
        """
        return sum(
            max(before.width, 1.0) != max(after.width, 1.0)
            or ((before.width < 1.0) != (after.width < 1.0) and self.most_fused == 1)
            for before, after in zip(self.own, self.own[1:], strict=False)
        )

    def best(self, metric: str, *, less: bool) -> float | None:
        """The minimum (``less``) or maximum of a metric; ``None`` if the trial never reported a number for it."""
        return self.ranges[metric][0 if less else 1] if metric in self.ranges else None


@dataclass(frozen=True, kw_only=True)
class GroupRun(GroupLine):
    """One TrialGroup, with what its line says.

    Attributes:
        group_id: the group.
        trials: its trials, in order of submission.
        shared_runs: what Fluid has added, to run iterations once for several of them.
    """

    group_id: str
    trials: tuple[TrialRun, ...]
    shared_runs: tuple[TrialRun, ...] = ()

    @property
    def rows(self) -> tuple[TrialRun, ...]:
        """All that ran."""
        return (*self.trials, *self.shared_runs)

    @property
    def span(self) -> tuple[float, float]:
        """When its first iteration started and its last one ended, seconds; infinite if it has none."""
        starts, ends = zip((math.inf, -math.inf), *(trial.span for trial in self.rows), strict=True)
        return min(starts), max(ends)

    @property
    def said(self) -> str:
        """Whose it is, how urgent and what it requires, in a few words; empty if nothing was said."""
        requires = f"requires {self.requires}" if self.requires is not None and self.requires.asks else ""
        return ", ".join(filter(None, (self.terms.text, requires)))

    @property
    def states(self) -> Mapping[str, int]:
        """Number of trials by state."""
        return Counter(trial.state for trial in self.trials)

    @property
    def iterations(self) -> int:
        """Number of finished iterations."""
        return sum(trial.iterations for trial in self.trials)

    @property
    def is_open(self) -> bool:
        """Whether a trial has not ended."""
        return any(trial.state in _NOT_ENDED for trial in self.trials)

    @property
    def device_seconds(self) -> float:
        """Seconds of devices that iterations of its trials used."""
        return math.fsum(trial.device_seconds for trial in self.rows)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last finish."""
        start, end = self.span
        return max(0.0, end - start)


@dataclass(frozen=True)
class RecordedRun:
    """A session as its run folder recorded it.

    Attributes:
        path: the run folder.
        session: the content of ``session.json``.
        groups: in order of submission.
        timeline: which trial ran on which devices, and when; a row per trial, in the order of :attr:`rows`.
        keys: the measurements, by profile key.
        notes: one sentence for each thing that could not be read, and for each device that was given up.
        stories: what happened to each trial, by group and id.
        idle: the idle time of the devices; ``None`` if the journal does not tell, as those of older versions.
        resize_gains: what its resizes gained, as predicted and as measured.
        restores: from where its trials were restored.
        clock: wall-clock time at 0 on the time axis; ``None`` if unknown.
        wall: seconds from the start of the session to its end, start-up included, or to the last entry of its journal
            if it has not ended; ``None`` if unknown.
        is_running: whether the session ran on this machine when the folder was read.
        makespan: seconds from the first start of an iteration to the last end.
        cohorts: those of profile keys whose trials differ by their configs.
        forecasts: when each group was forecast to end, by its id, in order.
        read_at: when the folder was read, in seconds since the run began; ``None`` if the session has ended.
        paid: for how long devices were held, and at what price.
    """

    path: Path
    session: Mapping[str, Any]
    groups: tuple[GroupRun, ...]
    timeline: Timeline
    keys: tuple[KeyMeasurements, ...]
    notes: tuple[str, ...]
    stories: Mapping[tuple[str, str], Sequence[StoryLine]] = field(default_factory=dict)
    idle: IdleTime | None = None
    resize_gains: ResizeGains = field(default_factory=ResizeGains)
    restores: Restores = field(default_factory=Restores)
    clock: datetime | None = None
    wall: float | None = None
    is_running: bool = False
    makespan: float = 0.0
    cohorts: tuple[KeyCohorts, ...] = ()
    forecasts: Mapping[str, Sequence[WrittenForecast]] = field(default_factory=dict)
    read_at: float | None = field(default=None, compare=False)
    paid: Paid = field(default_factory=Paid)

    def story_of(self, trial: TrialRun) -> Sequence[StoryLine]:
        """What happened to a trial, in order of time."""
        return self.stories.get((trial.group_id, trial.trial_id), ())

    def clock_time(self, at: float) -> str:
        """The time of day, ``"12:34:56"``, so many seconds after the first iteration began; empty if unknown."""
        try:
            return "" if self.clock is None else (self.clock + timedelta(seconds=at)).strftime("%H:%M:%S")
        except OverflowError:  # The time of an entry that is not as it should be.
            return ""

    @property
    def name(self) -> str:
        """The session's own name; else that of its only search; else that of the folder."""
        search = self.groups[0].name if self.is_one_search else ""
        return str(self.session.get("name") or search or self.path.resolve().name)

    @property
    def iterations(self) -> int:
        """Number of finished iterations."""
        return sum(group.iterations for group in self.groups)

    @property
    def policy_text(self) -> str:
        """How its groups were ordered; empty if it has one owner, or the session does not say."""
        policy, fairness = self.session.get("group_policy"), self.session.get("fairness")
        owners = {group.terms.owner or (group.group_id,) for group in self.groups}
        if not isinstance(policy, str) or len(owners) < 2:
            return ""
        return f"groups ordered by {policy}" + (f", fairness {fairness:g}" if is_number(fairness) and fairness else "")

    @property
    def devices_held(self) -> str:
        """The number of devices; if some were not there all the time, also for how long they were in all."""
        timeline = self.timeline
        text = count(len(timeline.devices), "device")
        return f"{text}, held for {duration(timeline.device_seconds)} in all" if timeline.absences else text

    @property
    def forecast_lines(self) -> list[str]:
        """When the groups of a running session will have ended; of one that has ended, how its forecasts did."""
        if self.is_running:
            now = [(each, self.forecasts.get(each.group_id, ())) for each in self.groups if each.is_open]
            lines = [(each.name, forecast_text(known[-1], self.clock, self.read_at)) for each, known in now if known]
            return [f"forecast of {name}: {text}" for name, text in lines if text][-_MOST_FORECASTS:]
        return [f"forecast of {each.group} {each.text}" for each in self.compared_forecasts][-_MOST_FORECASTS:]

    @property
    def compared_forecasts(self) -> list[ComparedForecast]:
        """The forecasts of groups that have ended, beside their ends."""
        found: list[ComparedForecast] = []
        for group in self.groups:
            start, end = group.span
            if start <= end and not group.is_open:
                found += compared(group.name, self.forecasts.get(group.group_id, ()), start, end)
        return found

    @cached_property
    def costs(self) -> Costs:
        """What the run cost."""
        return Costs(
            paid=self.paid,
            **goals_in(self.session),
            unended=sum(trial.state in _NOT_ENDED for trial in self.trials),
            is_running=self.is_running,
        )

    @property
    def is_one_search(self) -> bool:
        """Whether the session ran the trials of one search algorithm only, such as one sweep of Ray Tune."""
        return len(self.groups) == 1 and self.groups[0].search is not None

    @property
    def sharing(self) -> str:
        """How trials shared GPUs, and why MPS was not used; empty without GPUs, or if the session did not record it."""
        way, why = self.session.get("sharing"), self.session.get("sharing_why")
        if not isinstance(way, str) or all(device.kind != "gpu" for device in self.timeline.devices):
            return ""
        return (PACKINGS[way].shown if way in PACKINGS else way) + (f" (no MPS: {why})" if why else "")

    @cached_property
    def trials(self) -> tuple[TrialRun, ...]:
        """All trials, by group."""
        return tuple(trial for group in self.groups for trial in group.trials)

    @cached_property
    def rows(self) -> tuple[TrialRun, ...]:
        """All trials, then what Fluid has added, to run iterations once for several of them."""
        return (*self.trials, *(shared for group in self.groups for shared in group.shared_runs))

    @cached_property
    def iterations_run(self) -> int:
        """Number of iterations that ran: those that were run once for several trials count once."""
        return sum(len(each.own) for each in self.rows)

    @property
    def sharing_of_runs(self) -> str:
        """How many iterations ran for those of the trials, in a line; empty if no trials shared a run."""
        runs = len(self.rows) - len(self.trials)
        if not runs:
            return ""
        reported = sum(len(trial.finished) for trial in self.trials)
        ran = f"{count(self.iterations_run, 'iteration')} ran for the {reported:,} of the trials"
        return f"{count(runs, 'shared run')}: {ran}" + (
            f", {percent(self.iterations_run / reported)}" if reported else ""
        )

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the numeric metrics: those that searches optimise, then the trials' others, then bookkeeping."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.ranges)
        return tuple(sorted(names, key=lambda name: (name not in self.searched, is_bookkeeping(name))))

    @cached_property
    def searched(self) -> tuple[str, ...]:
        """The metrics that searches optimise, also those without a mode whose names leave it open."""
        searches = (group.search for group in self.groups if group.search is not None)
        return tuple(dict.fromkeys(search.metric for search in searches if search.metric))

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """What searches optimise, each metric once; none without a mode whose name leaves it open."""
        searches = (group.search for group in self.groups if group.search is not None and group.search.metric)
        found = (goal for search in searches for goal in known_goals(search.metric, search.mode))
        return tuple({goal.metric: goal for goal in reversed(tuple(found))}.values())[::-1]

    def mode_of(self, metric: str) -> str | None:
        """``"min"`` or ``"max"``: the mode of the metric's search, else what its name says, or ``None``."""
        return next((goal.mode for goal in self.goals if goal.metric == metric), None) or known_mode(metric)

    @cached_property
    def resizes(self) -> int:
        """Number of resizes of all trials."""
        return sum(trial.resizes for trial in self.rows)


def run_names(runs: Sequence[RecordedRun]) -> list[str]:
    """A name for each of several runs: its own; those that have the same are told apart by their folders."""
    names = [run.name for run in runs]
    longer = [f"{run.name} ({run.path.resolve().name})" for run in runs]
    found = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return [f"{name} [{k}]" if found.count(name) > 1 else name for k, name in enumerate(found, 1)]

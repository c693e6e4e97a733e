"""The status of a session, as data: what the live view shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fluid.engine.events import PLAIN_TERMS, GroupDeadline, GroupTerms
from fluid.engine.view import DeviceStatus
from fluid.policies.owners.lateness import GroupLateness
from fluid.results.best import BestSoFar
from fluid.session.facts import Forecast, GoalStatus
from fluid.trialgroup import Search

__all__ = ["DeviceStatus", "GroupFacts", "GroupStatus", "Start", "Status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What a session knows of a group beside its engine.

    Attributes:
        name: the group's name.
        search: what its search algorithm said of it; ``None`` if none submits its trials.
        best: its best result so far; ``None`` if it has none.
        open_metric: the metric of which it shows no best, as nothing says its mode; ``None`` if there is none.
        first_start: when its first iteration began, seconds on the clock of the events; ``None`` before one has ended.
        results, result_seconds: iterations that have ended in this session, and the sum of their seconds; those that
            were run once for several trials count once.
        shared_runs: ids of what Fluid has added, to run iterations once for several trials.
    """

    name: str
    search: Search | None = None
    best: BestSoFar | None = None
    open_metric: str | None = None
    first_start: float | None = None
    results: int = 0
    result_seconds: float = 0.0
    shared_runs: frozenset[str] = frozenset()


class Start(NamedTuple):
    """What the first iterations of a session wait for.

    Attributes:
        phase: ``"importing"``: their lanes wait for a module; ``"lanes"``: their lanes are being started; ``"set up"``:
            trials are being set up in their lanes; ``"iteration"``: their first iterations run.
        number: how many lanes, or trials.
        module: the module that is being imported; empty in other phases.
    """

    phase: str
    number: int
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """One TrialGroup.

    Attributes:
        name: the group's name.
        trials: number of trials by state, by the outcome that the submitter gave, or as ``PAUSED BY THE USER``;
            forgotten ones are included.
        iterations_done, iterations: done and in all, over all trials; iterations that stopped and failed trials did not
            run are left out. Of a search, those in all are a prediction, or 0 if the number of its trials is unknown.
        eta: predicted seconds until all its trials have ended; ``None`` if too little was measured, or a trial hangs.
        expected: how many trials there will be; ``None`` unless a search algorithm has said so.
        is_search: whether a search algorithm submits its trials.
        seed: of the random numbers that its search's configs follow from; ``None`` if unknown.
        best: the best result so far; ``None`` if there is none.
        open_metric: the metric of which no best is shown, as nothing says its mode; ``None`` if there is none.
        forecast: when all its trials have ended, with odds; ``None`` if too little was measured.
        begun: how many of its trials have begun: they iterate, or have done so.
        owner: whose it is; ``None`` if it did not say.
        priority: its trials start before those of groups of a lower priority; 1 unless it said otherwise.
        preempt: whether running trials of groups of a lower priority make room for it.
        deadline: by when it is to have ended, from its submission; ``None`` for no deadline.
        weight: how much its cost of ending late counts, or that of its waiting; 1 unless it said otherwise.
        lateness: how it stands with regard to its deadline; ``None`` if it has none, it has ended, or that is unknown.
        awaited: the devices that some of its trials wait for and that there are not, in words.
        place: where its trials stand among those of all owners, 1 for those that start first; ``None`` where it has
            none to run, or only one owner has.
    """

    name: str
    trials: dict[str, int]
    iterations_done: int
    iterations: int
    eta: float | None
    expected: int | None = None
    is_search: bool = False
    seed: int | None = None
    best: BestSoFar | None = None
    open_metric: str | None = None
    forecast: Forecast | None = None
    begun: int = 0
    owner: str | None = None
    priority: float = PLAIN_TERMS.priority
    preempt: bool = False
    deadline: GroupDeadline | None = None
    weight: float = PLAIN_TERMS.weight
    lateness: GroupLateness | None = None
    awaited: tuple[str, ...] = ()
    place: int | None = None

    @property
    def said(self) -> str:
        """Whose it is and how urgent, in a few words; empty if it did not say."""
        return GroupTerms(self.owner, self.priority, self.preempt, None, self.deadline, self.weight).text

    @property
    def outlook(self) -> str:
        """Whether its deadline is met, in a few words; empty if it has none, or that is unknown."""
        found = self.lateness
        if found is None:
            return ""
        if found.missed:
            return "deadline missed"
        if found.can_be_met is False:
            return "deadline cannot be met"
        return "" if found.odds is None else f"deadline met with {found.odds:.0%}"

    @property
    def share(self) -> float | None:
        """Share of the iterations that are done; ``None`` if their number is unknown."""
        if not self.iterations:
            return None if self.is_search else 1.0
        return min(1.0, self.iterations_done / self.iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a session at one moment.

    Attributes:
        at: seconds since the session began.
        groups: in order of submission.
        devices: by index.
        asked: number of devices that were asked for and have not come.
        goal: how the session stands to its deadline and its budget, and for how long it has held devices.
        silent: trials that have given no result for far longer than usual, and for how many seconds, the longest first.
        given_up: devices that are used no more as they do not work, and why.
        alpha, packing: measured packing overhead and c by profile key, or, where the session has several device models,
            by key and model: ``"net on NVIDIA H200"``.
        run_dir: the run folder; ``None`` if unknown.
        fused: how many fused trials are worth it, and how many times the iterations per second of one trial alone they
            do, by the same names as ``alpha``; only where fusing was measured.
        rehearsed: whether trials are replayed, and times are virtual.
        start: what the first iterations wait for; ``None`` once one has ended, and where none is about to begin.
    """

    at: float
    groups: tuple[GroupStatus, ...]
    devices: tuple[DeviceStatus, ...]
    alpha: dict[str, float]
    packing: dict[str, int]
    silent: tuple[tuple[str, float], ...] = ()
    asked: int = 0
    given_up: tuple[tuple[int, str], ...] = ()
    run_dir: Path | None = None
    fused: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    goal: GoalStatus | None = None
    rehearsed: bool = False
    start: Start | None = None

"""The status of a session, as data: what the live view shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fluid.engine.group_terms import PLAIN_TERMS, GroupTerms
from fluid.engine.state import EngineState
from fluid.engine.view import GroupView, TrialView
from fluid.planning.profile import Profile
from fluid.session.best import BestSoFar
from fluid.session.forecast import Forecast
from fluid.session.goal_status import GoalStatus
from fluid.session.progress import LiveLength
from fluid.session.progress import forecast as forecast_search
from fluid.trialgroup import PAUSED_BY_USER, Search, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What a session knows of a group beside its engine.

    Attributes:
        name: the group's name.
        search: what its search algorithm said of it; ``None`` if none submits its trials.
        best: its best result so far; ``None`` if it has none.
        first_start: when its first iteration began, seconds on the clock of the events; ``None`` before one has ended.
        results, result_seconds: iterations that have ended in this session, and the sum of their seconds.
    """

    name: str
    search: Search | None = None
    best: BestSoFar | None = None
    first_start: float | None = None
    results: int = 0
    result_seconds: float = 0.0


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
        best: the best result so far; ``None`` if there is none.
        forecast: when all its trials have ended, with odds; ``None`` if too little was measured.
        owner: whose it is; ``None`` if it did not say.
        priority: its trials start before those of groups of a lower priority; 1 unless it said otherwise.
        preempt: whether running trials of groups of a lower priority make room for it.
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
    best: BestSoFar | None = None
    forecast: Forecast | None = None
    owner: str | None = None
    priority: float = PLAIN_TERMS.priority
    preempt: bool = False
    awaited: tuple[str, ...] = ()
    place: int | None = None

    @property
    def said(self) -> str:
        """Whose it is and how urgent, in a few words; empty if it did not say."""
        return GroupTerms(self.owner, self.priority, self.preempt).text

    @property
    def share(self) -> float | None:
        """Share of the iterations that are done; ``None`` if their number is unknown."""
        if not self.iterations:
            return None if self.is_search else 1.0
        return min(1.0, self.iterations_done / self.iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device.

    Attributes:
        device_id, kind, host: the device.
        residents: the trials that run there, each with its width; that of one that takes turns is for when it iterates.
        lanes: the number of its lanes.
        packs: trials that share a process, in which they are fused as far as they can be, or take turns.
        in_turns: whether they take turns.
    """

    device_id: int
    kind: str
    host: str
    residents: tuple[tuple[str, float], ...]
    lanes: int
    packs: tuple[tuple[str, ...], ...] = ()
    in_turns: bool = False

    @property
    def sharing(self) -> str:
        """What the trials of a pack are, in words: ``"fused"`` or ``"in turns"``."""
        return "in turns" if self.in_turns else "fused"

    @property
    def parts(self) -> tuple[tuple[tuple[str, ...], float], ...]:
        """The residents, those of a pack together: the trials and the width of each part, in order.

        The width of a trial in a pack says how many may be there. The device is all theirs, however many there are.
        """
        if not self.packs:
            return tuple(((trial,), width) for trial, width in self.residents)
        pack_of = {trial: pack for pack in self.packs for trial in pack}
        parts = dict.fromkeys(pack_of.get(trial, (trial,)) for trial, _ in self.residents)
        return tuple((part, 1.0 / len(parts)) for part in parts)


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


def _fused(profile: Profile, key: str, model: str | None) -> tuple[int, float] | None:
    rates = profile.fused_rates(key, model)
    if rates is None:
        return None
    rows = profile.fused_limit(key, rates.rows[-1], model)
    return rows, rates.gain(rows)


def _measured_keys(state: EngineState) -> dict[str, tuple[str, str | None]]:
    """The names under which keys were measured: a key's own, and where devices are of several models, that of each."""
    profile, models, keys = state.profile, state.occupancy.models, state.profile.keys()
    if not models.are_several:
        return {key: (key, models.first) for key in keys}
    pairs = [(key, model) for key in keys for model in profile.models(key)]
    return {f"{key} on {model or 'unknown model'}": (key, model) for key, model in pairs}


def status_of(
    state: EngineState,
    groups: Mapping[str, GroupFacts],
    at: float,
    *,
    began: float = 0.0,
    asked: int = 0,
    run_dir: Path | None = None,
    forecast: Callable[[str], Forecast | None] = lambda _: None,
    goal: GoalStatus | None = None,
) -> Status:
    """Reads a status off the engine.

    Args:
        state: the engine.
        groups: what is known of each group beside it, by id.
        at: seconds since the session began.
        began: when that was, seconds on the clock of the events.
        asked: number of devices that were asked for and have not come.
        run_dir: the run folder.
        forecast: of each group, by its id.
        goal: how it stands to its deadline and its budget.
    """
    now = began + at
    view, measured = state.view(), _measured_keys(state)
    silent = sorted(state.silent(now), key=lambda trial: -trial[1])
    hanging = {state.trials[trial_id].group_id for trial_id, _ in silent}
    return Status(
        at=at,
        groups=tuple(
            _group_status(
                state,
                group,
                groups.get(group.group_id, GroupFacts(name=group.group_id)),
                now,
                hangs=group.group_id in hanging,
                forecast=forecast(group.group_id),
            )
            for group in view.groups
        ),
        devices=tuple(
            DeviceStatus(
                device_id=seen.device.index,
                kind=seen.device.kind,
                host=seen.device.host,
                residents=seen.residents,
                lanes=seen.lanes,
                packs=seen.packs,
                in_turns=seen.in_turns,
            )
            for seen in view.devices
        ),
        alpha={name: state.profile.alpha(key, model) for name, (key, model) in measured.items()},
        packing={name: state.profile.measured_packing(key, model) for name, (key, model) in measured.items()},
        fused={name: found for name, at_key in measured.items() if (found := _fused(state.profile, *at_key))},
        asked=asked,
        silent=tuple(silent),
        given_up=view.given_up,
        run_dir=run_dir,
        goal=goal,
    )


def _group_status(
    state: EngineState, group: GroupView, facts: GroupFacts, now: float, *, hangs: bool, forecast: Forecast | None
) -> GroupStatus:
    search = facts.search
    counts, done, total = Counter(group.past), group.past_iterations, group.past_iterations
    for trial in group.trials:
        if not (trial.state.ended and trial.outcome is TrialState.PAUSED):  # It comes back as another trial.
            counts[_shown_state(trial, search)] += 1
        done += min(trial.done, trial.budget)
        stopped = trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED
        total += trial.done if stopped else trial.budget
    eta = None
    if search is None:
        eta = state.seconds_left(group.group_id, now)
    else:
        left, eta = _left_of_search(group, counts.total(), search, facts, now)
        total = 0 if left is None else done + left
    return GroupStatus(
        name=facts.name,
        trials=dict(counts),
        iterations_done=done,
        iterations=total,
        eta=None if hangs or group.awaited else eta,
        expected=None if search is None else search.trials,
        is_search=search is not None,
        best=facts.best,
        forecast=None if hangs else forecast,
        owner=group.terms.owner,
        priority=group.terms.priority,
        preempt=group.terms.preempt,
        awaited=group.awaited,
        place=group.place,
    )


def _shown_state(trial: TrialView, search: Search | None) -> str:
    if trial.state.ended and trial.outcome is not None:
        return trial.outcome.value
    if trial.state is TrialState.DONE and search is not None and search.extends:
        return TrialState.PAUSED.value  # Until its search algorithm has decided.
    return PAUSED_BY_USER if trial.state is TrialState.PAUSED else trial.state.value


def _left_of_search(
    group: GroupView, known: int, search: Search, facts: GroupFacts, now: float
) -> tuple[int | None, float | None]:
    """Predicts the iterations that are left of a search, and the seconds that they take; ``None`` where unknown."""
    ended, live = Counter(group.past_lengths), Counter[LiveLength]()
    for trial in group.trials:
        if trial.state.ended and trial.outcome is TrialState.PAUSED:
            continue
        if trial.state.ended and _shown_state(trial, search) != TrialState.PAUSED:
            ended[trial.done] += 1
        else:
            live[LiveLength(trial.done, trial.budget, trial.budget + trial.follow_up_iterations)] += 1
    if search.trials is None:
        return None, None
    coming = max(0, search.trials - known)
    predicted = forecast_search(ended, live, coming)
    left = round(predicted.left)
    if not (predicted.is_supported or not search.extends) or facts.first_start is None or not facts.results:
        return left, None
    pace = (now - facts.first_start) / facts.results
    alone = facts.result_seconds / facts.results
    return left, max(predicted.left * pace, predicted.longest * alone)

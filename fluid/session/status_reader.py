"""Reads the status of a session off its engine. What has ended is counted once, and not at every look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from fluid.engine.events import BY_USER, ELSEWHERE, OFFERED, SET_ASIDE
from fluid.engine.records import EndedTrial, GroupRecord, TrialRecord
from fluid.measure.profile import Profile
from fluid.policies.engine import EngineState
from fluid.policies.owners.lateness import GroupLateness
from fluid.results.runs import BestValue, GroupStanding
from fluid.results.submitted import UNFINISHED
from fluid.session.facts import Forecast, GoalStatus
from fluid.session.forecasting.progress import LiveLength
from fluid.session.forecasting.progress import forecast as forecast_search
from fluid.session.status import GroupFacts, GroupStatus, Start, Status
from fluid.trialgroup import IS_ELSEWHERE, PAUSED_BY_USER, Search, TrialState

#: What is shown of a trial that waits, by what holds it.
_HELD = {BY_USER: PAUSED_BY_USER, ELSEWHERE: IS_ELSEWHERE, OFFERED: IS_ELSEWHERE}
_ENDED = frozenset(state.value for state in TrialState if state.ended)


class KnownGroup(Protocol):
    """What is known of a group beside its engine."""

    @property
    def facts(self) -> GroupFacts:
        """What the status shows of it."""
        ...

    @property
    def shows(self) -> int:
        """How often one of its trials has come to be shown otherwise."""
        ...


class StatusReader:
    """Reads statuses, in the session's thread, or once that has ended.

    The row of a group whose trials have all ended stays as it was, until one of them goes on, is shown otherwise, or is
    forgotten.

    Args:
        state: the engine.
        groups: what is known of each group beside it, by id.
        lateness: how a group stands with regard to its deadline, by its id.
    """

    def __init__(
        self,
        state: EngineState,
        groups: Mapping[str, KnownGroup],
        lateness: Callable[[str], GroupLateness | None] = lambda _: None,
    ) -> None:
        self._lateness = lateness
        self._state = state
        self._groups = groups
        #: Of groups whose trials have all ended: the row, and what had changed by then.
        self._kept: dict[str, tuple[tuple[int, int], GroupStatus]] = {}

    def read(
        self,
        at: float,
        *,
        began: float = 0.0,
        run_dir: Path | None = None,
        forecast: Callable[[str], Forecast | None] = lambda _: None,
        goal: GoalStatus | None = None,
        loading: Callable[[], str] = str,
    ) -> Status:
        """How the session stands.

        Args:
            at: seconds since the session began.
            began: when that was, seconds on the clock of the events.
            run_dir: the run folder.
            forecast: of each group, by its id.
            goal: how it stands to its deadline and its budget.
            loading: the module that is imported now and that lanes wait for.
        """
        state, now = self._state, began + at
        places, measured = state.places, _measured_keys(state)
        return Status(
            at=at,
            groups=tuple([self.group(name, now, forecast, places.get(name)) for name in state.groups]),
            devices=state.device_statuses,
            alpha={name: state.profile.alpha(key, model) for name, (key, model) in measured.items()},
            packing={name: state.profile.measured_packing(key, model) for name, (key, model) in measured.items()},
            fused={name: found for name, at_key in measured.items() if (found := _fused(state.profile, *at_key))},
            silent=tuple(sorted(state.silent(now), key=lambda trial: -trial[1])),
            given_up=state.given_up,
            run_dir=run_dir,
            goal=goal,
            start=self._start(loading),
        )

    def _start(self, loading: Callable[[], str]) -> Start | None:
        """What the first iterations wait for."""
        state = self._state
        if any(known.facts.results for known in self._groups.values()):
            return None
        live = [trial for group in state.groups.values() for trial in group.live.values()]
        starting = [trial for trial in live if trial.state is TrialState.STARTING]
        lanes = {lane for trial in starting for lane in trial.placement.lanes}
        coming = sum(1 for lane in lanes if lane in state.lanes and not state.lanes[lane].ready)
        if coming:
            module = loading()
            return Start("importing" if module else "lanes", coming, module)
        if starting:
            return Start("set up", len(starting))
        running = sum(1 for trial in live if trial.state is TrialState.RUNNING)
        return Start("iteration", running) if running else None

    def group(
        self,
        group_id: str,
        now: float,
        forecast: Callable[[str], Forecast | None] = lambda _: None,
        place: int | None = None,
    ) -> GroupStatus:
        """How a group stands.

        Args:
            group_id: the group.
            now: the time, seconds on the clock of the events.
            forecast: of a group, by its id.
            place: where its trials stand among those of all owners.
        """
        group, known = self._state.groups[group_id], self._groups[group_id]
        changes = group.changes, known.shows
        if (kept := self._kept.get(group_id)) is not None and kept[0] == changes:
            return kept[1]
        facts = known.facts
        trials = _trials_of(self._state, group, facts.shared_runs)
        counts, begun, done, total = _count(group, trials, facts.search)
        has_ended = not group.live and counts.keys() <= _ENDED
        if facts.search is None:
            eta = self._state.seconds_left(group_id, now)
        else:
            left, eta = _left_of_search(group, trials, counts.total(), facts, now)
            total = 0 if left is None else done + left
        hangs, awaited = self._state.hangs(group_id, now), self._state.awaited(group_id)
        row = GroupStatus(
            name=facts.name,
            trials=dict(counts),
            iterations_done=done,
            iterations=total,
            eta=None if hangs or awaited else eta,
            expected=None if facts.search is None else facts.search.trials,
            is_search=facts.search is not None,
            seed=None if facts.search is None else facts.search.seed,
            best=facts.best,
            begun=begun,
            open_metric=facts.open_metric,
            forecast=None if hangs or has_ended else forecast(group_id),
            owner=group.terms.owner,
            priority=group.terms.priority,
            preempt=group.terms.preempt,
            deadline=group.terms.deadline,
            weight=group.terms.weight,
            lateness=self._lateness(group_id),
            awaited=awaited,
            place=place,
        )
        if has_ended:
            self._kept[group_id] = changes, row
        else:
            self._kept.pop(group_id, None)
        return row

    def closing(self) -> Iterator[GroupStanding]:
        """How the groups of a session that ends stand, for ``session.json``."""
        for group_id, group in self._state.groups.items():
            facts = self._groups[group_id].facts
            states, trials = Counter(group.past), _trials_of(self._state, group, facts.shared_runs)
            states.update(PAUSED_BY_USER if each.held == BY_USER else UNFINISHED for each in trials.live)
            for ended, number in trials.ended.items():
                if not ended.comes_back:
                    states[_shown_as(ended, facts.search)] += number
            best = facts.best
            found = None if best is None else BestValue(best.metric, best.mode, best.value, best.trial_id)
            yield GroupStanding(facts.name, states, found)


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


class _Trials(NamedTuple):
    """The user's trials of a group, as :class:`fluid.engine.records.GroupRecord` has them with shared runs."""

    live: Collection[TrialRecord]
    ended: Mapping[EndedTrial, int]


def _trials_of(state: EngineState, group: GroupRecord, shared_runs: Collection[str]) -> _Trials:
    if not shared_runs:
        return _Trials(group.live.values(), group.ended)
    live = [trial for trial_id, trial in group.live.items() if trial_id not in shared_runs]
    known = (state.trials[trial_id] for trial_id in shared_runs if trial_id in group.trial_ids)
    past = Counter(record.counted for record in known if record.counted is not None)
    return _Trials(live, Counter(group.ended) - past)


def _is_queued(trial: TrialRecord) -> bool:
    """Whether a trial that the engine has paused waits for the state from which it starts, and not for its user."""
    return trial.state is TrialState.PAUSED and bool(trial.awaits) and not trial.held


def _count(group: GroupRecord, trials: _Trials, search: Search | None) -> tuple[Counter[str], int, int, int]:
    """A group: trials by what is shown of them, how many of them have begun, its iterations done, and those in all."""
    counts, done, total = Counter(group.past), group.past_iterations, group.past_iterations
    begun = counts.total()
    for trial in trials.live:
        if _is_queued(trial):
            counts[TrialState.QUEUED.value] += 1
        else:
            counts[_HELD.get(trial.held, "PAUSED") if trial.state is TrialState.PAUSED else trial.state.value] += 1
        begun += trial.progress.done > 0 or trial.state is TrialState.RUNNING
        done += min(trial.progress.done, trial.progress.budget)
        total += trial.progress.budget
    for ended, number in trials.ended.items():
        if not ended.comes_back:
            counts[_shown_as(ended, search)] += number
            begun += number
        done += number * min(ended.done, ended.budget)
        total += number * (ended.budget if ended.state is TrialState.DONE else ended.done)
    return counts, begun, done, total


def _shown_as(trial: EndedTrial, search: Search | None) -> str:
    if trial.outcome is not None:
        return trial.outcome.value
    if trial.state is TrialState.DONE and search is not None and search.extends:
        return TrialState.PAUSED.value  # Until its search algorithm has decided.
    return trial.state.value


def _left_of_search(
    group: GroupRecord, trials: _Trials, known: int, facts: GroupFacts, now: float
) -> tuple[int | None, float | None]:
    """Predicts the iterations that are left of a search, and the seconds that they take; ``None`` where unknown."""
    search = facts.search
    if search is None or search.trials is None:
        return None, None
    ended, live = Counter(group.past_lengths), Counter[LiveLength]()
    for past, number in trials.ended.items():
        if past.comes_back:
            continue
        if _shown_as(past, search) == TrialState.PAUSED:
            live[LiveLength(past.done, past.budget, past.budget + past.follow_up_iterations)] += number
        else:
            ended[past.done] += number
    for progress in (trial.progress for trial in trials.live):
        most = progress.budget + progress.follow_up_iterations
        live[LiveLength(progress.done, progress.budget, most)] += 1
    predicted = forecast_search(ended, live, max(0, search.trials - known))
    left = round(predicted.left)
    if not (predicted.is_supported or not search.extends) or facts.first_start is None or not facts.results:
        return left, None
    pace = (now - facts.first_start) / facts.results
    alone = facts.result_seconds / facts.results
    return left, max(predicted.left * pace, predicted.longest * alone)


# -- standing ------------------------------------------------------------------------------------
#
# How the trials of a session stand, read off its engine.


@dataclass(frozen=True, slots=True)
class Standing:
    """How trials stand.

    Attributes:
        states, outcomes: the engine's state, and what the submitter said of it, by trial id.
        set_aside: trials that are paused as they would end no further iteration in time, not by the user.
        unsaved: those of them that have left their devices, and are still to be saved.
        forgotten: the number of trials that were forgotten, by group id.
    """

    states: dict[str, TrialState] = field(default_factory=dict)
    outcomes: dict[str, TrialState] = field(default_factory=dict)
    set_aside: set[str] = field(default_factory=set)
    unsaved: set[str] = field(default_factory=set)
    forgotten: dict[str, int] = field(default_factory=dict)


def standing_of(state: EngineState, group_ids: Iterable[str], only: str | None = None) -> Standing:
    """Reads how the trials of some groups stand, or only one; a group that the engine does not know yet has none."""
    found = Standing()
    for group in (state.groups[group_id] for group_id in group_ids if group_id in state.groups):
        found.forgotten[group.group_id] = sum(group.past.values())
        for trial_id in group.trial_ids if only is None else group.trial_ids.keys() & {only}:
            trial = state.trials[trial_id]
            found.states[trial_id] = TrialState.QUEUED if _is_queued(trial) else trial.state
            if trial.held in (SET_ASIDE, OFFERED):
                found.set_aside.add(trial_id)
                is_kept = trial.residence.lane is not None and trial.spec.can_save
                if trial.state is TrialState.PAUSED and (is_kept or trial.residence.saving):
                    found.unsaved.add(trial_id)
            if trial.outcome is not None:
                found.outcomes[trial_id] = trial.outcome
    return found

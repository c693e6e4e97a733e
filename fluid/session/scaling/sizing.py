"""Sizing: how many devices a session holds so that all ends by a deadline, within a budget, at the least cost.

:class:`fluid.sizing.sizer.Sizer` decides; :class:`DeviceSizing` tells it how things stand, and applies what it says:
:mod:`fluid.session.scaling.held` gives devices back, or parks them on this machine, and asks for missing ones. As the
deadline nears, or the end of the budget, it ends what cannot end by then (:mod:`.last_iterations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fluid._logs import logger_of
from fluid.backends.base import Backend
from fluid.engine.commands import Command, NoteDeviceLost, ReportEnd
from fluid.engine.events import (
    ELSEWHERE,
    OFFERED,
    SET_ASIDE,
    BudgetExtended,
    DeviceAdded,
    Event,
    GroupRecovered,
    GroupSubmitted,
    TrialsAdded,
    TrialSetAside,
)
from fluid.engine.records import TrialRecord
from fluid.planners.instance import EndDistribution
from fluid.policies.engine import EngineState
from fluid.session.facts import DeadlineInForce, GoalStatus, SweepInTime
from fluid.session.scaling.held import HeldDevices
from fluid.session.scaling.in_time import LOOK_COSTS, LOOKS_S, InTime
from fluid.sizing.goals import Goals, format_duration
from fluid.sizing.held_time import HeldTime
from fluid.sizing.in_turn import in_turn
from fluid.sizing.sizer import Sizer, Sizing

_log = logger_of("fluid.session")

#: When what is left of a group ends, on so many devices; ``None`` while too little was measured to say.
GroupEndOn = Callable[[str, int], EndDistribution | None]

#: Seconds between two decisions, at least: at most so many, and so large a share of the deadline.
_PAUSE_S, _PAUSE_SHARE = 1.0, 0.005
#: Without a departure it is decided again after so large a share of the time left, in seconds within these bounds.
_LOOK_SHARE, _LOOK_S = 0.02, (1.0, 30.0)
#: Seconds without any unfinished trial until devices are given back: a submitter may be about to answer.
_IDLE_S = 5.0
#: All is drained before the end by at most that share of the deadline.
_SAVE_SHARE = 0.25
#: Seconds between two looks at the costs for ``session.json``.
_FACTS_S = 30.0
#: Why trials rest that do not go on in this session before its end.
_LEFT = (SET_ASIDE, OFFERED, ELSEWHERE)
#: A deadline that cannot be met is told of again if the earliest end has moved by so large a share of the deadline, and
#: a budget that does not suffice if the expected cost has moved by so large a share of the budget.
_TOLD_AGAIN = 0.25
#: A sweep's deadline and that of its group are the same, but for what it took to begin.
_ABOUT = 0.01
#: A budget is said not to suffice if so large a share of it is missing, as expected costs have errors.
_MISSING = 0.05


class DeviceSizing:
    """Sizes a session by its deadlines and its budget. For the session's thread.

    Args:
        state: the engine.
        backend: what gives devices.
        handle: gives the engine events of one instant.
        goals: of the session.
        began: when the session began, seconds on the clock of the events.
        finish: saves all trials and ends the session: called with why, and the seconds that there are for it.

    Attributes:
        held: the devices.
        end_on: forecasts groups; set once, by the session.
        due_of: when a group is to have ended, seconds on the clock of the events; ``None`` without a deadline of its
            own. Set once, by the session.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        handle: Callable[..., None],
        goals: Goals,
        *,
        began: float,
        finish: Callable[[str, float], None],
    ) -> None:
        self._time = HeldTime()
        self.held = HeldDevices(state, backend, handle)
        self.end_on: GroupEndOn = lambda group_id, devices: None
        self.due_of: Callable[[str], float | None] = lambda group_id: None
        self._state = state
        self._backend = backend
        self._handle = handle
        self._goals = goals
        self._began = began
        self._finish = finish
        self._deadlines: list[DeadlineInForce] = []
        if goals.deadline_s is not None:
            self._deadlines.append(DeadlineInForce(began + goals.deadline_s, goals.deadline_s))
        self._sizing: Sizing | None = None
        #: The deadline that it follows from.
        self._sized_for: DeadlineInForce | None = None
        #: Whether something has changed since the latest decision, when that was, and how many seconds it took.
        self._is_stale = True
        self._decided_at = -math.inf
        self._took_s = 0.0
        self._in_time = InTime(state, backend.now, goals.odds)
        #: When to look at what the session can still end in time.
        self._look_at = -math.inf
        self._idle_since: float | None = None
        #: The deadline and the earliest end that the user was warned of; ``None`` while it can be met.
        self._warned: tuple[DeadlineInForce, float] | None = None
        #: US dollars that were missing when the user was last warned of the budget; ``None`` while it suffices.
        self._warned_usd: float | None = None
        #: Of the trials that ran when the deadline or the money was first seen not to suffice, those that have done one
        #: iteration at most since; ``None`` while it suffices.
        self._fresh: set[str] | None = None
        self._is_over = False
        self._told_at = began

    # -- what is wanted ------------------------------------------------------------------------------------

    def add(self, seconds: float, now: float, sweep: SweepInTime) -> DeadlineInForce:
        """Sets a further deadline, that of a sweep, until it is dropped.

        Args:
            seconds: until then.
            now: the time.
            sweep: is told what cannot end by then.
        """
        deadline = DeadlineInForce(now + seconds, seconds, sweep)
        self._deadlines.append(deadline)
        self._is_stale = True
        return deadline

    def drop(self, deadline: DeadlineInForce) -> None:
        """Drops a sweep's deadline. Where none is left, all devices that the session began with are used again."""
        self._deadlines = [other for other in self._deadlines if other is not deadline]
        self._is_stale = True
        if not self._is_on:
            self._sizing = None
            self.held.restore()

    @property
    def rules(self) -> bool:
        """Whether the number of devices follows from a deadline or a budget, rather than from what waits."""
        return self._is_on and not self._is_over and self.held.can_change

    @property
    def _is_on(self) -> bool:
        return bool(self._deadlines) or self._goals.budget_usd is not None

    def status(self, now: float) -> GoalStatus:
        """How it stands."""
        held = self._time.device_seconds(now)
        due, sizing = self._sized_for if self._sized_for in self._deadlines else self._due, self._sizing
        is_told = self._warned is not None and self._warned[0] is due
        aged = max(0.0, now - self._decided_at) if sizing is not None else 0.0
        earliest = None if sizing is None or sizing.earliest_s is None else max(0.0, sizing.earliest_s - aged)
        return GoalStatus(
            deadline_s=None if due is None else max(0.0, due.at - now),
            devices=None if sizing is None else sizing.devices,
            odds=None if sizing is None else sizing.odds,
            meets=None if sizing is None or (sizing.meets is False and not is_told) else sizing.meets,
            earliest_s=earliest,
            device_seconds=held,
            spent_usd=self._goals.cost(held),
            budget_usd=self._goals.budget_usd,
            missing_usd=self._warned_usd,
        )

    @property
    def facts(self) -> dict[str, float]:
        """What ``session.json`` says of the costs, if devices have a price."""
        if self._goals.price_per_device_hour is None:
            return {}
        self._told_at = self._backend.now()
        return {"device_s": round(self._time.device_seconds(self._told_at), 3)}

    def owes_facts(self, now: float) -> bool:
        """Whether :attr:`facts` were read long ago: of a session that is killed, what was spent since is not known."""
        return self._goals.price_per_device_hour is not None and now >= self._told_at + _FACTS_S

    @property
    def _due(self) -> DeadlineInForce | None:
        """The earliest deadline."""
        return min(self._deadlines, key=lambda deadline: deadline.at, default=None)

    # -- what happens --------------------------------------------------------------------------------------

    def heard(self, events: Iterable[Event], commands: Iterable[Command]) -> None:
        """Takes note of devices that came, trials that came and went, and gives retired devices back."""
        for event in events:
            if isinstance(event, DeviceAdded):
                self._time.came(event.device.index, event.at)
            elif isinstance(event, (GroupSubmitted, GroupRecovered, TrialsAdded, BudgetExtended)):
                self._is_stale = True
        for command in commands:
            if isinstance(command, NoteDeviceLost):
                self._time.left(command.device_id, command.at)
            elif isinstance(command, ReportEnd):
                self._is_stale = True
        self._is_stale |= self.held.heard(events, commands)

    # -- deciding ------------------------------------------------------------------------------------------

    def act(self, now: float) -> float | None:
        """Decides if it is time to, and applies that; returns when to be called again at the latest, if ever."""
        if not self._is_on or self._is_over:
            return None
        groups = [group_id for group_id, group in self._state.groups.items() if group.open]
        if groups:
            self._idle_since = None
        else:
            self._idle_since = now if self._idle_since is None else self._idle_since
            if now < self._idle_since + _IDLE_S:
                return self._idle_since + _IDLE_S
        if now >= (at := self._next_at(now)):
            self._decide(now, groups)
            at = self._next_at(now)
        if not groups:
            return None  # There is nothing to save; what is submitted wakes the session.
        look_at = self._look(now)
        return None if self._is_over else min(at, look_at)

    def _next_at(self, now: float) -> float:
        """When to decide next."""
        due = self._due
        pause = _PAUSE_S if due is None else min(_PAUSE_S, _PAUSE_SHARE * due.seconds)
        if self._is_stale:
            return self._decided_at + max(pause, LOOK_COSTS * self._took_s)
        left = _LOOK_S[1] / _LOOK_SHARE if due is None else due.at - self._decided_at
        look = min(max(_LOOK_SHARE * left, _LOOK_S[0], pause), _LOOK_S[1])
        return self._decided_at + max(look, LOOK_COSTS * self._took_s)

    def _decide(self, now: float, groups: Sequence[str]) -> None:
        """Decides how many devices to hold, and applies it."""
        held, spent = len(self._state.occupancy), self._time.device_seconds(now)
        self._decided_at, self._is_stale = now, False
        dues: list[DeadlineInForce | None] = [*sorted(self._deadlines, key=lambda deadline: deadline.at)] or [None]
        sizings = [(self._sizing_for(due, self._before(due, groups), now, held, spent), due) for due in dues]
        before = self._sizing
        self._sizing, self._sized_for = sizing, _ = max(sizings, key=lambda each: each[0].devices)
        self._took_s = self._backend.now() - now
        if groups:
            known = self._is_known(sizing)
            self._tell(sizing, now, known=known)
            self._tell_costs(sizing, spent, known=known)
        self.held.hold(sizing.devices, interrupts=sizing.interrupts)
        if before is None or before.devices != sizing.devices:
            odds = "" if sizing.odds is None else f"; the deadline is met with {sizing.odds:.0%}"
            _log.info("%d devices are to be held, and %d were%s", sizing.devices, held, odds)

    def _sizing_for(
        self, due: DeadlineInForce | None, groups: Sequence[str], now: float, held: int, spent: float
    ) -> Sizing:
        goals = replace(self._goals, deadline=None if due is None else due.at - self._began)
        sizer = Sizer(goals, self.held.most, provision_s=self.held.provision_s)

        def end_on(devices: int) -> EndDistribution | None:
            return in_turn([self.end_on(group_id, devices) for group_id in groups])

        return sizer.decide(
            now - self._began, held, end_on, self._useful(), asked=self.held.asked, spent_device_s=spent
        )

    def _before(self, due: DeadlineInForce | None, groups: Sequence[str]) -> Sequence[str]:
        """The groups that run before a deadline: all but those that are to have ended later."""
        if due is None or due.sweep is None:
            return groups
        latest = due.at + _ABOUT * due.seconds
        return [group_id for group_id in groups if (by := self.due_of(group_id)) is None or by <= latest]

    def _useful(self) -> int:
        """Devices that the trials which run or wait could use at most."""
        state = self._state
        used = sum(max(1, trial.fixed_width or state.estimates.widest(trial)) for trial in self._running())
        return used + max(len(state.queue) + len(state.arrivals), state.demand.devices)

    def _is_known(self, sizing: Sizing) -> bool:
        """Whether what is missing outlasts the first iterations by which it was seen: these may have warmed up."""
        if not sizing.is_missed and sizing.within_budget is not False:
            self._fresh = None
            return True
        fresh = {trial.trial_id for trial in self._running() if trial.pace.observed < 2 and trial.progress.left > 0}
        self._fresh = fresh if self._fresh is None else self._fresh & fresh
        return not self._fresh

    def _running(self) -> list[TrialRecord]:
        by_row = self._state.trials.by_row
        return [by_row[row] for row in self._state.allocations.running if row in by_row]

    def _tell(self, sizing: Sizing, now: float, *, known: bool) -> None:
        """Warns the user as soon as it is known that a deadline cannot be met."""
        due = self._sized_for
        if due is None or due.sweep is not None or sizing.meets is None:
            return  # Of a sweep's own deadline, that of its group tells.
        if sizing.meets:
            if self._warned is not None and self._warned[0] is due:
                _log.warning("the deadline in %s can be met after all", format_duration(due.at - now))
                self._warned = None
            return
        if sizing.earliest_s is None or not sizing.is_missed or not known:
            return  # It is too close to say, or too little was measured.
        earliest = now + sizing.earliest_s
        known = self._warned is not None and self._warned[0] is due
        if known and self._warned is not None and abs(self._warned[1] - earliest) < _TOLD_AGAIN * due.seconds:
            return
        self._warned = due, earliest
        odds = f"{self._goals.odds:.0%}"
        _log.warning(
            "the deadline in %s cannot be met with %s: on %d devices, the most that there are, all ends in %s",
            *(format_duration(max(0.0, due.at - now)), odds, self.held.most, format_duration(sizing.earliest_s)),
        )

    def _tell_costs(self, sizing: Sizing, spent_device_s: float, *, known: bool) -> None:
        """Warns the user at once if the budget does not suffice."""
        budget, spent = self._goals.budget_usd, self._goals.cost(spent_device_s)
        if budget is None or spent is None or sizing.cost_usd is None or self._is_over:
            return
        left, warned = max(0.0, budget - spent), self._warned_usd
        missing = sizing.cost_usd - left
        if missing <= 0.0:
            if warned is not None:
                _log.warning("the budget of $%.2f suffices after all", budget)
            self._warned_usd = None
        elif (
            known and missing > _MISSING * budget and (warned is None or abs(missing - warned) >= _TOLD_AGAIN * budget)
        ):
            self._warned_usd = missing
            _log.warning(
                "the budget of $%.2f does not suffice: what is left is expected to cost $%.2f, and $%.2f are left",
                *(budget, sizing.cost_usd, left),
            )

    # -- the end -------------------------------------------------------------------------------------------

    def _look(self, now: float) -> float:
        """Ends, before each deadline and before the money ends, what cannot end by it; returns when to look again."""
        for deadline in list(self._deadlines):
            self._in_time.look(deadline, now)
        if now >= self._look_at:
            self._look_at = self._look_at_session(now)
        return min([self._look_at, *(deadline.look_at for deadline in self._deadlines if deadline.sweep is not None)])

    def _look_at_session(self, now: float) -> float:
        end_at, reason = self._ends_at()
        if math.isinf(end_at):
            return math.inf
        state, spare_s = self._state, self._spare_s()
        rows = [row for row in (*state.occupancy.held, *state.queue) if row in state.trials.by_row]
        trials = [*map(state.trials.by_row.__getitem__, rows), *state.arrivals]
        found = self._in_time.foresight.until(end_at, now, trials, saves=True)
        is_over, told = now >= end_at - spare_s, [*found.last, *found.too_late]
        if (is_over or told) and self._lasts_longer(now):
            return now
        if told:
            self._handle(*(TrialSetAside(now, name) for name in told))
        if is_over or not (found.run_on or found.wait or self._may_go_on()):
            self._end_session(reason, max(spare_s, end_at - now))
            return math.inf
        return self._in_time.again(now, found.next_at, end_at - spare_s)

    def _ends_at(self) -> tuple[float, str]:
        """When the session is to be over, and why."""
        own = [(deadline.at, deadline.reason) for deadline in self._deadlines if deadline.sweep is None]
        by = None if self._sizing is None else self._sizing.money_ends_in_s
        if by is not None:
            own.append((self._decided_at + by, f"the budget of ${self._goals.budget_usd:.2f} is spent"))
        return min(own, default=(math.inf, ""))

    def _lasts_longer(self, now: float) -> bool:
        """Whether the money lasts longer than was decided, as devices went since; it is decided anew to see that."""
        before, _ = self._ends_at()
        if self._goals.budget_usd is None or now < self._decided_at + _PAUSE_S:
            return False
        self._decide(now, [group_id for group_id, group in self._state.groups.items() if group.open])
        return self._ends_at()[0] > before + LOOKS_S

    def _may_go_on(self) -> bool:
        """Whether a trial is about to leave its devices, or the user has paused one: the end is not yet known."""
        state = self._state
        open_groups = [group for group in state.groups.values() if group.open]
        trials = (state.trials[name] for group in open_groups for name in group.trial_ids)
        return any(not trial.state.ended and trial.held not in _LEFT for trial in trials)

    def _spare_s(self) -> float:
        """Seconds before the end at which all is drained: what rests is saved by then."""
        keys = {trial.spec.profile_key: trial for trial in self._state.trials.values()}
        shortest = min([deadline.seconds for deadline in self._deadlines], default=math.inf)
        return min(self._in_time.foresight.save_s(keys.values()), _SAVE_SHARE * shortest)

    def _end_session(self, reason: str, seconds: float) -> None:
        self._is_over = True
        self.held.withdraw()
        self._finish(reason, seconds)

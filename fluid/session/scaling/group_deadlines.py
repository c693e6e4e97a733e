"""The deadlines of groups: says what cannot be met, and has what is to stop at its deadline stop.

They change neither how many devices a session holds nor the order, which the engine makes by them itself
(:mod:`fluid.policies.owners.lateness`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fluid._logs import logger_of
from fluid.engine.commands import Command, NoteLateness, Report, ReportEnd
from fluid.engine.events import BudgetExtended, Event, GroupDeadline, GroupRecovered, GroupSubmitted, TrialsAdded
from fluid.policies.engine import EngineState
from fluid.policies.owners.lateness import CAN_MEET, GroupLateness
from fluid.session.facts import DeadlineInForce
from fluid.session.inbox import GroupInbox
from fluid.session.scaling.in_time import LOOK_COSTS, InTime
from fluid.sizing.goals import format_duration
from fluid.trialgroup import TrialState

_log = logger_of("fluid.session")

#: Seconds between two looks at how a group stands, at least: at most so many, and so large a share of the deadline.
_PAUSE_S, _PAUSE_SHARE = 1.0, 0.005
#: Without an event it is looked at again after so large a share of the time left.
_LOOK_SHARE = 0.02
#: What cannot be met is told of again if the earliest end is later by so large a share of the deadline, beyond the time
#: that has passed; the journal is told again of odds that have moved by so much.
_TOLD_AGAIN = 0.25
#: That it cannot be met is said only if the earliest end is later by so large a share of the time left, as forecasts
#: err: the first where its trials were measured before it was submitted.
_MARGINS = 0.1, 0.25
#: Iterations of a group, or trials that have ended, before it is believed that it cannot end in time: the first one
#: often takes far longer, as it loads libraries and data.
_BELIEVED = 2


@dataclass(slots=True, eq=False)
class _GroupInTime:
    """A group whose trials stop at its deadline: implements SweepInTime.

    Attributes:
        state: the engine.
        group_id: the group.
        stop: stops a trial of it after its iteration.
        stopped: those that were.
    """

    state: EngineState
    group_id: str
    stop: Callable[[str], None]
    stopped: set[str] = field(default_factory=set)

    def open_trials(self) -> list[str]:
        """Ids of its trials that have not ended and were not stopped."""
        live = self.state.groups[self.group_id].live.items()
        return [name for name, trial in live if trial.state is not TrialState.STOPPING and name not in self.stopped]

    def cut(self, reason: str, trial_ids: Sequence[str]) -> None:
        """Stops these trials after their iteration."""
        for trial_id in trial_ids:
            self.stopped.add(trial_id)
            self.stop(trial_id)

    def close(self, reason: str, run_on: Sequence[str]) -> None:
        """Stops all trials but these."""
        self.cut(reason, [name for name in self.open_trials() if name not in run_on])


@dataclass(slots=True, eq=False)
class _Due:
    """The deadline of a group.

    Attributes:
        group_id: the group.
        steps: when its steps are, seconds on the clock of the events, and their costs.
        end: its end: what is to have ended by its last step, if it stops then.
        look_at: when to look next at how it stands; ``looked_at`` when that was last, and ``is_stale`` whether
            something has happened since.
        heard: iterations and ends of its trials, as far as they matter.
        known: how it stood at the last look; ``noted`` what the journal knows of that.
        warned: the seconds to the earliest end that the user was warned of; ``None`` while it can be met.
        told: whether the user knows that it was missed.
        expected: whether its trials were measured before it was submitted; ``None`` before the first look.
    """

    group_id: str
    steps: tuple[tuple[float, float], ...]
    end: DeadlineInForce
    look_at: float = -math.inf
    looked_at: float = -math.inf
    is_stale: bool = True
    heard: int = 0
    known: GroupLateness | None = None
    noted: GroupLateness | None = None
    warned: float | None = None
    told: bool = False
    expected: bool | None = None

    def next_step(self, now: float) -> float:
        """When the first step comes that is still ahead; the last one's time if none is."""
        return next((at for at, _ in self.steps if at > now), self.steps[-1][0])


class GroupDeadlines:
    """Follows the deadlines of a session's groups. For the session's thread.

    Args:
        state: the engine.
        inboxes: the groups, by id.
        now: tells the time.
        odds: with which a trial counts as one that ends in time.
        stop: stops a trial of a group after its iteration.
        note: writes to the journal.
    """

    def __init__(
        self,
        state: EngineState,
        inboxes: dict[str, GroupInbox],
        now: Callable[[], float],
        odds: float,
        stop: Callable[[GroupInbox, str], None],
        note: Callable[[NoteLateness], None],
    ) -> None:
        self._state = state
        self._inboxes = inboxes
        self._now = now
        self._in_time = InTime(state, now, odds)
        self._stop = stop
        self._note = note
        self._dues: dict[str, _Due] = {}
        self._took_s = 0.0

    def lateness(self, group_id: str) -> GroupLateness | None:
        """How a group stood at the last look; ``None`` if it has no deadline, or has ended."""
        due = self._dues.get(group_id)
        return None if due is None or not self._state.groups[group_id].open else due.known

    def due_of(self, group_id: str) -> float | None:
        """When a group is to have ended, seconds on the clock of the events; ``None`` without a deadline."""
        due = self._dues.get(group_id)
        return None if due is None else due.end.at

    # -- what happens --------------------------------------------------------------------------------------

    def heard(self, events: Iterable[Event], commands: Iterable[Command]) -> None:
        """Takes note of new groups, of trials that came and went, and of iterations."""
        for event in events:
            if isinstance(event, (GroupSubmitted, GroupRecovered)) and event.terms.deadline is not None:
                self._dues[event.group_id] = self._due(event.group_id, event.at, event.terms.deadline)
        if not self._dues:
            return
        if any(isinstance(event, (GroupSubmitted, GroupRecovered, TrialsAdded, BudgetExtended)) for event in events):
            self._look_anew()
        for command in commands:
            if isinstance(command, (Report, ReportEnd)) and (due := self._dues.get(command.group_id)) is not None:
                due.heard += command.count if isinstance(command, Report) else 1
                due.is_stale |= due.heard <= _BELIEVED or due.known is None or due.known.odds is None
            if isinstance(command, ReportEnd):
                self._look_anew()

    def _look_anew(self) -> None:
        for due in self._dues.values():
            due.is_stale = True
            due.end.look_at = -math.inf

    def _due(self, group_id: str, at: float, deadline: GroupDeadline) -> _Due:
        steps = tuple((at - deadline.passed + seconds, cost) for seconds, cost in deadline.steps)
        end = DeadlineInForce(steps[-1][0], deadline.steps[-1][0])
        if deadline.on_miss == "stop":
            end.sweep = _GroupInTime(self._state, group_id, partial(self._stop, self._inboxes[group_id]))
        return _Due(group_id, steps, end)

    # -- looks ---------------------------------------------------------------------------------------------

    def act(self, now: float) -> float | None:
        """Looks at groups if it is time to; returns when to be called again at the latest, if ever."""
        if not self._dues:
            return None
        times = []
        for due in list(self._dues.values()):
            group = self._state.groups[due.group_id]
            if group.open and now >= self._next_at(due):
                self._look(due, now)
            if group.open:
                self._in_time.look(due.end, now)
            if due.end.sweep is not None and (not group.open or now >= due.end.at):
                self._tell_stopped(due)
            if group.open:  # Else trials that are added wake the session.
                times += [self._next_at(due)] + ([] if due.end.sweep is None else [due.end.look_at])
        return min(times, default=None)

    def _next_at(self, due: _Due) -> float:
        """When to look at how a group stands next."""
        pause = max(min(_PAUSE_S, _PAUSE_SHARE * due.end.seconds), LOOK_COSTS * self._took_s)
        step = due.next_step(due.looked_at)
        if step <= due.looked_at:  # It was missed: nothing changes that.
            return due.looked_at + pause if due.is_stale and not due.told else math.inf
        at = due.looked_at + (pause if due.is_stale else max(_PAUSE_S, _LOOK_SHARE * (step - due.looked_at)))
        return min(max(at, due.looked_at + pause), step)

    def _look(self, due: _Due, now: float) -> None:
        """Looks at how a group stands, and tells what is new."""
        found = self._state.lateness(due.group_id, now)
        due.looked_at, due.is_stale = now, False
        if found is not None and due.expected is None:
            due.expected = found.odds is not None and not found.missed
        due.known = found = None if found is None else self._judged(due, found, now)
        self._took_s = self._now() - now
        if found is None:
            return
        self._write(due, found, now)
        if found.missed:
            self._tell_missed(due)
        else:
            self._tell(due, found, now)

    def _judged(self, due: _Due, found: GroupLateness, now: float) -> GroupLateness:
        """How a group stands, where a deadline counts as one that cannot be met only if that is beyond doubt."""
        if found.can_be_met is not False or found.missed:
            return found
        left = due.next_step(now) - now
        is_late = found.earliest_s is not None and found.earliest_s > (1.0 + _MARGINS[not due.expected]) * left
        is_believed = bool(due.expected) or due.heard >= _BELIEVED
        return found if is_late and is_believed else replace(found, can_be_met=None)

    def _write(self, due: _Due, found: GroupLateness, now: float) -> None:
        """Tells the journal what is new."""
        noted = due.noted
        if found.odds is None:
            return
        if noted is not None and noted.odds is not None:
            alike = (noted.can_be_met, noted.missed) == (found.can_be_met, found.missed)
            if alike and abs(noted.odds - found.odds) < _TOLD_AGAIN:
                return
        due.noted = found
        left = due.next_step(now) - now
        self._note(NoteLateness(due.group_id, now, left, found.odds, found.earliest_s, found.can_be_met, found.missed))

    def _tell_missed(self, due: _Due) -> None:
        """Says that a group runs on after its deadline."""
        if due.told or due.end.sweep is not None or self._tells_itself(due):
            return
        due.told = True
        text = "%r has missed its deadline of %s: it runs on, and gives way to groups that can meet theirs"
        _log.warning(text, self._name(due), format_duration(due.end.seconds))

    def _tell_stopped(self, due: _Due) -> None:
        """Says how many trials were stopped by a deadline."""
        sweep = due.end.sweep
        if due.told or not isinstance(sweep, _GroupInTime) or not sweep.stopped:
            return
        due.told = True
        number, trials = len(sweep.stopped), len(self._state.groups[due.group_id].trial_ids)
        were = "trial was" if trials == 1 else "trials were"
        _log.warning("%r: %s: %d of %d %s stopped", self._name(due), due.end.reason, number, trials, were)

    def _tell(self, due: _Due, found: GroupLateness, now: float) -> None:
        """Warns the user at once if a deadline cannot be met."""
        at = due.next_step(now)
        if found.can_be_met:
            if due.warned is not None:
                due.warned = None
                left = format_duration(at - now)
                _log.warning("the deadline of %r in %s can be met after all", self._name(due), left)
            return
        if found.can_be_met is None or found.earliest_s is None:
            return
        if due.warned is not None and found.earliest_s - due.warned < _TOLD_AGAIN * due.end.seconds:
            return
        due.warned = found.earliest_s
        text = "the deadline of %r in %s cannot be met with %s: if it were first on all devices, it would end in %s; %s"
        then = "what has not ended then is stopped" if due.end.sweep is not None else ""
        _log.warning(
            text,
            *(self._name(due), format_duration(at - now), f"{CAN_MEET:.0%}", format_duration(found.earliest_s)),
            then or "it gives way to groups that can meet theirs",
        )

    def _name(self, due: _Due) -> str:
        return self._inboxes[due.group_id].group.name

    def _tells_itself(self, due: _Due) -> bool:
        """Whether the group's submitter says what had not ended at the deadline, as a sweep does."""
        return bool(getattr(self._inboxes[due.group_id].listener, "tells_unfinished", False))

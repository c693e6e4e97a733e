"""Drives an engine with a backend, as a session does, and checks the engine's state after every event."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from fluid.backends.base import Backend
from fluid.engine.commands import Command, Notice
from fluid.engine.core import EngineError
from fluid.engine.events import Alarm, DeviceAdded, Event, Tick
from fluid.policies.engine import EngineState
from fluid.testing.validate import validate_owners, validate_state

_Command = TypeVar("_Command", bound=Command)
_Event = TypeVar("_Event", bound=Event)

#: Seconds from one tick to the next where time is real.
_TICK_S = 0.005
#: Virtual seconds after which nothing is to come.
_LONGEST_S = 1e9


class Session:
    """An engine, and a backend that carries out what the engine commands.

    Each event goes to the engine, whose state is checked, and its commands to the backend. Time is the backend's: on a
    virtual clock it jumps to what happens next; else :meth:`step` waits. The engine knows the backend's devices from
    the beginning.

    Args:
        engine: with no device yet.
        backend: with its devices; the caller closes it.
        checked: whether the state is checked after each event, which takes longer than all the rest.
        patience_s: real seconds after which :meth:`run` gives up.

    Attributes:
        engine, backend: as given.
        commands, events: all that the engine said, and all that it was told, in order.

    Example:
        >>> from fluid import Device
        >>> from fluid.backends.simulated import SimulatedBackend, Truth
        >>> from fluid.engine.commands import ReportEnd
        >>> from fluid.engine.events import GroupSubmitted, StopRequested, TrialSpec
        >>> from fluid.planners.portfolio import make_planner
        >>> from fluid.policies.engine import EngineState
        >>> from fluid.testing.play import Session
        >>> backend = SimulatedBackend(lambda trial_id, config: Truth(seconds=2.0), [Device(0)])
        >>> session = Session(EngineState(make_planner("fifo")), backend)
        >>> _ = session.tell(GroupSubmitted(0.0, "group", (TrialSpec("a", budget=10),)))
        >>> session.run(lambda: backend.now() >= 6.0)
        >>> _ = session.tell(StopRequested(backend.now(), "a"))
        >>> session.run()
        >>> [(end.trial_id, str(end.state.value), end.at) for end in session.told(ReportEnd)]
        [('a', 'STOPPED', 8.0)]
    """

    def __init__(
        self, engine: EngineState, backend: Backend, *, checked: bool = True, patience_s: float = 90.0
    ) -> None:
        self.engine, self.backend = engine, backend
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self._checked, self._patience_s = checked, patience_s
        self._is_virtual = backend.is_virtual
        self.tell(*(DeviceAdded(backend.now(), device) for device in backend.devices()))

    def tell(self, *events: Event) -> list[Command]:
        """Tells the engine events of one instant, and the backend what follows.

        Returns:
            What the engine said.

        Raises:
            InvalidFieldError: the engine refuses a request. Nothing has changed.
            EngineError: the engine cannot explain an event, or its state is broken.
        """
        commands = self.engine.handle(*events)
        if self._checked:
            validate_state(self.engine)
            validate_owners(self.engine)
        self.commands += commands
        self.events += events
        self.backend.execute([command for command in commands if not isinstance(command, Notice)])
        return commands

    def told(self, kind: type[_Command]) -> list[_Command]:
        """Returns all commands and notices of a kind so far, in order."""
        return [command for command in self.commands if isinstance(command, kind)]

    def heard(self, kind: type[_Event]) -> list[_Event]:
        """Returns all events of a kind so far, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended."""
        return all(trial.state.ended for trial in self.engine.trials.values())

    def step(self, latest: float = math.inf) -> list[Command]:
        """Waits for what happens next, a tick and an alarm among it, and tells the engine.

        Args:
            latest: until when to wait at most, seconds on the backend's clock.

        Returns:
            What the engine said; nothing where nothing has happened.

        Raises:
            EngineError: nothing is to come on a virtual clock; or as of :meth:`tell`.
        """
        engine, backend, begun = self.engine, self.backend, self.backend.now()
        ticking, alarm_at = engine.wants_tick, math.inf if engine.alarm_at is None else engine.alarm_at
        longest = _LONGEST_S if self._is_virtual else self._patience_s
        if ticking:
            longest = 0.0 if self._is_virtual else _TICK_S
        events = backend.poll(max(0.0, min(longest, alarm_at - begun, latest - begun)))
        if not events and ticking:
            events = [Tick(backend.now())]
        commands = self.tell(*events) if events else []
        if alarm_at <= (begun if events else backend.now()):
            return commands + self.tell(Alarm(backend.now()))
        if not events and self._is_virtual and backend.now() - begun > _LONGEST_S / 2.0:
            raise EngineError(f"nothing is to come, and trials have not ended:\n{self._stories()}")
        return commands

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Goes on until something is so: by default, until every trial has ended.

        Raises:
            EngineError: it takes longer than ``patience_s`` real seconds; or as of :meth:`step`.
        """
        deadline = time.monotonic() + self._patience_s
        while not (self.is_over if until is None else until()):
            if time.monotonic() > deadline:
                raise EngineError(f"it takes more than {self._patience_s:g} s:\n{self._stories()}")
            self.step()

    def _stories(self) -> str:
        trials = [trial for trial in self.engine.trials.values() if not trial.state.ended]
        return "\n".join(f"{trial.trial_id!r} ({trial.state.value}): {list(trial.story)}" for trial in trials)


def play(engine: EngineState, backend: Backend, *events: Event) -> list[Notice]:
    """Tells an engine events, such as groups that are submitted, and lets every trial run to its end.

    Args:
        engine: as of :class:`Session`.
        backend: as of :class:`Session`.
        events: of the beginning.

    Returns:
        What the submitter and the journal were told, in order.

    Raises:
        InvalidFieldError: the engine refuses a request.
        EngineError: the engine's state is broken, or nothing is to come, though a trial has not ended.

    Example:
        >>> from fluid import Device
        >>> from fluid.backends.simulated import SimulatedBackend, Truth
        >>> from fluid.engine.commands import ReportEnd
        >>> from fluid.engine.events import GroupSubmitted, TrialSpec
        >>> from fluid.planners.portfolio import make_planner
        >>> from fluid.policies.engine import EngineState
        >>> from fluid.testing.play import play
        >>> backend = SimulatedBackend(lambda trial_id, config: Truth(seconds=2.0), [Device(0)])
        >>> trials = (TrialSpec("a", budget=3), TrialSpec("b", budget=1))
        >>> told = play(EngineState(make_planner("fifo")), backend, GroupSubmitted(0.0, "group", trials))
        >>> [(notice.trial_id, notice.at) for notice in told if isinstance(notice, ReportEnd)]
        [('a', 6.0), ('b', 8.0)]
    """
    session = Session(engine, backend)
    session.tell(*events)
    session.run()
    return session.told(Notice)

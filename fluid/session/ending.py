"""What a session takes still as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fluid.backends.base import Backend
from fluid.engine.commands import Command, NoteDeviceLost, NoteDrained, Report, ReportEnd, TrialNotice
from fluid.engine.events import IterationDone, TrialSaved
from fluid.errors import FluidError
from fluid.policies.engine import EngineState
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.keeper import Keeper
from fluid.session.listeners import LimitReachedError, ended_early
from fluid.session.notice import NOTICE

#: What counts of all that lanes tell as they end.
_LAST = (IterationDone, TrialSaved)


def take_last(
    backend: Backend,
    state: EngineState,
    withhold: Callable[[list[Command]], list[Command]],
    folder: RunFolder,
    keeper: Keeper,
) -> list[TrialNotice]:
    """Ends the lanes of a session: an iteration that a trial has finished by then counts, but nothing follows from it.

    Args:
        backend, state, folder, keeper: those of the session.
        withhold: takes of the engine's commands what is not to be told here.

    Returns:
        What the groups are to be told.
    """
    events = [event for event in backend.end() if isinstance(event, _LAST)]
    if not events:
        return []
    notices: list[TrialNotice] = [
        one for one in withhold(state.handle(*events)) if isinstance(one, (Report, ReportEnd))
    ]
    folder.journal(events, notices)
    keeper.follow(events, notices)
    return notices


# -- endings -------------------------------------------------------------------------------------
#
# Why a session runs no further trials although the user has not closed it: it was drained, or a limit was reached.


class Endings:
    """Follows whether the session is over. The session's thread writes; any thread may read.

    Args:
        state: the engine.
        folder: the run folder.
        rehearsed: whether the session is rehearsed, and so cannot be resumed.

    Attributes:
        reason: why the session is drained.
        drained: says so once it has been; ``None`` before.
    """

    def __init__(self, state: EngineState, folder: Path, *, rehearsed: bool) -> None:
        self._state = state
        self._folder = folder
        self._rehearsed = rehearsed
        self.reason = "the session was drained"
        self.drained: LimitReachedError | None = None
        #: Why the last device was given up; empty where none was.
        self._given_up = ""

    def look(self, commands: Iterable[Command]) -> bool:
        """Takes what the engine says; returns whether the session has been drained."""
        for command in commands:
            if isinstance(command, NoteDeviceLost):
                self._given_up = command.reason
            if isinstance(command, NoteDrained) and command.device_id is None:
                unfinished = sum(group.open for group in self._state.groups.values())
                self.drained = LimitReachedError(
                    self.reason,
                    self._folder,
                    unfinished=unfinished,
                    unsaved=command.unsaved,
                    rehearsed=self._rehearsed,
                )
                return True
        return False

    @property
    def over(self) -> LimitReachedError | None:
        """Says why no trial will run any more; ``None`` while trials may.

        A notice of preemption drains, too. Until the main thread has heard of it, that is what ends the program.
        """
        return None if NOTICE.responds else self.drained

    def require_open(self) -> None:
        """Refuses work that would never be done.

        Raises:
            LimitReachedError: the session was drained.
        """
        if (over := self.over) is not None:
            raise ended_early(over, "")

    def require_devices(self) -> None:
        """Refuses a group none of whose trials could run.

        Raises:
            FluidError: all devices were given up, and none come by themselves.
        """
        if self._given_up and not self._state.devices and not self._state.most_devices:
            raise FluidError(f"no device is left: the last one was given up: {self._given_up}; add_device() adds one")

"""How a session ends: what it takes still, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

from fluid._clock_hold import ClockHold
from fluid.backends.base import Backend
from fluid.backends.ending import EndingBackend
from fluid.engine.commands import Report, ReportEnd, TrialNotice
from fluid.engine.events import BudgetExtended, GroupSubmitted, IterationDone, TrialsAdded, TrialSaved
from fluid.engine.state import EngineState
from fluid.session.keeper import Keeper
from fluid.session.limit_reached import LimitReachedError
from fluid.session.run_folder import RunFolder

#: What a session refuses that has met its limit.
WORK = (GroupSubmitted, TrialsAdded, BudgetExtended)
#: What counts of all that lanes tell as they end.
_LAST = (IterationDone, TrialSaved)


def take_last(backend: Backend, state: EngineState, folder: RunFolder, keeper: Keeper) -> list[TrialNotice]:
    """Ends the lanes of a session: an iteration that a trial has finished by then counts, but nothing follows from it.

    Returns:
        What the groups are to be told.
    """
    events = (
        [event for event in backend.end() if isinstance(event, _LAST)] if isinstance(backend, EndingBackend) else []
    )
    if not events:
        return []
    notices: list[TrialNotice] = [one for one in state.handle(*events) if isinstance(one, (Report, ReportEnd))]
    folder.journal(events, notices)
    keeper.follow(events, notices)
    return notices


def limit_reached(
    reason: str, state: EngineState, folder: RunFolder, unsaved: Sequence[str], hold: ClockHold
) -> LimitReachedError:
    """Why a session ends that has met its limit, and what it leaves."""
    left = sum(group.open for group in state.groups.values())
    return LimitReachedError(reason, folder.path, unfinished=left, unsaved=unsaved, rehearsed=hold.is_virtual)

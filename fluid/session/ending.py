"""What a session takes still as it ends."""

from __future__ import annotations

from fluid.backends.base import Backend, EndingBackend
from fluid.engine.commands import Report, ReportEnd, TrialNotice
from fluid.engine.engine import EngineState
from fluid.engine.events import IterationDone, TrialSaved
from fluid.session.keeper import Keeper
from fluid.session.run_folder import RunFolder

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

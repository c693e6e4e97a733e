"""Tells, as a session is resumed, of trials whose newest checkpoint is nowhere: the machine restarted, for example."""

from __future__ import annotations

from collections.abc import Iterable

from fluid._logs import logger_of
from fluid.backends.hosts.folders import HERE
from fluid.engine.commands import ReportSetBack
from fluid.engine.events import GroupRecovered
from fluid.results.journal import Recovered

#: Most trials that the warning names.
_MOST_TOLD = 20
_log = logger_of("fluid.session")


def lost_checkpoints(recovered: Recovered, events: Iterable[GroupRecovered]) -> list[ReportSetBack]:
    """Finds, and warns of, trials that go on from an earlier state than that of the checkpoint which the journal names.

    Args:
        recovered: the session as its journal tells it.
        events: as the session goes on.
    """
    lost: list[ReportSetBack] = []
    for event in events:
        for history in event.trials:
            trial_id, now = history.trial.trial_id, history.checkpoint
            known = recovered.groups.get(event.group_id, {}).get(trial_id)
            was = None if known is None or known.ended is not None else known.checkpoint
            if was is None or was.iteration > history.reported or (now is not None and now.iteration >= was.iteration):
                continue
            where = "" if was.host == HERE else f" of {was.host}"
            reason = f"the checkpoint {was.path}{where} is gone"
            lost.append(
                ReportSetBack(
                    trial_id,
                    event.group_id,
                    at=event.at,
                    lost=was.iteration,
                    checkpoint=now,
                    reason=reason,
                    cannot_load=False,
                )
            )
    if lost:
        shown = [f"{one.trial_id!r} from iteration {_iteration(one)}, not {one.lost}" for one in lost[:_MOST_TOLD]]
        more = [f"{len(lost) - _MOST_TOLD:,} more"] if len(lost) > _MOST_TOLD else []
        _log.warning("the newest checkpoints of these trials are gone, and they go on: %s", ", ".join([*shown, *more]))
    return lost


def _iteration(report: ReportSetBack) -> int:
    return 0 if report.checkpoint is None else report.checkpoint.iteration

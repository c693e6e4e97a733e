"""Requests of trials to the driver: a trial's code asks its submitter, in the middle of an iteration, and waits.

The engine passes a request to the submitter and the answer to the lane. It does not look at them. A trial that waits
for an answer does not hang.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fluid.engine.commands import Command, TrialNotice
from fluid.engine.core import SessionState
from fluid.engine.events import Event
from fluid.trialgroup import TrialState

#: States in which a trial's requests are refused: it has ended for good, or will at the end of its iteration.
_OVER = frozenset({TrialState.STOPPING, TrialState.STOPPED, TrialState.FAILED})


@dataclass(frozen=True, slots=True)
class TrialAsked(Event):
    """A trial's code asks the submitter, and waits in its lane for the answer.

    Attributes:
        request_id: number of the request, unique in the lane.
        payload: the request, pickled.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    request_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestAnswered(Event):
    """The submitter answers a request.

    Attributes:
        lane_id: the lane that asked.
        request_id: the number of the request.
        payload: the answer, or, if ``failed``, the exception to raise in the trial; pickled.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    request_id: int
    payload: bytes
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Answer(Command):
    """Give a lane the answer to a request of a trial there. There is no answer to this.

    Attributes:
        payload: as of the :class:`RequestAnswered`; ``None`` if the trial has ended, so that its requests are refused.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    request_id: int
    payload: bytes | None
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest(TrialNotice):
    """The trial asks its submitter, who is to answer with a :class:`RequestAnswered`."""

    lane_id: int
    request_id: int
    payload: bytes


class Requests:
    """Passes requests of trials to their submitters, and the answers to the lanes."""

    def __init__(self, core: SessionState) -> None:
        self._core = core

    def asked(self, event: TrialAsked) -> None:
        """Passes a request to the submitter; refuses that of a trial that has ended, or has left that lane."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        here = trial is not None and event.lane_id in (*trial.placement.hosts, trial.residence.lane)
        if trial is None or trial.state in _OVER or not here:
            answer = Answer(event.trial_id, event.lane_id, request_id=event.request_id, payload=None, failed=True)
            core.commands.append(answer)
            return
        place = trial.placement
        if place.launched:
            place.asking |= {(event.lane_id, event.request_id)}
        core.commands.append(
            ReportRequest(
                trial_id=trial.trial_id,
                group_id=trial.group_id,
                lane_id=event.lane_id,
                request_id=event.request_id,
                payload=event.payload,
            )
        )

    def answered(self, event: RequestAnswered) -> None:
        """Passes an answer to the lane that asked, if that is still there; the trial's time goes on from now."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        key = (event.lane_id, event.request_id)
        if trial is not None and key in trial.placement.asking:
            trial.placement.asking -= {key}
            core.watching.answered(trial, core.now)
        if event.lane_id in core.lanes:
            core.commands.append(
                Answer(
                    event.trial_id,
                    event.lane_id,
                    request_id=event.request_id,
                    payload=event.payload,
                    failed=event.failed,
                )
            )

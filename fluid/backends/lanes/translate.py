"""One command of the engine to one message for a lane, and one message of a lane to one event for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fluid.engine.commands import Call, Pause, RunIteration, Save, StartTrial, StopTrial
from fluid.engine.events import (
    Checkpoint,
    Event,
    Failure,
    FusionLimited,
    IterationDone,
    LaneMeasured,
    LaneReady,
    LaneSpent,
    PausePurpose,
    Restoring,
    SavabilityChanged,
    StateMeasured,
    TrialAsked,
    TrialCalled,
    TrialFailed,
    TrialNotKept,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSetBack,
    TrialStarted,
)
from fluid.keeping import KeepRule
from fluid.lane import protocol as devices
from fluid.lane import protocol as limits
from fluid.lane import protocol as m
from fluid.lane.protocol import ResidentNotKept
from fluid.lane.resident import ResidentSavability
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import NO_METRICS
from fluid.trial_fields import ANY_PROCESS, TrialProcess


def start_message(
    command: StartTrial,
    key: int,
    config: bytes,
    membership: m.Membership | None = None,
    source: tuple[str, int] | None = None,
    *,
    process: TrialProcess = ANY_PROCESS,
    keep: KeepRule | None = None,
) -> m.StartResident:
    """Returns the message that starts a trial in a lane.

    Args:
        command: what the engine wants.
        key: of the trial's trainable.
        config: the trial's pickled config.
        membership: for a trial in several lanes, of which the lane is to be a member.
        source: where the checkpoints of the machine that has the trial's are served; ``None`` if it is the lane's own.
        process: what the trial asks of its process.
        keep: which checkpoints of the trial outlive the run; ``None`` if none do.
    """
    checkpoint = command.checkpoint
    return m.StartResident(
        command.trial_id,
        key,
        config,
        command.iterations,
        checkpoint=None if checkpoint is None else checkpoint.path,
        iteration=0 if checkpoint is None else checkpoint.iteration,
        membership=membership,
        source=source,
        process=process,
        keep=keep,
        limit_bytes=command.limit_bytes,
    )


def message_of(
    command: RunIteration | Pause | Save | StopTrial | Call,
) -> m.RunResident | m.PauseResident | m.SaveResident | m.ReleaseResident | m.CallResident:
    """Returns the message by which a lane carries out a command for a trial that it has."""
    if isinstance(command, RunIteration):
        return m.RunResident(command.trial_id, command.iterations)
    if isinstance(command, Pause):
        return m.PauseResident(command.trial_id, may_move=command.purpose is PausePurpose.PREEMPT)
    if isinstance(command, Save):
        return m.SaveResident(command.trial_id, command.drop, command.durable, command.keep)
    if isinstance(command, Call):
        return m.CallResident(command.trial_id, command.call_id, command.method, command.payload)
    return m.ReleaseResident(command.trial_id, command.keep)


def to_event(message: Any, lane_id: int, host: str, at: float) -> Event:
    """Returns the event that a lane's message tells of.

    Args:
        message: one of those from a lane to the driver.
        lane_id: the lane that sent it.
        host: name of the lane's machine.
        at: when, on the driver's clock, seconds.
    """
    return EVENTS[type(message)](message, lane_id, host, at)


def not_before(events: Sequence[Event], earliest: float) -> list[Event]:
    """Returns events, which are in order of time, with times before ``earliest`` set to that; in runs, too."""
    return [_not_before(event, earliest) for event in events]


def _not_before(event: Event, earliest: float) -> Event:
    if isinstance(event, IterationDone) and event.run is not None and event.run.at[0] < earliest:
        # The iteration before the run may have been set to it, too: the iterations of a trial stay in order.
        event = replace(event, run=event.run._replace(at=tuple([max(at, earliest) for at in event.run.at])))
    return event if event.at >= earliest else replace(event, at=earliest)


def _started(message: m.ResidentStarted, lane_id: int, host: str, at: float) -> TrialStarted:
    return TrialStarted(
        at,
        message.trial_id,
        lane_id,
        iteration=message.iteration,
        seconds=message.seconds,
        fusion_key=message.fusion_key,
        restoring=None if message.restored is None else Restoring(*message.restored),
    )


def _iterated(message: m.ResidentIterated, lane_id: int, host: str, at: float) -> IterationDone:
    run, later = message.run, at - message.at
    if run is not None and later:
        run = run._replace(at=tuple(each + later for each in run.at))
    return IterationDone(
        at,
        message.trial_id,
        lane_id,
        iteration=message.iteration,
        seconds=message.seconds,
        metrics=message.metrics or NO_METRICS,
        memory=None if message.memory is None else MemoryNeed(*message.memory),
        finished=message.finished,
        busy=message.busy,
        rows=message.rows,
        settled=message.settled,
        run=run,
    )


def _paused(message: m.ResidentPaused, lane_id: int, host: str, at: float) -> TrialPaused:
    purpose = PausePurpose.PREEMPT if message.may_move else PausePurpose.RESIZE
    return TrialPaused(at, message.trial_id, lane_id, iteration=message.iteration, purpose=purpose)


def _saved(message: m.ResidentSaved, lane_id: int, host: str, at: float) -> TrialSaved:
    checkpoint = Checkpoint(message.iteration, message.path, host=host, in_memory=message.in_memory)
    return TrialSaved(
        at,
        message.trial_id,
        lane_id,
        checkpoint,
        dropped=message.dropped,
        seconds=message.seconds,
        kept=message.kept,
    )


def _set_back(message: m.ResidentSetBack, lane_id: int, host: str, at: float) -> TrialSetBack:
    checkpoint = None
    if message.path is not None:
        checkpoint = Checkpoint(message.iteration, message.path, host=host, in_memory=message.in_memory)
    return TrialSetBack(
        at,
        message.trial_id,
        lane_id,
        checkpoint=checkpoint,
        reason=message.reason,
        cannot_load=message.cannot_load,
    )


def _failed(message: m.ResidentFailed, lane_id: int, host: str, at: float) -> TrialFailed:
    return TrialFailed(at, message.trial_id, lane_id, _failure(message))


def _called(message: m.ResidentCalled, lane_id: int, host: str, at: float) -> TrialCalled:
    failure = None if message.raised is None else _failure(message.raised)
    return TrialCalled(at, message.trial_id, lane_id, call_id=message.call_id, result=message.result, failure=failure)


def _failure(raised: m.ResidentFailed | m.Raised) -> Failure:
    return Failure(raised.kind, raised.message, traceback=raised.traceback, exception=raised.exception)


EVENTS: dict[type, Callable[[Any, int, str, float], Event]] = {
    m.LaneWarm: lambda x, lane_id, host, at: LaneReady(at, lane_id, x.own_bytes, x.seconds),
    devices.OwnBytesChanged: lambda x, lane_id, host, at: LaneMeasured(at, lane_id, x.own_bytes),
    devices.ProcessSpent: lambda x, lane_id, host, at: LaneSpent(at, lane_id, x.reason),
    devices.HeldAtRest: lambda x, lane_id, host, at: StateMeasured(at, x.trial_id, lane_id, x.held_bytes),
    m.ResidentStarted: _started,
    m.ResidentSetBack: _set_back,
    ResidentSavability: lambda x, lane_id, host, at: SavabilityChanged(
        at, x.trial_id, lane_id, can_save=x.can_save, reason=x.reason, refuses=x.refuses
    ),
    m.ResidentIterated: _iterated,
    limits.RowsLimited: lambda x, lane_id, host, at: FusionLimited(
        at, x.trial_id, lane_id, rows=x.rows, reason=x.reason
    ),
    m.ResidentPaused: _paused,
    m.ResidentSaved: _saved,
    ResidentNotKept: lambda x, lane_id, host, at: TrialNotKept(at, x.trial_id, iteration=x.iteration, reason=x.reason),
    m.ResidentReleased: lambda x, lane_id, host, at: TrialReleased(at, x.trial_id, lane_id),
    m.ResidentFailed: _failed,
    m.ResidentCalled: _called,
    m.ResidentAsked: lambda x, lane_id, host, at: TrialAsked(
        at, x.trial_id, lane_id, request_id=x.request_id, payload=x.payload
    ),
}

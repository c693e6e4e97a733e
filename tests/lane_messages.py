"""The commands and messages of a driver for lane 0, as tests send them."""

from typing import Any

from fluid.engine.commands import (
    Answer,
    Call,
    Fork,
    LimitMemory,
    LimitRows,
    Pause,
    RunIteration,
    Save,
    StartTrial,
    StopLane,
)
from fluid.engine.commands import StopTrial as Stop
from fluid.engine.events import Checkpoint, PausePurpose
from fluid.lane.protocol import SetUpTrial

HERE = (0,)


def set_up(
    trial_id: str,
    key: int,
    config: Any,
    iterations: int,
    checkpoint: Checkpoint | None = None,
    limit_bytes: float | None = None,
    must_restore: bool = False,
    **facts: Any,
) -> SetUpTrial:
    start = StartTrial(
        trial_id,
        HERE,
        iterations=iterations,
        checkpoint=checkpoint,
        limit_bytes=limit_bytes,
        must_restore=must_restore,
    )
    return SetUpTrial(start, key, config, **facts)


def run(trial_id: str, iterations: int) -> RunIteration:
    return RunIteration(trial_id, HERE, iterations)


def pause(trial_id: str, may_move: bool = False) -> Pause:
    return Pause(trial_id, HERE, purpose=PausePurpose.PREEMPT if may_move else PausePurpose.RESIZE)


def save(trial_id: str, drop: bool, durable: bool = False, keep: bool = False) -> Save:
    return Save(trial_id, HERE, drop, durable, keep)


def release(trial_id: str, keep: bool = False) -> Stop:
    return Stop(trial_id, HERE, keep)


def call(trial_id: str, call_id: int, method: str, payload: bytes) -> Call:
    return Call(trial_id, HERE, call_id=call_id, method=method, payload=payload)


def limit(trial_id: str, limit_bytes: float | None) -> LimitMemory:
    return LimitMemory(trial_id, HERE, limit_bytes)


def rows(most: int) -> LimitRows:
    return LimitRows(0, most)


def answer(trial_id: str, request_id: int, payload: bytes | None, failed: bool = False) -> Answer:
    return Answer(trial_id, 0, request_id=request_id, payload=payload, failed=failed)


def shut_down() -> StopLane:
    return StopLane(0)


def fork(trial_id: str, child: str, at: int | None = None) -> Fork:
    return Fork(trial_id, HERE, child=child, at=at)

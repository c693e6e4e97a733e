"""A trial's states: which may follow which, and the state diagram drawn from that table.

:meth:`fluid.engine.core.SessionState.set_state` is the one place where a trial changes its state, and it checks this
table. docs/architecture.md shows the diagram that :func:`state_diagram` draws.
"""

from __future__ import annotations

from typing import NamedTuple

from fluid.trialgroup import TrialState


class Transition(NamedTuple):
    """One legal change of state, and when it happens."""

    before: TrialState
    after: TrialState
    reason: str


TRANSITIONS = (
    Transition(TrialState.QUEUED, TrialState.STARTING, "placed on devices"),
    Transition(TrialState.QUEUED, TrialState.PAUSED, "paused while it waited"),
    Transition(TrialState.QUEUED, TrialState.STOPPED, "stopped while it waited"),
    Transition(TrialState.QUEUED, TrialState.FAILED, "fits on no device, or no lane can be started"),
    Transition(TrialState.STARTING, TrialState.RUNNING, "set up, restored or resumed"),
    Transition(TrialState.STARTING, TrialState.PAUSED, "paused before it ran"),
    Transition(TrialState.STARTING, TrialState.QUEUED, "failed, or lost a lane or its state, tried again"),
    Transition(TrialState.STARTING, TrialState.STOPPING, "stopped after its lanes were told to start it"),
    Transition(TrialState.STARTING, TrialState.STOPPED, "stopped before its lanes were told to start it"),
    Transition(TrialState.STARTING, TrialState.FAILED, "failed too often"),
    Transition(TrialState.RUNNING, TrialState.RESIZING, "new width planned, or a lane lost"),
    Transition(TrialState.RUNNING, TrialState.PAUSED, "preempted, or paused"),
    Transition(TrialState.RUNNING, TrialState.QUEUED, "failed or lost its lane, goes on from its checkpoint"),
    Transition(TrialState.RUNNING, TrialState.STOPPING, "stop requested"),
    Transition(TrialState.RUNNING, TrialState.DONE, "budget used up"),
    Transition(TrialState.RUNNING, TrialState.FAILED, "failed too often"),
    Transition(TrialState.RESIZING, TrialState.RUNNING, "resized, or the resize was called off"),
    Transition(TrialState.RESIZING, TrialState.PAUSED, "failed or lost its lanes after the user had paused it"),
    Transition(TrialState.RESIZING, TrialState.QUEUED, "failed or lost its lanes, goes on from its checkpoint"),
    Transition(TrialState.RESIZING, TrialState.STOPPING, "stop requested"),
    Transition(TrialState.RESIZING, TrialState.FAILED, "failed too often"),
    Transition(TrialState.PAUSED, TrialState.QUEUED, "goes on from the state it kept, or resumed by the user"),
    Transition(TrialState.PAUSED, TrialState.STOPPED, "stopped while the user had it paused"),
    Transition(TrialState.PAUSED, TrialState.FAILED, "its state could not be saved"),
    Transition(TrialState.STOPPING, TrialState.STOPPED, "left its last lane"),
    Transition(TrialState.STOPPING, TrialState.FAILED, "left its last lane, and has failed as its submitter judges"),
    Transition(TrialState.DONE, TrialState.QUEUED, "extended, or a call needs its state"),
    Transition(TrialState.DONE, TrialState.STOPPED, "stopped after it was done"),
    Transition(TrialState.DONE, TrialState.FAILED, "has failed as its submitter judges"),
)

#: (before, after) of every legal change of state.
LEGAL = frozenset((transition.before, transition.after) for transition in TRANSITIONS)


def state_diagram() -> str:
    """Draws the table as a Mermaid state diagram.

    Example:
        >>> print(state_diagram().splitlines()[1].strip())
        [*] --> QUEUED: submitted
    """
    lines = ["stateDiagram-v2", f"    [*] --> {TrialState.QUEUED.value}: submitted"]
    lines += [f"    {before.value} --> {after.value}: {reason}" for before, after, reason in TRANSITIONS]
    lines += [f"    {state.value} --> [*]" for state in TrialState if state.ended]
    return "\n".join(lines) + "\n"

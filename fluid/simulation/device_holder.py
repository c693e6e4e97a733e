"""What holds the devices of a simulation, asking for some and giving others back, and how long they were busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fluid.backends.simulated import SimulatedBackend
from fluid.engine.commands import Command
from fluid.engine.engine import EngineState
from fluid.engine.events import Event
from fluid.planners.rollout import Segment


class DeviceHolder(Protocol):
    """Asks for devices and gives them back while a scenario runs.

    Attributes:
        provision_s: seconds from asking for a device until it comes.
    """

    provision_s: float

    @property
    def next_at(self) -> float:
        """When it wants to act next, seconds; infinite for never."""
        ...

    def begin(self, state: EngineState, backend: SimulatedBackend) -> None:
        """Takes the engine to read, and the backend to ask for devices."""
        ...

    def requested(self, trial: int, trial_id: str, granted: int, bracket: int, predicted: float) -> None:
        """A trial was requested, up to so many iterations, which are predicted to take these seconds each."""
        ...

    def ended(self, trial: int, stopped: bool) -> None:
        """A trial has run as far as requested, or was stopped early."""
        ...

    def heard(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Takes what happened, and what the engine answered."""
        ...

    def act(self, now: float) -> list[Event]:
        """Decides at a time that it wanted; returns what the engine is to be told."""
        ...


def busy_device_seconds(segments: list[Segment]) -> float:
    """Device-seconds in which at least one trial held the device."""
    by_device: dict[int, list[tuple[float, float]]] = {}
    for segment in segments:
        for device in segment.devices:
            by_device.setdefault(device, []).append((segment.start, segment.end))
    busy = 0.0
    for stretches in by_device.values():
        reached = 0.0
        for start, end in sorted(stretches):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    return busy

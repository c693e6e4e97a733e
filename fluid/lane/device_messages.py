"""What a lane tells the driver about its device and its process."""

from __future__ import annotations

from typing import NamedTuple


class HeldAtRest(NamedTuple):
    """A resident that does not run holds so many bytes on the device, once what it had freed was given back."""

    at: float
    trial_id: str
    held_bytes: float


class LaneWarming(NamedTuple):
    """The lane begins to make its GPU ready; LaneWarm or LaneUnusable follows, unless it hangs in the driver."""

    at: float


class LaneUnusable(NamedTuple):
    """The lane cannot use its device and ends; sent instead of LaneWarm.

    Attributes:
        reason: the error, in one line.
        position: which of a gang's devices, from 0.
        may_pass: whether another process may be able to use it soon, as an MPS server was not ready.
    """

    at: float
    reason: str
    position: int = 0
    may_pass: bool = False


class ModulesLoaded(NamedTuple):
    """A trial has made the lane load modules that it did not have when it was started."""

    at: float
    modules: tuple[str, ...]


class ProcessSpent(NamedTuple):
    """A trial that has left has changed the process for good: no further one should come.

    Attributes:
        reason: what stays, in one line.
    """

    at: float
    reason: str


class OwnBytesChanged(NamedTuple):
    """The lane takes notably more or less device memory for itself than it told before."""

    at: float
    own_bytes: float

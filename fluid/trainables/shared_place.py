"""Where the process of a lane keeps data that it shares with the other lanes of its host; see :mod:`fluid.shared_data`.

The lane sets the place when it starts. A process that is no lane has none.
"""

from __future__ import annotations

from typing import NamedTuple


class SharedPlace(NamedTuple):
    """The folders of a host for shared data. The host deletes them when its session ends.

    Attributes:
        folders: in host memory, if the host has any, then on disk.
        reserved_bytes: bytes of host memory that another program has reserved and may not use yet, as Ray's object
            store.
    """

    folders: tuple[str, ...]
    reserved_bytes: float = 0.0


class _PlaceInForce:
    """The place of this process; ``None`` outside a lane."""

    place: SharedPlace | None = None


def shared_place() -> SharedPlace | None:
    """Returns the place of this process; ``None`` outside a lane."""
    return _PlaceInForce.place


def set_shared_place(place: SharedPlace | None) -> None:
    """Sets the place of this process."""
    _PlaceInForce.place = place

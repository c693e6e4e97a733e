"""Making room: which running trials pause for an urgent one, and on which devices it then starts.

On each device, trials are paused in ascending order of the progress that is lost per byte that they give back, as in
Andes (Liu et al., Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services, 2024),
until the newcomer fits; then those that turn out not to be needed stay. Among devices, the one counts on which least
progress is lost in all, and of equal ones that which is free first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple


class RoomMate(NamedTuple):
    """A trial on a device.

    Attributes:
        row: the caller's number of the trial; a wide one is on several devices.
        gain: weighted progress that is lost in each second that it pauses.
        size: bytes that it takes or, where those are not known of all trials there, its share of a device.
        freed: bytes that are free once it has paused and keeps its state there.
        state: further bytes that are free if its state is fetched away.
        most: trials that it tolerates on its device, itself included.
        wait: predicted seconds until it has left.
        yields: whether it may be paused.
        leaves: whether it leaves in any case.
        shares: whether the newcomer may run beside it.
    """

    row: int
    gain: float
    size: float = 1.0
    freed: float = 0.0
    state: float = 0.0
    most: int = 1
    wait: float = 0.0
    yields: bool = True
    leaves: bool = False
    shares: bool = True


class Room(NamedTuple):
    """A device as the newcomer sees it.

    Attributes:
        device: its index.
        residents: the trials there.
        most: trials that the newcomer tolerates there, itself included.
        need: bytes that it needs there; 0 if unknown.
        free: bytes that are free now, negative if too many are taken; ``None`` where memory does not bound packing.
        kept: further bytes that are free once states kept there were fetched away, which only a newcomer alone causes.
        pending: whether memory is about to be freed there, or trials are about to leave.
        cap: most trials there, whatever they tolerate.
        host: name of its machine.
        peaks: rows that have left -> ephemeral bytes that the others and the newcomer have at once, where trials take
            turns in lanes; ``free``, ``freed`` and ``need`` are without ephemeral bytes then. ``None`` elsewhere.
    """

    device: int
    residents: Sequence[RoomMate]
    most: int = 1
    need: float = 0.0
    free: float | None = None
    kept: float = 0.0
    pending: bool = False
    cap: float = math.inf
    host: str = ""
    peaks: Callable[[Collection[int]], float] | None = None


class Clearing(NamedTuple):
    """What makes room for a newcomer.

    Attributes:
        loss: weighted progress that is lost in each second, for as long as the newcomer runs.
        wait: predicted seconds until it can start.
        devices: those that it gets.
        rows: the trials to pause, without those that leave anyway.
    """

    loss: float
    wait: float
    devices: tuple[int, ...]
    rows: tuple[int, ...]


def room_on(room: Room) -> Clearing | None:
    """What makes room on one device; ``None`` if nothing does, or it is free now: the newcomer was refused there."""
    pausing = who_pauses(room)
    if pausing is None or not (pausing or _is_pending(room)):
        return None
    loss, wait = _cost(room, pausing, ())
    return Clearing(loss, wait, (room.device,), tuple(each.row for each in pausing))


def choose_rooms(rooms: Sequence[Room], width: int, *, one_host: bool = False) -> Clearing | None:
    """Chooses several devices for a newcomer that needs them at once; at least one of them is not free yet.

    Args:
        rooms: the devices that it may use.
        width: number of devices that it needs.
        one_host: whether they have to be of one machine.

    Returns:
        The choice; ``None`` if no pause makes room.
    """
    if not one_host:
        return _choose(rooms, width)
    by_host: dict[str, list[Room]] = {}
    for room in rooms:
        by_host.setdefault(room.host, []).append(room)
    found = [choice for some in by_host.values() if (choice := _choose(some, width)) is not None]
    return min(found, default=None)


def _choose(rooms: Sequence[Room], width: int) -> Clearing | None:
    gone: dict[int, RoomMate] = {}
    chosen: list[Room] = []
    wait = 0.0
    options = {room.device: (room, pausing) for room in rooms if (pausing := who_pauses(room)) is not None}
    # A wide trial that pauses frees its other devices too: each of those that can be used bears a part of its loss.
    devices_of = Counter(each.row for _, pausing in options.values() for each in pausing)
    while len(chosen) < width:
        if not options:
            return None
        most = width - len(chosen)
        shared = {row: min(most, count) for row, count in devices_of.items()}
        device = min(options, key=lambda device: (*_cost(*options[device], gone, shared), device))
        room, pausing = options.pop(device)
        wait = max(wait, _cost(room, pausing, ())[1])
        chosen.append(room)
        gone |= {each.row: each for each in pausing}
    if not gone and not any(map(_is_pending, chosen)):
        return None
    loss = sum(each.gain for each in gone.values())
    return Clearing(loss, wait, tuple(room.device for room in chosen), tuple(gone))


def _is_pending(room: Room) -> bool:
    return room.pending or any(each.leaves for each in room.residents)


def _cost(
    room: Room, pausing: Collection[RoomMate], gone: Collection[int], shared: Mapping[int, int] | None = None
) -> tuple[float, float]:
    """Progress that is newly lost in each second, and seconds until all have left.

    The loss of a row is divided by the number of devices that ``shared`` has for it.
    """
    by = shared or {}
    loss = sum(each.gain / by.get(each.row, 1) for each in pausing if each.row not in gone)
    leaving = [each.wait for each in room.residents if each.leaves]
    return loss, max([*leaving, *(each.wait for each in pausing)], default=0.0)


def who_pauses(room: Room) -> tuple[RoomMate, ...] | None:
    """The residents of a device that have to pause so that the newcomer fits there; ``None`` if that does not do.

    Empty if it fits once those have left that leave anyway.
    """
    order = sorted(
        (each for each in room.residents if each.yields and not each.leaves),
        key=lambda each: (each.gain / each.size if each.size > 0.0 else math.inf, each.wait, each.row),
    )
    gone: list[RoomMate] = []
    for resident in (None, *order):
        if resident is not None:
            gone.append(resident)
        if _fits(room, {each.row for each in gone}):
            break
    else:
        return None
    for resident in sorted(gone, key=lambda each: -each.gain):
        rest = [each for each in gone if each is not resident]
        if _fits(room, {each.row for each in rest}):
            gone = rest
    return tuple(gone)


def _fits(room: Room, gone: Set[int]) -> bool:
    """Whether the newcomer fits once these, and those that leave anyway, have left."""
    left = [each for each in room.residents if each.leaves or each.row in gone]
    stay = [each for each in room.residents if not (each.leaves or each.row in gone)]
    tolerated = min([room.most, room.cap, *(each.most for each in stay)])
    if stay and (len(stay) + 1 > tolerated or not all(each.shares for each in stay)):
        return False
    if room.free is None:
        return True
    free = room.free + sum(each.freed for each in left)
    if not stay:
        free += room.kept + sum(each.state for each in left)
    if room.peaks is not None:
        free -= room.peaks({each.row for each in left})
    return free >= room.need

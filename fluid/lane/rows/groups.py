"""Which residents of a lane train in one step: those of equal fusion key that have iterations left.

No tensors here, and no PyTorch: :mod:`fluid.lane.rows.steps` has what becomes of these decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid._clock import Clock
from fluid.lane.policy import SWITCH_SLACK_S, ResidentWork, choose
from fluid.lane.resident import ResidentTrial, WorkQueue

#: A pack waits for each of the driver's answers about its rows for this share of its last step, within these limits,
#: seconds; and for all of them for so many times as long. To go without a row costs a further step for that one.
_GATHER_SHARE = 0.1
_SHORTEST_GATHER_S = 0.002
_LONGEST_GATHER_S = 0.1
_GATHER_TIMES = 5


@dataclass(slots=True, eq=False)
class RowGroup:
    """The residents of one fusion key.

    Attributes:
        digest: of the key, equal in all processes.
        trainable: the class.
        most: rows of a step that this lane has found possible.
        is_checked: whether the self-check has found that they can be fused.
        failed_checks: self-checks that have raised.
        packs_of_one: whether a trial by itself may be a pack, where that pays.
        members: its residents.
        packs: by which they train.
    """

    digest: str
    trainable: type
    most: float = math.inf
    is_checked: bool = False
    failed_checks: int = 0
    packs_of_one: bool = True
    members: set[ResidentTrial] = field(default_factory=set)
    packs: list[RowPack] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RowPack:
    """Residents that train in one step as long as they have iterations left.

    Attributes:
        group: of which they are.
        rows: the residents.
        awaited: those of the last step that have run out of iterations, and may be given more.
        seconds: that the last step took.
        ready_at: since when it could step without the awaited ones; ``None`` if it cannot, or was not asked since.
        answered_at: when the last answer about one of them came.
        fused: the :class:`fluid.fused.FusedPack` that has their tensors; ``None`` before their first step.
        fused_rows: the residents in that one, row by row; a resident may be in that of another pack until it steps.
        stepped: those that took the last step.
    """

    group: RowGroup
    rows: list[ResidentTrial] = field(default_factory=list)
    awaited: set[ResidentTrial] = field(default_factory=set)
    seconds: float = 0.0
    ready_at: float | None = None
    answered_at: float = -math.inf
    fused: Any = None
    fused_rows: list[ResidentTrial] = field(default_factory=list)
    stepped: frozenset[ResidentTrial] = frozenset()

    def waits_until(self, now: float) -> float:
        """When it steps without the rows that it still awaits; in the past if there are none. Others are ready."""
        if not self.awaited:
            return -math.inf
        if self.ready_at is None:
            self.ready_at = now
        each = min(_LONGEST_GATHER_S, max(_SHORTEST_GATHER_S, _GATHER_SHARE * self.seconds))
        return min(max(self.ready_at, self.answered_at) + each, self.ready_at + _GATHER_TIMES * each)


class Turn(NamedTuple):
    """What the lane does next.

    Attributes:
        rows: the residents that run one iteration, in one step; none if the lane waits.
        pack: of which they are; ``None`` if there is one, which cannot be fused.
        wait: seconds to wait for messages instead.
    """

    rows: Sequence[ResidentTrial]
    pack: RowPack | None = None
    wait: float = 0.0


class RowGroups:
    """Decides which residents run the next iteration, and which of them do so together.

    Args:
        queue: those with iterations left.
        clock: the lane's.

    Attributes:
        most: rows of a step that the driver allows.
    """

    def __init__(self, queue: WorkQueue, clock: Clock) -> None:
        self.most = math.inf
        self._queue = queue
        self._clock = clock
        self._groups: dict[tuple[str, type], RowGroup] = {}
        self._group_of: dict[ResidentTrial, RowGroup] = {}

    def add(self, resident: ResidentTrial, digest: str, trainable: type) -> None:
        """Adds a resident that can be fused."""
        group = self._groups.setdefault((digest, trainable), RowGroup(digest, trainable))
        group.members.add(resident)
        self._group_of[resident] = group

    def remove(self, resident: ResidentTrial) -> None:
        """Removes a resident, which leaves the lane or may have changed; any resident may be given."""
        self.await_no_more(resident)
        group = self._group_of.pop(resident, None)
        if group is None:
            return
        group.members.remove(resident)
        for pack in group.packs:
            if resident in pack.rows:
                pack.rows.remove(resident)
        if not group.members:
            del self._groups[group.digest, group.trainable]

    def group_of(self, resident: ResidentTrial) -> RowGroup | None:
        """Returns a resident's group; ``None`` if it cannot be fused."""
        return self._group_of.get(resident)

    def await_no_more(self, resident: ResidentTrial) -> None:
        """Notes that a resident is to run no more for now."""
        group = self._group_of.get(resident)
        for pack in () if group is None else group.packs:
            pack.awaited.discard(resident)

    def note_iterations(self, resident: ResidentTrial) -> None:
        """Notes that a resident was given iterations."""
        group = self._group_of.get(resident)
        for pack in () if group is None else group.packs:
            if resident in pack.awaited:
                pack.awaited.remove(resident)
                pack.answered_at = self._clock.now()

    def note_step(self, pack: RowPack, rows: Sequence[ResidentTrial], seconds: float) -> None:
        """Notes that rows of a pack have stepped, which took so long."""
        pack.seconds, pack.stepped = seconds, frozenset(rows)
        pack.awaited = {row for row in rows if not row.left and not row.finished}
        pack.ready_at = None

    def next(self, policy: str, current: ResidentTrial | None) -> Turn:
        """Returns what to do next; there are residents with iterations left.

        A pack is one unit for the policy. One that awaits answers is passed over as long as others can run.

        Args:
            policy: one of those of :mod:`fluid.lane.policy`.
            current: the resident that ran last.
        """
        if not self._group_of:
            return Turn((self._queue.next(policy, current),))
        units = self._units()
        now = self._clock.now()
        waits = [
            -math.inf if unit.pack is None or self._is_full(unit) else unit.pack.waits_until(now) for unit in units
        ]
        ready = [unit for unit, until in zip(units, waits, strict=True) if until <= now]
        if not ready:
            return Turn((), wait=min(waits) - now)
        if len(ready) == 1:
            return ready[0]
        works = [_work(number, unit.rows) for number, unit in enumerate(ready)]
        last = next((number for number, unit in enumerate(ready) if current in unit.rows), None)
        chosen = choose(policy, works, current=last, slack=SWITCH_SLACK_S)
        return ready[works.index(chosen)]

    def _is_full(self, unit: Turn) -> bool:
        """Whether a pack has all rows that it may have, so that there is nothing to wait for."""
        return unit.pack is not None and len(unit.rows) >= min(self.most, unit.pack.group.most)

    def _units(self) -> list[Turn]:
        """Returns what could run next, in the order of the queue."""
        units: list[Turn] = []
        by_group: dict[RowGroup, list[ResidentTrial]] = {}
        for resident in self._queue:
            group = self._group_of.get(resident)
            if group is None:
                units.append(Turn((resident,)))
            else:
                by_group.setdefault(group, []).append(resident)
        for group, ready in by_group.items():
            self._divide(group, ready)
            for pack in group.packs:
                rows = [row for row in pack.rows if row.left]
                if rows:
                    units.append(Turn(rows, pack))
        return units

    def _divide(self, group: RowGroup, ready: Iterable[ResidentTrial]) -> None:
        """Divides residents with iterations left, and those awaited, into packs; keeps packs as they are if it can."""
        packs = group.packs
        most = min(self.most, group.most)
        members = dict.fromkeys(ready)
        awaited = [(pack, row) for pack in packs for row in pack.rows if row in pack.awaited]
        room = max(most, sum(len(pack.rows) for pack in packs))
        if len(members) + len(awaited) > room:  # The driver has placed others in their stead.
            staying = max(0, int(room) - len(members))
            for pack, row in awaited[staying:]:
                pack.awaited.remove(row)
            del awaited[staying:]
        members.update(dict.fromkeys(row for _, row in awaited))
        size = _size_of_packs(len(members), most)
        placed = {row for pack in packs for row in pack.rows}
        wanted = -(-len(members) // size)
        if placed == members.keys() and len(packs) == wanted and all(len(pack.rows) <= size for pack in packs):
            return
        for pack in packs:
            pack.rows = [row for row in pack.rows if row in members]
        packs.sort(key=lambda pack: -len(pack.rows))
        del packs[wanted:]
        for pack in packs:
            del pack.rows[size:]
            pack.awaited.intersection_update(pack.rows)
        placed = {row for pack in packs for row in pack.rows}
        homeless = [row for row in members if row not in placed]
        while homeless:
            if all(len(pack.rows) == size for pack in packs):
                packs.append(RowPack(group))
            roomy = next(pack for pack in packs if len(pack.rows) < size)
            space = size - len(roomy.rows)
            roomy.rows += homeless[:space]
            del homeless[:space]


def _size_of_packs(members: int, most: float) -> int:
    """Returns the rows of a pack: about equal for all, and a power of two where it can be."""
    if members <= most:
        return members
    most = int(most)
    even = -(-members // -(-members // most))
    return min(most, 1 << (even - 1).bit_length())


def _work(number: int, rows: Sequence[ResidentTrial]) -> ResidentWork:
    """The remaining work of residents that run together."""
    left = [None if row.pace is None else row.left * row.pace for row in rows]
    known = [seconds for seconds in left if seconds is not None]
    remaining = max(known) if len(known) == len(left) else None
    return ResidentWork(number, remaining, max(row.service for row in rows), max(row.turn for row in rows))

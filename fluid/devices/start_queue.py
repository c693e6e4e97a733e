"""The start queue: trials that wait for a device, in starting order.

By descending priority of the group, then of the trial; then by the rank of the group's owner; then critical ones (of a
rung that others wait for) first; then by descending width; then as queued.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from fluid.devices.constraints import Constraint

#: (-priority of the group, -priority, owner, whether it is not critical, -width)
_Class = tuple[float, float, int, bool, float]
#: Chooses, of the lines of one class, rows that are to be offered first, in that order, given the width and the rows.
Choose = Callable[[float, Sequence[Mapping[int, int]]], Sequence[int]]


class _QueueLine:
    """Rows of one class and one kind.

    Attributes:
        key, kind: theirs.
        rows: row -> ticket, by ascending ticket.
    """

    __slots__ = ("key", "kind", "rows")

    def __init__(self, key: _Class, kind: Hashable) -> None:
        self.key = key
        self.kind = kind
        self.rows: OrderedDict[int, int] = OrderedDict()

    @property
    def first(self) -> tuple[int, int]:
        """Row and ticket of the row that has waited longest."""
        return next(iter(self.rows.items()))


class StartQueue:
    """Rows of trials that wait. A row is queued at most once.

    Rows of one width and one ``kind`` are alike to placement: if one does not fit, none of them does.

    Attributes:
        ranks: place of owners in the starting order; those without a rank come last, in order of their number.
    """

    def __init__(self) -> None:
        self.ranks: Mapping[int, int] = {}
        #: class -> kind -> line; no empty ones.
        self._classes: dict[_Class, dict[Hashable, _QueueLine]] = {}
        self._where: dict[int, _QueueLine] = {}
        #: Rows that only one device will do for.
        self._bound: set[int] = set()
        #: width -> number of its other rows; no zeros.
        self._unbound: dict[float, int] = {}
        #: Constraints of rows that have one, and the number of the other rows by constraint; no zeros.
        self._constraint: dict[int, Constraint] = {}
        self._constrained: dict[Constraint, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, row: object) -> bool:
        return row in self._where

    def __iter__(self) -> Iterator[int]:
        """Iterates over the rows in starting order."""
        for key in self._in_order():
            lines = list(self._classes[key].values())
            if len(lines) == 1:
                yield from list(lines[0].rows)
            else:
                tickets = [(ticket, row) for line in lines for row, ticket in line.rows.items()]
                yield from (row for _, row in sorted(tickets))

    def push(
        self,
        row: int,
        width: float,
        priority: float = 1.0,
        kind: Hashable = None,
        *,
        critical: bool = False,
        in_front: bool = False,
        bound: bool = False,
        constraint: Constraint | None = None,
        owner: int = 0,
        group_priority: float = 1.0,
    ) -> None:
        """Queues a row behind those of its priority, width and kind.

        Args:
            row: a row that is not queued.
            width: of a device, or in devices.
            priority: a higher one starts first.
            kind: what else placement depends on.
            critical: whether other trials wait for its end.
            in_front: whether it goes before those like it instead of behind them.
            bound: whether only one device will do for it.
            constraint: what it asks of its devices; part of its kind.
            owner: number of its group's owner.
            group_priority: goes before ``priority``.
        """
        key = (-group_priority, -priority, owner, not critical, -width)
        self._tickets += 1
        ticket = -self._tickets if in_front else self._tickets
        lines = self._classes.get(key)
        if lines is None:
            lines = self._classes[key] = {}
        line = lines.get(kind)
        if line is None:
            line = lines[kind] = _QueueLine(key, kind)
        self._where[row] = line
        line.rows[row] = ticket
        if in_front:
            line.rows.move_to_end(row, last=False)
        if bound:
            self._bound.add(row)
        else:
            self._unbound[width] = self._unbound.get(width, 0) + 1
            if constraint is not None:
                self._constraint[row] = constraint
                self._constrained[constraint] = self._constrained.get(constraint, 0) + 1

    def width(self, row: int) -> float:
        """The width with which a row was queued."""
        return -self._where[row].key[-1]

    def line(self, row: int) -> Hashable:
        """The width and kind of a row: rows of one line are alike to placement."""
        line = self._where[row]
        return line.key[-1], line.kind

    def remove(self, row: int) -> None:
        """Removes a row."""
        self._remove(row, self._where[row])

    def set_widths(
        self, width_of: Mapping[int, float], kind_of: Callable[[int], Hashable]
    ) -> dict[Hashable, Hashable] | None:
        """Gives all rows new widths where they stay in line as they are.

        They do not, and nothing changes, if rows of one class get different widths, or classes change places or become
        one, or lines part or become one, or a line has another kind now.

        Args:
            width_of: the new widths of rows, at least one of each class; the other rows of a class get the same.
            kind_of: the present kind of a row, which is that of its line.

        Returns:
            The new :meth:`line` of each old one; ``None`` if the rows do not stay in line.
        """
        new_keys: dict[_Class, _Class] = {}
        for row, width in width_of.items():
            key = self._where[row].key
            if new_keys.setdefault(key, new_key := (*key[:-1], -width)) != new_key:
                return None
        moved: dict[_Class, dict[Hashable, _QueueLine]] = {}
        renamed: dict[Hashable, Hashable] = {}
        latest: _Class | None = None
        for key in sorted(self._classes):
            lines, new_key = self._classes[key], new_keys[key]
            if latest is not None and new_key <= latest:
                return None
            for kind, line in lines.items():
                name = new_key[-1], kind
                if renamed.setdefault((key[-1], kind), name) != name or kind_of(line.first[0]) != kind:
                    return None
            moved[new_key], latest = lines, new_key
        if len(set(renamed.values())) < len(renamed):
            return None
        self._classes = moved
        self._unbound.clear()
        for key, lines in moved.items():
            for line in lines.values():
                line.key = key
                count = len(line.rows) - sum(row in line.rows for row in self._bound)
                if count:
                    self._unbound[-key[-1]] = self._unbound.get(-key[-1], 0) + count
        return renamed

    def clear(self) -> None:
        """Removes all rows."""
        self._classes.clear()
        self._where.clear()
        self._bound.clear()
        self._unbound.clear()
        self._constraint.clear()
        self._constrained.clear()

    @property
    def constraints(self) -> Mapping[Constraint, int]:
        """Number of queued rows by what they ask of devices, without those that only one device will do for."""
        return self._constrained

    @property
    def unbound(self) -> Mapping[float, int]:
        """Number of queued rows by width, without those that only one device will do for."""
        return self._unbound

    @property
    def first_priority(self) -> tuple[float, float]:
        """The priority of the first row's group, and its own; for a queue that is not empty."""
        group, own, *_ = min(self._classes)
        return -group, -own

    @property
    def first_owner(self) -> int:
        """The owner of the first row; for a queue that is not empty."""
        return self._in_order()[0][2]

    def lines(self) -> Iterator[tuple[int, int]]:
        """The first row of each line, and how many rows the line has; in no certain order."""
        for lines in self._classes.values():
            for line in lines.values():
                yield next(iter(line.rows)), len(line.rows)

    def widths(self) -> list[float]:
        """Widths of the queued rows, in starting order; a width may come several times."""
        return [-key[-1] for key in self._in_order()]

    def _in_order(self) -> list[_Class]:
        ranks = self.ranks
        if not ranks:
            return sorted(self._classes)
        last = len(ranks)
        return sorted(self._classes, key=lambda key: (key[0], key[1], ranks.get(key[2], last), *key[2:]))

    def group_priorities(self) -> list[float]:
        """The priorities of the groups of queued rows, the highest first."""
        return sorted({-key[0] for key in self._classes}, reverse=True)

    def start(
        self, place: Callable[[int], bool], group_priority: float | None = None, choose: Choose | None = None
    ) -> list[int]:
        """Offers rows to ``place``, in starting order, and removes those it accepts.

        Narrower trials, and trials of another kind, pass one that does not fit: devices would stay idle otherwise.

        Args:
            place: starts a row if it fits now; returns whether it did.
            group_priority: offers only rows of groups of this priority; ``None`` for all.
            choose: chooses rows to be offered first among those of one class; ``None`` for none.

        Returns:
            The rows started.
        """
        started: list[int] = []
        #: kinds of which none fits, by width
        refused: dict[float, set[Hashable]] = {}
        for key in self._in_order():
            if group_priority is not None and key[0] != -group_priority:
                continue
            unfit = refused.setdefault(key[-1], set())
            fitting = [line for kind, line in self._classes[key].items() if kind not in unfit]
            if choose is not None and len(fitting) > 1:
                for row in choose(-key[-1], [line.rows for line in fitting]):
                    if place(row):
                        started.append(row)
                        self._remove(row, self._where[row])
                fitting = [line for line in fitting if line.rows]
            # The line whose first row has waited longest comes first.
            turns = [(line.first[1], line) for line in fitting]
            heapq.heapify(turns)
            while turns:
                _, line = heapq.heappop(turns)
                while place(row := line.first[0]):
                    started.append(row)
                    self._remove(row, line)
                    if not line.rows:
                        break
                    if turns:
                        heapq.heappush(turns, (line.first[1], line))
                        break
                else:
                    unfit.add(line.kind)
        return started

    def _remove(self, row: int, line: _QueueLine) -> None:
        del self._where[row], line.rows[row]
        width = -line.key[-1]
        constraint = self._constraint.pop(row, None) if self._constraint else None
        if constraint is not None:
            self._constrained[constraint] -= 1
            if not self._constrained[constraint]:
                del self._constrained[constraint]
        if row in self._bound:
            self._bound.remove(row)
        elif self._unbound[width] > 1:
            self._unbound[width] -= 1
        else:
            del self._unbound[width]
        if not line.rows:
            lines = self._classes[line.key]
            del lines[line.kind]
            if not lines:
                del self._classes[line.key]

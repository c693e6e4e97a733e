"""The start queue: trials that wait for a device, in starting order.

By descending priority; then critical ones (of a rung that others wait for) first; then by descending width; then as
queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping

#: (-priority, whether it is not critical, -width)
_Class = tuple[float, bool, float]


class StartQueue:
    """Rows of trials that wait. A row is queued at most once.

    Rows of one width and one ``kind`` are alike to placement: if one does not fit, none of them does.
    """

    def __init__(self) -> None:
        #: class -> kind -> (ticket, row) in order; no empty ones.
        self._classes: dict[_Class, dict[Hashable, deque[tuple[int, int]]]] = {}
        self._where: dict[int, tuple[_Class, Hashable, int]] = {}
        #: Rows that only one device will do for.
        self._bound: set[int] = set()
        #: width -> number of its other rows; no zeros.
        self._unbound: dict[float, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, row: object) -> bool:
        return row in self._where

    def __iter__(self) -> Iterator[int]:
        """Iterates over the rows in starting order."""
        for key in sorted(self._classes):
            for _, row in sorted(entry for rows in self._classes[key].values() for entry in rows):
                yield row

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
        """
        key = (-priority, not critical, -width)
        self._tickets += 1
        ticket = -self._tickets if in_front else self._tickets
        self._where[row] = (key, kind, ticket)
        if bound:
            self._bound.add(row)
        else:
            self._unbound[width] = self._unbound.get(width, 0) + 1
        rows = self._classes.setdefault(key, {}).setdefault(kind, deque())
        if in_front:
            rows.appendleft((ticket, row))
        else:
            rows.append((ticket, row))

    def width(self, row: int) -> float:
        """The width with which a row was queued."""
        return -self._where[row][0][2]

    def line(self, row: int) -> Hashable:
        """The width and kind of a row: rows of one line are alike to placement."""
        key, kind, _ = self._where[row]
        return key[2], kind

    def remove(self, row: int) -> None:
        """Removes a row."""
        key, kind, ticket = self._where.pop(row)
        self._uncount(row, -key[2])
        rows = self._classes[key][kind]
        rows.remove((ticket, row))
        if not rows:
            self._forget(key, kind)

    def clear(self) -> None:
        """Removes all rows."""
        self._classes.clear()
        self._where.clear()
        self._bound.clear()
        self._unbound.clear()

    @property
    def unbound(self) -> Mapping[float, int]:
        """Number of queued rows by width, without those that only one device will do for."""
        return self._unbound

    @property
    def first_priority(self) -> float:
        """The priority of the row that starts first; for a queue that is not empty."""
        return -min(self._classes)[0]

    def widths(self) -> list[float]:
        """Widths of the queued rows, in starting order; a width may come several times."""
        return [-key[2] for key in sorted(self._classes)]

    def start(self, place: Callable[[int], bool]) -> list[int]:
        """Offers rows to ``place``, in starting order, and removes those it accepts.

        Narrower trials, and trials of another kind, pass one that does not fit: devices would stay idle otherwise.

        Args:
            place: starts a row if it fits now; returns whether it did.

        Returns:
            The rows started.
        """
        started: list[int] = []
        #: kinds of which none fits, by width
        refused: dict[float, set[Hashable]] = {}
        for key in sorted(self._classes):
            kinds = self._classes[key]
            unfit = refused.setdefault(key[2], set())
            while kinds:
                kind = self._next_kind(kinds, unfit)
                if kind in unfit:
                    break
                rows = kinds[kind]
                while place(row := rows[0][1]):
                    started.append(row)
                    del self._where[row]
                    self._uncount(row, -key[2])
                    rows.popleft()
                    if not rows:
                        self._forget(key, kind)
                    if not rows or len(kinds) > 1:
                        break
                else:
                    unfit.add(kind)
        return started

    @staticmethod
    def _next_kind(kinds: dict[Hashable, deque[tuple[int, int]]], unfit: set[Hashable]) -> Hashable:
        """The kind whose first row has waited longest, of those that may fit; any if none may."""
        if len(kinds) == 1:
            return next(iter(kinds))
        return min(kinds, key=lambda kind: (kind in unfit, kinds[kind][0]))

    def _uncount(self, row: int, width: float) -> None:
        if row in self._bound:
            self._bound.remove(row)
        elif self._unbound[width] > 1:
            self._unbound[width] -= 1
        else:
            del self._unbound[width]

    def _forget(self, key: _Class, kind: Hashable) -> None:
        del self._classes[key][kind]
        if not self._classes[key]:
            del self._classes[key]

"""What an iteration used besides time, as its lane measured it, on its way from the lane to people.

The lane sends it with the iteration (:class:`fluid.engine.events.IterationDone`); ``result.usage`` has it, as have
``results.jsonl`` and the tables of a report. So a further fact is a field of :class:`Usage`, its measurement in
:mod:`fluid.lane.usage`, and, where tables are to show it, a line of :data:`TITLES`: nothing in between names one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What an iteration used; a fact is ``None`` where it was not measured, as in iterations of less than 10 ms.

    Attributes:
        read_bytes: that the trial's process read meanwhile, from files, be they cached or not, sockets and pipes; of
            trials that train in one step, the trial's part.
        written_bytes: that it wrote, counted alike.
    """

    read_bytes: int | None = None
    written_bytes: int | None = None

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        """The sum of what several iterations used, as far as it was measured."""
        sums: dict[str, int | None] = dict.fromkeys(cls.__struct_fields__)
        for usage in usages:
            if usage is not NO_USAGE:
                for name, before in sums.items():
                    value = getattr(usage, name)
                    sums[name] = before if value is None else value + (before or 0)
        return cls(**sums)


#: Of an iteration of which nothing was measured.
NO_USAGE = Usage()


#: The titles of the columns in which tables show what a trial used in all; units are as the names of the fields end.
TITLES = {"read_bytes": "read", "written_bytes": "written"}

"""The owner of the groups of one search: an executor schedules them as one."""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)


def new_owner(search: str) -> str:
    """A name that no other search of this process has.

    Args:
        search: what the search is called.
    """
    return f"{search}-{next(_numbers)}"

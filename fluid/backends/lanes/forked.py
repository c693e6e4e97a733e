"""Pools of lanes in processes that are forked from the driver: the lanes are the driver's."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class Forkable(Protocol):
    """What has descriptors that a process forked from the driver must close."""

    def abandon(self) -> None:
        """Closes them there."""
        ...


_all: weakref.WeakSet[Forkable] = weakref.WeakSet()


def close_when_forked(one: Forkable) -> None:
    """Has an object abandon what it owns in each process that is forked from now on."""
    _all.add(one)


def _abandon_all() -> None:
    for one in list(_all):
        with suppress(Exception):
            one.abandon()


os.register_at_fork(after_in_child=_abandon_all)

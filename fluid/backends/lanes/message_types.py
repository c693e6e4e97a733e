"""Whether a message of a lane is one: of a class that lanes send, with values of the types that the class declares.

A lane's process runs code of trials, and what comes from it decides about all trials of the session. Values within
values are not looked at: no accident makes a pickle that is whole and has wrong ones.
"""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from fluid.backends.lanes.translate import EVENTS
from fluid.elastic.messages import FROM_MEMBER
from fluid.lane.log_records import LaneLogged
from fluid.lane.protocol import CleanUpBegun, FromMember, LaneUnusable, LaneWarming, ModulesLoaded, PayloadMissing

_CLASSES = frozenset(
    {*EVENTS, LaneUnusable, LaneWarming, ModulesLoaded, LaneLogged, CleanUpBegun, FromMember, PayloadMissing}
)
#: Types of messages, and of their values, that were found to be right: a look here is all that most messages cost.
_right: set[tuple[type, ...]] = set()


def require_types(message: Any) -> None:
    """Refuses what is no message of a lane.

    Raises:
        TypeError: it is of no such class, or has a value of a wrong type.
    """
    kind = type(message)
    if kind not in _CLASSES:
        raise TypeError(f"{kind.__qualname__} is no message of a lane")
    found = (kind, *map(type, message))
    if found not in _right:
        if kind is FromMember and not isinstance(message.message, FROM_MEMBER):
            raise TypeError(f"{type(message.message).__qualname__} is no message of a member")
        for (name, declared), value in zip(get_type_hints(kind).items(), message, strict=True):
            if not _fits(value, declared):
                raise TypeError(f"{kind.__name__}.{name} is of type {type(value).__qualname__}")
        _right.add(found)


def _fits(value: Any, declared: Any) -> bool:
    origin = get_origin(declared)
    if declared is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(declared))
    if declared is float:
        return isinstance(value, (float, int))
    return isinstance(value, origin or declared)

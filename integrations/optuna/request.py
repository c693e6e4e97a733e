"""What an objective in a lane asks of the driver, as both ends know it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Request(NamedTuple):
    """A member of the driver's trial, or of its study, to read or to call.

    Attributes:
        of_study: whether it is the study's.
        name: of the member.
        call: its arguments; ``None`` to read a property.
    """

    of_study: bool
    name: str
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

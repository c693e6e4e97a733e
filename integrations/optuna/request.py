"""What an objective in a lane asks of the driver, as both ends know it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Target = Literal["trial", "study", "storage", "choice"]


class Request(NamedTuple):
    """A member of the driver's trial, of its study, or of the study's storage, to read or to call.

    Attributes:
        target: whose member it is; ``"choice"`` for the index of the choice that the trial suggests.
        name: of the member; of the parameter, for a choice.
        call: its arguments; ``None`` to read a property.
    """

    target: Target
    name: str
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

"""Claims: the ids that requests of one call of the engine claim."""

from __future__ import annotations

from collections.abc import Container, Hashable

from fluid.errors import InvalidFieldError


class Claims:
    """The ids that requests of one call of the engine claim, so that no two of them claim the same.

    Attributes:
        fitting: memory needs and constraints that were found to fit on the devices, which the call has not changed yet.
    """

    def __init__(self) -> None:
        self.fitting: set[Hashable] = set()
        #: By the name of the field: trials may be very many.
        self._claimed: dict[str, set[Hashable]] = {}

    def claim(self, field_name: str, value: Hashable, *taken: Container[Hashable]) -> None:
        """Claims an id.

        Raises:
            InvalidFieldError: it is taken, or was claimed before.
        """
        claimed = self._claimed.setdefault(field_name, set())
        if value in claimed or any(value in ids for ids in taken):
            raise InvalidFieldError(field_name, value, "is taken in this session")
        claimed.add(value)

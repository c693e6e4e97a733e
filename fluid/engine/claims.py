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
        self._claimed: set[tuple[str, Hashable]] = set()

    def claim(self, field_name: str, value: Hashable, *taken: Container[Hashable]) -> None:
        """Claims an id.

        Raises:
            InvalidFieldError: it is taken, or was claimed before.
        """
        if (field_name, value) in self._claimed or any(value in ids for ids in taken):
            raise InvalidFieldError(field_name, value, "is taken in this session")
        self._claimed.add((field_name, value))

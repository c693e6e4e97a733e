"""Which fields of an object its maker gave, so that a fact that is said twice can be told from a default."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T", bound="GivenFields")


class GivenFields:
    """Base of a dataclass that knows which of its fields were given, also those given as they are by default."""

    def __new__(cls: type[T], *args: Any, **given: Any) -> T:
        made = super().__new__(cls)
        # Only the names: the values may still be replaced by what __post_init__ makes of them.
        vars(made)["_given"] = (*(field.name for field in fields(cls)[: len(args)]), *given)  # type: ignore[arg-type]
        return made

    @cached_property
    def given(self) -> dict[str, Any]:
        """The fields that were given, by name; of a subclass, whose own __init__ may give them, but for its own."""
        own = next(cls for cls in type(self).__mro__ if GivenFields in cls.__bases__)
        named: tuple[str, ...] = vars(self)["_given"]
        found = ((field, getattr(self, field.name)) for field in fields(own))
        return {field.name: value for field, value in found if field.name in named or value != field.default}

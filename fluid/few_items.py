"""A mapping of which there may be very many, most of which have one item."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Nothing:
    """Stands for no key, and for no value; a class stays the same one where it is copied or pickled."""


_NONE: Any = _Nothing
#: Of those that have one item at most; it is never changed.
_NO_REST: dict[Any, Any] = {}


class FewItems(MutableMapping[K, V], Generic[K, V]):
    """A mapping that keeps its first item in itself: with one item it takes a third of the memory of a dict.

    It has the order of a dict, too. One thread may write while others read single items, or take a :meth:`copy`, unless
    it removes a key and adds the same object again meanwhile.

    Example:
        >>> items = FewItems()
        >>> items["a"], items["b"] = 1, 2
        >>> del items["a"]
        >>> items.copy()
        {'b': 2}
    """

    __slots__ = ("_key", "_rest", "_value")

    def __init__(self) -> None:
        self._key: K = _NONE
        self._value: V = _NONE
        self._rest: dict[K, V] = _NO_REST

    def __len__(self) -> int:
        return len(self._rest) + (self._key is not _NONE)

    def __iter__(self) -> Iterator[K]:
        if self._key is not _NONE:
            yield self._key
        yield from self._rest

    def __contains__(self, key: object) -> bool:
        return key == self._key or key in self._rest

    def __getitem__(self, key: K) -> V:
        first, value = self._first()
        return value if key == first else self._rest[key]

    def get(self, key: K, default: Any = None) -> Any:
        first, value = self._first()
        return value if key == first else self._rest.get(key, default)

    def __setitem__(self, key: K, value: V) -> None:
        if key == self._key:
            self._value = value
        elif len(self):
            self._rest = self._rest or {}
            self._rest[key] = value
        else:
            self._value = value
            self._key = key  # last, as it says that there is a value

    def __delitem__(self, key: K) -> None:
        if key == self._key:
            self._key = self._value = _NONE
        else:
            del self._rest[key]

    def copy(self) -> dict[K, V]:
        """The items as they are now."""
        first, value = self._first()
        rest = self._rest.copy()
        return rest if first is _NONE else {first: value, **rest}

    def _first(self) -> tuple[K, V]:
        """The key and the value that are kept here."""
        while True:
            key, value = self._key, self._value
            if key is self._key:
                return key, value

"""How long trials take to be restored from their checkpoints, by where those are; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median_low

from fluid.errors import InvalidFieldError, require_number

#: Newest restores of a profile key from one source whose median counts.
NEWEST = 31


class RestoreSeconds:
    """Seconds that reading and loading checkpoints took, by profile key and source: medians of the newest.

    Example:
        >>> from fluid.planning.restore_seconds import RestoreSeconds
        >>> restores = RestoreSeconds()
        >>> for seconds in (0.2, 0.1, 0.9):
        ...     restores.observe("resnet", "memory", seconds)
        >>> restores.of("resnet")
        {'memory': 0.2}
    """

    def __init__(self) -> None:
        self._by_key: dict[str, dict[str, deque[float]]] = {}

    def observe(self, key: str, source: str, seconds: float) -> None:
        """Adds a restore of a trial of a profile key from a source: ``"memory"``, ``"disk"`` or another."""
        by_source = self._by_key.setdefault(key, {})
        by_source.setdefault(source, deque(maxlen=NEWEST)).append(require_number("seconds", seconds, at_least=0.0))

    def of(self, key: str) -> dict[str, float]:
        """The median seconds by source, of those that were measured."""
        return {source: median_low(seconds) for source, seconds in self._by_key.get(key, {}).items()}

    def to_json(self) -> dict[str, dict[str, list[float]]]:
        """What was measured, as JSON."""
        return {
            key: {source: list(seconds) for source, seconds in by_source.items()}
            for key, by_source in self._by_key.items()
        }

    @classmethod
    def from_json(cls, data: object) -> RestoreSeconds:
        """Reads what :meth:`to_json` made.

        Raises:
            InvalidFieldError: it is something else.
        """
        found = cls()
        for key, by_source in _mapping(data).items():
            for source, seconds in _mapping(by_source).items():
                if not isinstance(seconds, list):
                    raise InvalidFieldError("restores", seconds, "must be a list of seconds")
                for each in seconds:
                    found.observe(str(key), str(source), each)
        return found


def _mapping(data: object) -> Mapping[object, object]:
    if not isinstance(data, Mapping):
        raise InvalidFieldError("restores", data, "must be a JSON object")
    return data

"""The course of a trial that is replayed: its iterations, asked for as they are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fluid.backends.simulated.steps import PlayedIteration
from fluid.errors import InvalidFieldError, require_number
from fluid.rehearsal.replayable import Replayable, ReplayedFusion, ReplayedIteration
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import encode_metrics


class ReplayedCourse:
    """The course of one trial: see :class:`fluid.backends.simulated.steps.Course`.

    What ``replay`` raises, or gives that cannot be used, fails the trial in the first iteration that was asked for.

    Args:
        source: what replays the trial.
        config: the trial's.
    """

    def __init__(self, source: Replayable, config: Mapping[str, Any]) -> None:
        self._source = source
        self._config = config
        self._known: dict[int, ReplayedIteration] = {}
        #: The trial's last iteration, once it is known to be done by itself.
        self._last: int | None = None
        self._error: BaseException | None = None

    @property
    def fusion(self) -> ReplayedFusion | None:
        """With which trials it can train in one step; ``None`` if that is not known.

        Raises:
            InvalidFieldError: what the source says cannot be used.
        """
        tell = getattr(self._source, "fusion", None)
        told = tell(self._config) if callable(tell) else None
        if told is not None and not isinstance(told, ReplayedFusion):
            raise InvalidFieldError("fusion", told, "must return a ReplayedFusion or None")
        return told

    def prepare(self, iterations: range) -> None:
        """Asks for iterations that are about to be played."""
        stop = iterations.stop if self._last is None else min(iterations.stop, self._last + 1)
        # Those played before are forgotten, and asked for again where a trial repeats them.
        missing = [iteration for iteration in range(iterations.start, stop) if iteration not in self._known]
        if not missing or self._error is not None:
            return
        asked = range(missing[0], stop)
        try:
            played = _checked(self._source.replay(self._config, asked), asked)
        except BaseException as error:  # Raised where the iteration is played: those before it are not to blame.
            self._error = error
            return
        self._known.update(zip(asked, played, strict=False))
        if len(played) < len(asked):
            self._last = asked.start + len(played) - 1

    def play(self, iteration: int) -> PlayedIteration | None:
        """One iteration; ``None`` if the trial has none left."""
        one = self._known.pop(iteration, None)
        if one is None:
            self.prepare(range(iteration, iteration + 1))
            one = self._known.pop(iteration, None)
        if one is None:
            if self._error is not None:
                raise self._error
            return None
        memory = None if one.memory_bytes is None else MemoryNeed(one.memory_bytes)
        return PlayedIteration(one.seconds, encode_metrics(one.metrics), memory, finished=iteration == self._last)

    def call(self, method: str, payload: bytes) -> bytes | None:
        """Calls of methods answer nothing."""
        return None


class FailedCourse:
    """The course of a trial that fails before its first iteration.

    Args:
        error: why.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def prepare(self, iterations: range) -> None:
        """Learns nothing."""

    def play(self, iteration: int) -> PlayedIteration | None:
        """Raises the error."""
        raise self._error

    def call(self, method: str, payload: bytes) -> bytes | None:
        """Raises the error."""
        raise self._error


def _checked(played: Sequence[ReplayedIteration], asked: range) -> Sequence[ReplayedIteration]:
    """What ``replay`` has given for some iterations.

    Raises:
        InvalidFieldError: it cannot be used.
    """
    if not isinstance(played, Sequence):
        raise InvalidFieldError("replay", played, "must return a sequence of ReplayedIteration")
    if len(played) > len(asked):
        raise InvalidFieldError("replay", len(played), f"must return at most the {len(asked)} iterations asked for")
    for iteration, one in zip(asked, played, strict=False):
        if not isinstance(one, ReplayedIteration):
            raise InvalidFieldError(f"replay, iteration {iteration}", one, "must be a ReplayedIteration")
        if not isinstance(one.metrics, Mapping):
            raise InvalidFieldError(f"replay, metrics of iteration {iteration}", one.metrics, "must be a mapping")
        _require_amount(f"replay, seconds of iteration {iteration}", one.seconds)
        if one.memory_bytes is not None:
            _require_amount(f"replay, memory_bytes of iteration {iteration}", one.memory_bytes)
    return played


def _require_amount(field: str, value: Any) -> None:
    if type(value) is not float or not 0.0 <= value < math.inf:
        require_number(field, value, at_least=0.0)

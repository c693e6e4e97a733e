"""The course of a trial that is replayed: its iterations, asked for as they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluid.backends.simulated.steps import PlayedIteration
from fluid.errors import InvalidFieldError
from fluid.rehearsal.replayable import Replayable, ReplayedIteration
from fluid.resources import MemoryNeed
from fluid.trainables.pickling import pack_metrics


class ReplayedCourse:
    """The course of one trial: see :class:`fluid.backends.simulated.steps.Course`.

    Args:
        source: what replays the trial.
        config: the trial's.
    """

    def __init__(self, source: Replayable, config: Mapping[str, Any]) -> None:
        self._source, self._config = source, config
        self._known: dict[int, ReplayedIteration] = {}
        #: The trial's last iteration, once it is known to be done by itself.
        self._last: int | None = None

    def prepare(self, iterations: range) -> None:
        """Asks for iterations that are about to be played."""
        missing = [iteration for iteration in iterations if iteration not in self._known]
        if not missing or self._last is not None:
            return
        asked = range(missing[0], iterations.stop)
        played: Sequence[ReplayedIteration] = self._source.replay(self._config, asked)
        if len(played) > len(asked):
            raise InvalidFieldError("replay", len(played), f"must give at most the {len(asked)} iterations asked for")
        self._known.update(zip(asked, played, strict=False))
        if len(played) < len(asked):
            self._last = asked.start + len(played) - 1

    def play(self, iteration: int) -> PlayedIteration | None:
        """One iteration; ``None`` if the trial has none left."""
        if iteration not in self._known:
            self.prepare(range(iteration, iteration + 1))
        one = self._known.get(iteration)
        if one is None:
            return None
        memory = None if one.memory_bytes is None else MemoryNeed(one.memory_bytes)
        return PlayedIteration(one.seconds, pack_metrics(one.metrics), memory, finished=iteration == self._last)

    def call(self, method: str, payload: bytes) -> bytes | None:
        """Calls of methods answer nothing."""
        return None

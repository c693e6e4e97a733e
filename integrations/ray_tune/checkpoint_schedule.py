"""When Tune asks a trial for a checkpoint, as far as that is known before the trial gets there."""

from __future__ import annotations

from typing import NamedTuple


class CheckpointSchedule(NamedTuple):
    """The training iterations after which Tune asks a trial for a checkpoint.

    Attributes:
        every: after each multiple of this many; 0 for none.
        at: after these.
        likely: after these Tune may ask for one or not; none of them is in ``at``.
        at_end: when the trainable says that it is done.
    """

    every: int = 0
    at: frozenset[int] = frozenset()
    likely: frozenset[int] = frozenset()
    at_end: bool = False

    @property
    def may_be_asked(self) -> bool:
        """Whether Tune may ask for any."""
        return bool(self.every or self.at or self.likely or self.at_end)

    def due(self, iteration: int, done: bool = False) -> bool:
        """Whether Tune is sure to ask for a checkpoint after an iteration, at which the trial may be done."""
        return iteration in self.at or (done and self.at_end) or bool(self.every and iteration % self.every == 0)

"""How fast a trial is, as far as it was observed, and what was predicted of it before."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.engine import tuning
from fluid.resources import MemoryNeed


@dataclass(slots=True)
class Pace:
    """How fast a trial is.

    Attributes:
        seconds: per iteration at width 1 and speed 1, as last observed; ``None`` before the first.
        solo: seconds per iteration alone on one device of speed 1, as last observed; ``None`` if it never was alone.
        observed: number of iterations that ``seconds`` follows from.
        need: the most device memory that the trial was seen to need; ``None`` if none was measured.
        predicted: seconds per iteration at width 1 and speed 1, as other trials' configs tell it
            (:mod:`fluid.measure.cohorts.tree`); ``None`` if nothing is known.
        predicted_sigma: standard deviation of the logarithm of the true seconds over these.
        predicted_need: memory to reserve, in the same way; ``None`` if nothing is known.
        model: the device model on which they were observed.
    """

    seconds: float | None = None
    solo: float | None = None
    observed: int = 0
    need: MemoryNeed | None = None
    predicted: float | None = None
    predicted_sigma: float = 0.0
    predicted_need: MemoryNeed | None = None
    model: str | None = None

    def observe(self, seconds: float, model: str | None, count: int = 1) -> None:
        """Adds an iteration, or so many, in seconds at width 1 and speed 1, on a device of that model."""
        self.seconds, self.model = smooth(self.seconds, seconds, count), model
        self.observed += count

    @property
    def expected(self) -> float | None:
        """Seconds per iteration at width 1 and speed 1: as observed, else as predicted; ``None`` for neither."""
        return self.seconds if self.seconds is not None else self.predicted

    @property
    def expected_need(self) -> MemoryNeed | None:
        """The memory to reserve: as predicted, or more where it was seen to need more; ``None`` if not predicted."""
        predicted, seen = self.predicted_need, self.need
        if predicted is None or seen is None:
            return predicted
        persistent = max(predicted.persistent_bytes, seen.persistent_bytes)
        ephemeral = max(predicted.ephemeral_bytes, seen.ephemeral_bytes)
        return MemoryNeed(persistent, ephemeral)

    def grow_need(self, seen: MemoryNeed) -> bool:
        """Raises each part of the need to what was seen; returns whether that is more than before."""
        known = self.need or MemoryNeed()
        persistent = max(known.persistent_bytes, seen.persistent_bytes)
        grown = MemoryNeed(persistent, max(known.ephemeral_bytes, seen.ephemeral_bytes))
        changed, self.need = grown != self.need, grown
        return changed

    def predict(self, seconds: float | None, sigma: float, need: MemoryNeed | None) -> None:
        """Sets what is predicted of the trial."""
        self.predicted, self.predicted_sigma, self.predicted_need = seconds, sigma, need

    def rescale(self, factor: float) -> None:
        """Changes both paces as the measured speed of the device model has changed, by that factor."""
        self.seconds = None if self.seconds is None else self.seconds * factor
        self.solo = None if self.solo is None else self.solo * factor


def smooth(before: float | None, latest: float, count: int = 1) -> float:
    """The exponentially weighted mean of what was observed before and the latest observation, or so many alike."""
    if before is None:
        return latest
    kept: float = (1.0 - tuning.PACE_SMOOTHING) ** count
    return kept * before + (1.0 - kept) * latest

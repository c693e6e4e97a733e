"""What the resizes of a run gained: as predicted when they were decided on, and as measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fluid.display.format import count, duration
from fluid.reports.story.history import RunHistory
from fluid.reports.story.words import gained
from fluid.results.iterations import StoredIteration


class TimedIteration(NamedTuple):
    """When an iteration ended, and how long it took, seconds."""

    end: float
    seconds: float


def realised_gain(
    iterations: Sequence[TimedIteration], *, begun_at: float, at: float, until: float, left: int, pause: float
) -> float | None:
    """Seconds by which a trial ends earlier at the pace measured since a resize than at the pace before it.

    The pace before is that of the iterations in flight when the resize was decided on; co-residents may have left just
    then. A trial that did not run to its end so, because it was resized again or stopped, is taken to have.

    Args:
        iterations: of the trial, in order.
        begun_at: when the resize was decided on, seconds.
        at: when the trial ran again.
        until: when it was resized next; infinite if it was not.
        left: iterations that it had left when it was resized.
        pause: seconds that it did not run.

    Returns:
        ``None`` if it ran no iteration before, or after.
    """
    middle = [each.end - each.seconds / 2.0 for each in iterations]
    before = [each for each, half in zip(iterations, middle, strict=True) if half < at]
    after = [each.seconds for each, half in zip(iterations, middle, strict=True) if at <= half < until]
    if not before or not after:
        return None
    in_flight = [each.seconds for each in before if each.end > begun_at] or [before[-1].seconds]
    return left * (statistics.median(in_flight) - statistics.fmean(after)) - pause


@dataclass(frozen=True)
class ResizeGains:
    """What the resizes of a run gained, in seconds of the ends of trials.

    Attributes:
        chosen: resizes that the engine decided on.
        predicted_s: predicted gain of all of them.
        compared: those of which the gain could be measured.
        compared_predicted_s: predicted gain of these.
        realised_s: measured gain of these.
        stall_s: predicted seconds that trials stood still for all resizes.
    """

    chosen: int = 0
    predicted_s: float = 0.0
    compared: int = 0
    compared_predicted_s: float = 0.0
    realised_s: float = 0.0
    stall_s: float = 0.0

    @property
    def text(self) -> str:
        """In a line; empty if none was decided on."""
        parts = []
        if self.chosen:
            parts.append(f"{count(self.chosen, 'resize')}: predicted to end trials {gained(self.predicted_s)} in all")
            if self.compared:
                some = "" if self.compared == self.chosen else f" by {self.compared} of them"
                predicted = "" if self.compared == self.chosen else f" of {duration(self.compared_predicted_s)}"
                parts.append(f"realised{some}: {gained(self.realised_s)}{predicted}")
            if self.stall_s > 0.0:
                parts.append(f"trials stood still for {duration(self.stall_s)} as predicted")
        return "; ".join(parts)


def resize_gains(history: RunHistory, iterations: Mapping[str, Sequence[StoredIteration]]) -> ResizeGains:
    """What the resizes of a run gained; of fused trials, and of journals of older versions, what they tell.

    Args:
        history: the run's journal.
        iterations: the finished ones by trial, in order.
    """
    chosen = compared = 0
    predicted = compared_predicted = realised = stall = 0.0
    for trial, entries in history.of_trial.items():
        resizes = [entry for entry in entries if entry.what == "NoteResize"]
        timed = [TimedIteration(each.end, each.seconds) for each in iterations.get(trial, ())] if resizes else []
        for entry, until in zip(resizes, [*(later.at for later in resizes[1:]), float("inf")], strict=False):
            fields = entry.fields
            gain, left, begun = fields.get("gain"), fields.get("left"), fields.get("begun_at")
            if not isinstance(gain, (int, float)):
                continue
            chosen, predicted, stall = chosen + 1, predicted + gain, stall + (fields.get("stall_s") or 0.0)
            if not isinstance(left, int) or not isinstance(begun, (int, float)):
                continue
            pause = float(fields["seconds"])
            begun_at = entry.at - (float(fields["at"]) - begun)
            found = realised_gain(timed, begun_at=begun_at, at=entry.at, until=until, left=left, pause=pause)
            if found is not None:
                compared, compared_predicted, realised = compared + 1, compared_predicted + gain, realised + found
    return ResizeGains(chosen, predicted, compared, compared_predicted, realised, stall)

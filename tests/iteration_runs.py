"""Runs of iterations, told apart for tests that look at each."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from fluid.engine.events import IterationDone
from fluid.trainables.encoded_metrics import IterationRun


def one_by_one(told: Any) -> list[Any]:
    """An event or message; of a run of iterations, one for each, with metrics as the trial reported them."""
    if not isinstance(told, IterationDone):
        return [told]
    run = told.run or IterationRun((told.at,), (told.seconds,), (told.metrics,))
    last = len(run.at) - 1
    return [
        structs.replace(
            told,
            at=at,
            iteration=told.iteration - last + place,
            seconds=seconds,
            metrics=metrics.decode(),
            finished=told.finished and place == last,
            run=None,
        )
        for place, (at, seconds, metrics) in enumerate(zip(*run, strict=True))
    ]

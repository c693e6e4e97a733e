"""Runs of iterations, told apart for tests that look at each."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from fluid.engine.events import IterationDone
from fluid.lane.protocol import ResidentIterated
from fluid.trainables.encoded_metrics import IterationRun


def one_by_one(told: Any) -> list[Any]:
    """A lane's message or an event; of a run of iterations, one for each, with metrics as the trial reported them."""
    if not isinstance(told, (IterationDone, ResidentIterated)) or told.metrics is None:
        return [told]
    changed = told._replace if isinstance(told, ResidentIterated) else partial(dataclasses.replace, told)
    run = told.run or IterationRun((told.at,), (told.seconds,), (told.metrics,))
    last = len(run.at) - 1
    return [
        changed(
            at=at,
            iteration=told.iteration - last + place,
            seconds=seconds,
            metrics=metrics.decode(),
            finished=told.finished and place == last,
            run=None,
        )
        for place, (at, seconds, metrics) in enumerate(zip(*run, strict=True))
    ]

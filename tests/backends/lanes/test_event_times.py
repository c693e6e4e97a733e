"""The times of events as a backend hands them out: they never go back, in runs of iterations neither."""

from __future__ import annotations

from fluid.backends.lanes.times import not_before
from fluid.engine.events import IterationDone
from fluid.trainables.encoded_metrics import NO_METRICS, IterationRun
from tests.iteration_runs import one_by_one


def _done(iteration: int, *at: float) -> IterationDone:
    run = IterationRun(at, (0.1,) * len(at), (NO_METRICS,) * len(at)) if len(at) > 1 else None
    return IterationDone(at[-1], "a", 0, iteration=iteration, seconds=0.1, run=run)


def test_a_run_does_not_begin_before_the_iteration_that_it_follows() -> None:
    # What another lane said was handed out at 5.0 already.
    events = not_before([_done(1, 4.0), _done(4, 4.2, 4.9, 5.5)], 5.0)
    iterations = [each for event in events for each in one_by_one(event)]
    assert [(each.iteration, each.at) for each in iterations] == [(1, 5.0), (2, 5.0), (3, 5.0), (4, 5.5)]


def test_a_run_that_is_over_by_then_has_one_time() -> None:
    (event,) = not_before([_done(2, 4.2, 4.9)], 5.0)
    assert event.at == 5.0
    assert [each.at for each in one_by_one(event)] == [5.0, 5.0]


def test_events_in_time_are_handed_out_as_they_are() -> None:
    events = [_done(2, 5.0, 5.1), _done(3, 6.0)]
    assert all(one is other for one, other in zip(not_before(events, 5.0), events, strict=True))

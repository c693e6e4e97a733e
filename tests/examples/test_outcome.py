"""The outcome of a sweep, on iterations made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tuning.outcome import Iteration, Outcome


def done(trial: int, iteration: int, value: float, begun: float, seconds: float, process: int = 0) -> Iteration:
    """Returns an iteration whose result reached the driver half a second after its end."""
    config = {"lr": value}
    return Iteration(
        trial=trial,
        trial_id=f"302fe_{trial:05}",
        iteration=iteration,
        value=value,
        config=config,
        begun=begun,
        seconds=seconds,
        process=process,
        reported=begun + seconds + 0.5,
    )


def outcome(*iterations: Iteration, **options: Any) -> Outcome:
    return Outcome(iterations, 12.0, **{"devices": 2, "mode": "max", "target": 0.5, **options})


SWEEP = (done(0, 1, 0.2, 1.0, 4.0, 7), done(1, 1, 0.6, 2.0, 3.0, 8), done(0, 2, 0.7, 5.0, 5.0, 7))


def test_the_best_and_the_target() -> None:
    found = outcome(*SWEEP)
    assert found.best is SWEEP[2]
    assert found.to_target == 5.5
    assert found.trials == 2
    # Start-up took a second.
    assert (found.last_end, found.makespan) == (10.0, 9.0)
    assert outcome(*SWEEP, target=0.9).to_target is None


def test_where_less_is_better() -> None:
    found = outcome(*SWEEP, mode="min", target=0.2)
    assert found.best is SWEEP[0]
    assert found.to_target == 5.5
    assert outcome(*SWEEP, mode="min", target=0.1).to_target is None


def test_how_busy_devices_were() -> None:
    found = outcome(*SWEEP)
    assert found.utilisation_since_call == pytest.approx((4.0 + 5.0 + 3.0) / 20.0)
    assert found.utilisation == pytest.approx((4.0 + 5.0 + 3.0) / 18.0)
    assert sorted(found.timeline.busy_fractions.values()) == pytest.approx([0.3, 0.9])


def test_a_process_stays_on_its_device_and_a_new_one_takes_the_place_of_the_last() -> None:
    found = outcome(
        done(0, 1, 0.0, 0.0, 2.0, 1),
        done(1, 1, 0.0, 0.0, 1.0, 2),
        done(0, 2, 0.0, 3.0, 1.0, 1),
        done(2, 1, 0.0, 3.5, 1.0, 3),
    )
    places = {(segment.row, segment.start): segment.devices for segment in found.timeline.segments}
    assert places[0, 0.0] == places[0, 3.0]
    assert places[1, 0.0] == places[2, 3.5] != places[0, 0.0]


def test_processes_that_overlap_on_more_than_there_is_are_not_counted_twice() -> None:
    found = outcome(*(done(trial, 1, 0.0, 0.0, 10.0, trial) for trial in range(3)))
    assert found.utilisation == 1.0

"""Trials of one key that are unlike: what one of them takes on several devices tells of the width, not of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, Result, Trial, TrialGroup
from fluid.rehearsal import Overheads, RehearsalBackend, ReplayedIteration

OVERHEADS = Overheads(
    alpha=1.12, beta=1.06, epsilon=0.5, server_s=0.0, lane_s=0.1, start_s=0.5, save_s=0.1, restore_s=0.1
)
#: Seconds on four devices by those on one.
ON_FOUR = 1.06**3 / 4


class Sleeping:
    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": 1.0 / i}, config["seconds"]) for i in iterations]


def submit(executor: FluidExecutor, *trials: tuple[float, int]) -> list[Result]:
    """Runs trials, of so many seconds and iterations each; returns the results of the first."""
    group = [Trial(Sleeping, {"seconds": each}, budget=count, profile_key="key") for each, count in trials]
    handle = executor.submit_trialgroup(TrialGroup(group))
    first = group[0].trial_id
    return [result for result in handle.results() if result.trial_id == first]


def executor_of(tmp_path: Path, **options: Any) -> FluidExecutor:
    backend = RehearsalBackend(4, overheads=OVERHEADS)
    return FluidExecutor(backend, max_width=4, verbose=0, run_dir=tmp_path / "run", **options)


@pytest.mark.parametrize("packing", ["auto", "lane", "off"])
def test_a_long_trial_that_was_packed_at_first_spreads_over_all_devices_once_it_is_alone(
    tmp_path: Path, packing: str
) -> None:
    with executor_of(tmp_path, packing=packing) as executor:
        results = submit(executor, (20.0, 40), *[(1.0, 20)] * 12)
    assert results[-1].width == 4.0
    assert sum(result.seconds for result in results) < 0.5 * 40 * 20.0, "it took 780 s, most of them on one device"


@pytest.mark.parametrize("seconds", [0.1, 10.0])
def test_a_trial_that_begins_on_all_devices_stays_there_however_unlike_it_is(tmp_path: Path, seconds: float) -> None:
    with executor_of(tmp_path) as executor:
        submit(executor, (1.0, 30))
        results = submit(executor, (seconds, 30))
    assert {result.width for result in results} == {4.0}
    assert sum(result.seconds for result in results) == pytest.approx(30 * seconds * ON_FOUR)

"""Elastic trials leave checkpoints, too: rank 0 saves for all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
from elastic.trainables import Regression  # noqa: E402

from fluid import kept_checkpoints  # noqa: E402
from fluid.executor import FluidExecutor  # noqa: E402
from fluid.trialgroup import Search, Trial, TrialGroup  # noqa: E402

PATIENCE = 120.0


class Paced(Regression):
    """Takes as long for a batch as a device would for its part of it, so that width pays on any machine."""

    def before_batch(self) -> None:
        time.sleep(0.05 / self.size)

    def end_iteration(self, metrics: dict[str, float]) -> Mapping[str, Any]:
        found = super().end_iteration(metrics)
        return {**found, "wave": abs((self.iteration + 1) % 7 - 5) + 10.0 / (self.iteration + 1)}


@pytest.mark.parametrize("keep", ["last", "best:1"])
def test_a_trial_on_two_devices(tmp_path: Path, keep: str) -> None:
    with FluidExecutor("local", 2, max_packing=1, verbose=0, run_dir=tmp_path, keep=keep) as executor:
        group = TrialGroup([Trial(Paced, {}, budget=10**6, trial_id="a")], search=Search("wave", "min"))
        handle = executor.submit_trialgroup(group)
        results = []
        for result in handle.results():
            results.append(result)
            if sum(one.width == 2.0 for one in results) == 12:
                handle.stop("a")
        assert handle.wait(PATIENCE) and results[-1].width == 2.0
        last = results[-1].iteration
    kept = [one for one in kept_checkpoints(tmp_path, "a") if "kept" in one.path.parts]
    if keep == "last":
        assert len(kept) == 1 and kept[0].iteration >= last
    else:
        told = [(result.metrics["wave"], result.iteration) for result in results]
        assert [one.iteration for one in kept] == [min(told)[1]]
    from fluid import load

    loaded = load(tmp_path).trials[0].load_checkpoint(kept[0].path)
    assert loaded.seen == 5 * kept[0].iteration, "it is that of its iteration, and not of the one after"

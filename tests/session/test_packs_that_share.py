"""Packs of trials that share data on a device of little memory, with real lanes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fluid import Device, FluidExecutor, Trial, TrialGroup  # noqa: E402
from fluid.fused import SGD, FusedTrainable, TensorData  # noqa: E402

pytestmark = pytest.mark.slow

MB = 2**20


class OnData(FusedTrainable):
    """A small model on a hundred megabytes of data."""

    iteration_batches = 20

    def build(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(64, 10)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"])

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.ones(100 * MB // 4 // 64, 64)
        return TensorData([x, torch.zeros(len(x), dtype=torch.long)], batch_size=32, seed=seed)


def test_forty_trials_that_share_their_data_are_in_packs_that_fill_the_device() -> None:
    # Seven copies of the data would be too much.
    device = Device(0, kind="cpu", memory_bytes=700 * MB)
    with FluidExecutor("local", [device], packing="fused", max_fused=16, verbose=0) as executor:
        trials = [Trial(OnData, {"lr": 0.01 * n, "seed": n}, budget=4, profile_key="k") for n in range(40)]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        rows = Counter(result.rows for result in handle.results())
        need = executor.profile.row_memory("k")
        assert not handle.failures
    assert set(rows) == {16, 8} and rows[16] == 32 * 4, "16, 16, and the 8 that are left"
    assert need is not None and 100 * MB <= need.shared_bytes < 110 * MB
    assert need.own_peak_bytes < 25 * MB

"""Sweeps on a machine of which a GPU has failed, with a stand-in for PyTorch in real lanes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends import local
from fluid.gpu.nvml import Gpu

pytestmark = pytest.mark.slow

#: GPU-0 cannot be used at all; on GPU-2 work fails, and it is of no use to a process from then on.
TORCH = """
import os
from types import SimpleNamespace

used, failed = [], []

def zeros(count, device):
    used.append(True)
    if "GPU-0" in os.environ["CUDA_VISIBLE_DEVICES"]:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

def work():
    if "GPU-2" in os.environ["CUDA_VISIBLE_DEVICES"]:
        failed.append(True)
        synchronize()

def synchronize(gpu=0):
    if failed:
        raise RuntimeError("CUDA error: unspecified launch failure")

def stats(gpu):
    return {f"{name}_bytes": {"all": {"current": 0, "peak": 0}} for name in ("allocated", "reserved")}

set_num_threads = lambda count: None
mm = lambda one, other: None
backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))
cuda = SimpleNamespace(
    synchronize=synchronize,
    empty_cache=lambda: None,
    memory_reserved=lambda gpu: 0.0,
    is_initialized=lambda: bool(used),
    device_count=lambda: 1,
    mem_get_info=lambda gpu: (8e9, 10e9),
    memory_stats_as_nested_dict=stats,
    reset_peak_memory_stats=lambda gpu: None,
)
"""


def work(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    import sys

    for _ in range(3):
        sys.modules["torch"].work()
        yield {"x": 1}


def sweep(folder: Path, gpus: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[str]:
    """Runs some trials; returns the states in which they end."""
    (folder / "torch.py").write_text(TORCH, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(local, "find_gpus", lambda: [Gpu(f"GPU-{index}", 10e9) for index in range(gpus)])
    backend = local.LocalBackend(preload=["torch"], run_dir=folder / "run")
    with FluidExecutor(backend, packing="off", run_dir=folder / "session", verbose=0, **options) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(work, {}, trial_id=f"t{i}") for i in range(8)]))
        handle.wait(90)
        return {state.value for state in handle.states.values()}


def test_a_gpu_that_no_lane_can_use_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # With spare lanes, trials whose lane does not start go to the warm lane of the other one.
    assert sweep(tmp_path, 2, monkeypatch, spare_lanes=0) == {"DONE"}
    why = "3 lanes in a row could not be started there, the last because it cannot use its device: "
    assert [
        f"device 0 is given up: {why}RuntimeError: CUDA error: uncorrectable ECC error encountered"
    ] == caplog.messages


def test_trials_do_not_fail_for_a_gpu_on_which_their_work_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(tmp_path, 3, monkeypatch) == {"DONE"}

"""A lane that cannot use its GPU never says that it is ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid._clock import MonotonicClock
from fluid.engine.events import LaneReady
from fluid.lane.device.warming import may_pass
from fluid.lane.protocol import LaneOptions, LaneUnusable, LaneWarming

_NOT_READY = "AcceleratorError: CUDA error: the MPS server is not ready to accept new MPS client requests"
_CLIENT = (("CUDA_MPS_PIPE_DIRECTORY", "/x"),)


@pytest.mark.parametrize(
    ("environment", "error", "passes"),
    [
        (_CLIENT, _NOT_READY, True),
        (_CLIENT, "CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server", True),
        ((), _NOT_READY, False),
        (_CLIENT, "CUDA error: the hardware resources required to create MPS client have been exhausted", False),
    ],
)
def test_what_passes_is_told_from_what_does_not(environment: Any, error: str, passes: bool) -> None:
    assert may_pass(LaneOptions(0, kind="gpu", environment=environment), error) is passes


#: A stand-in for PyTorch on a machine whose first GPU has failed.
DEAD = """
import os
from types import SimpleNamespace

def zeros(count, device):
    if "GPU-refused" in os.environ["CUDA_VISIBLE_DEVICES"]:
        raise RuntimeError("CUDA error: the MPS server is not ready to accept new MPS client requests")
    if "GPU-dead" in os.environ["CUDA_VISIBLE_DEVICES"]:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

mm = lambda one, other: None
backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))
cuda = SimpleNamespace(
    synchronize=lambda gpu=0: None,
    empty_cache=lambda: None,
    memory_reserved=lambda gpu: 0.0,
    is_initialized=lambda: False,
    device_count=lambda: 1,
)
"""


def test_a_real_lane_on_a_dead_gpu_says_why_and_ends(
    make_server: Callable[..., Any], fork: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(DEAD, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    server = make_server(preload=("torch",))
    well = fork(server, 0, kind="gpu", visible="GPU-well", launched_at=MonotonicClock().now())
    well.receive(LaneWarming)
    assert 0.0 < well.receive(LaneReady).seconds < 90.0
    lane = fork(server, 1, kind="gpu", visible="GPU-dead")
    unusable = lane.receive(LaneUnusable)
    assert unusable.reason == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert not unusable.may_pass
    with pytest.raises(AssertionError, match="the lane ended"):
        lane.receive(LaneReady)


def test_a_real_lane_that_an_mps_server_refuses_ends_with_a_status_of_its_own(
    make_server: Callable[..., Any], fork: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA may remember in a process that it could not be initialised."""
    (tmp_path / "torch.py").write_text(DEAD, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    server = make_server(preload=("torch",))
    lane = fork(server, 0, kind="gpu", visible="GPU-refused", environment=_CLIENT)
    assert lane.receive(LaneUnusable).may_pass
    (exited,) = eventually(server.poll)
    assert exited.reason == "exited with status 72"

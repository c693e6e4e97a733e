"""A lane that cannot use its GPU never says that it is ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid._clock import VirtualClock
from fluid.lane import warming
from fluid.lane.device import DeviceUnusableError
from fluid.lane.device_messages import LaneUnusable
from fluid.lane.messages import LaneOptions, LaneWarm
from fluid.lane.own_memory import OwnMemory
from fluid.lane.warming import warm_up_patiently

_NOT_READY = "AcceleratorError: CUDA error: the MPS server is not ready to accept new MPS client requests"
_CLIENT = (("CUDA_MPS_PIPE_DIRECTORY", "/x"),)


def refused(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, errors: list[str]) -> list[str]:
    """Makes the first attempts fail, a second each; returns the errors that are left."""
    left = list(errors)

    def warm_up(options: LaneOptions, own: OwnMemory) -> float:
        clock.advance_to(clock.now() + 1.0)
        if left:
            raise DeviceUnusableError(0, left.pop(0))
        return 300e6

    monkeypatch.setattr(warming, "warm_up", warm_up)
    return left


def test_a_client_waits_for_an_mps_server_that_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    left = refused(monkeypatch, clock, [_NOT_READY] * 3)
    options = LaneOptions(0, kind="gpu", environment=_CLIENT)
    assert warm_up_patiently(options, OwnMemory(options), clock, pause_s=0.0) == 300e6
    assert not left


@pytest.mark.parametrize(
    ("environment", "error", "attempts"),
    [
        (_CLIENT, _NOT_READY, 5),
        ((), _NOT_READY, 1),
        (_CLIENT, "CUDA error: the hardware resources required to create MPS client have been exhausted", 1),
    ],
)
def test_it_does_not_wait_for_ever_or_for_what_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, environment: Any, error: str, attempts: int
) -> None:
    clock = VirtualClock()
    left = refused(monkeypatch, clock, [error] * 9)
    options = LaneOptions(0, kind="gpu", environment=environment)
    with pytest.raises(DeviceUnusableError):
        warm_up_patiently(options, OwnMemory(options), clock, pause_s=0.0)
    assert len(left) == 9 - attempts


#: A stand-in for PyTorch on a machine whose first GPU has failed.
DEAD = """
import os
from types import SimpleNamespace

def zeros(count, device):
    if "GPU-dead" in os.environ["CUDA_VISIBLE_DEVICES"]:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

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
    fork(server, 0, kind="gpu", visible="GPU-well").receive(LaneWarm)
    lane = fork(server, 1, kind="gpu", visible="GPU-dead")
    unusable = lane.receive(LaneUnusable)
    assert unusable.reason == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    with pytest.raises(AssertionError, match="the lane ended"):
        lane.receive(LaneWarm)

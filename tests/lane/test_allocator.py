"""The settings of PyTorch's allocator, against a stand-in for PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluid.lane.device.device import DeviceUnusableError
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.device.warming import expand_segments, warm_up
from fluid.lane.protocol import LaneOptions


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder; no variable configures the allocator."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "580.82")
    return tmp_path / "fluid"


class FakeTorch:
    """PyTorch in a process of its own, on a GPU whose driver supports expandable segments, or does not.

    Args:
        refuses: the error for a segment that expands; empty if there is none.
        at: which attempt to take such a segment fails, from 1.
        breaks: whether CUDA fails from then on.
        full: whether there is no memory for more than a single number.
        model: of the GPU.
    """

    def __init__(
        self, refuses: str = "", *, at: int = 1, breaks: bool = False, full: bool = False, model: str = "NVIDIA H200"
    ) -> None:
        self.settings: list[str] = []
        self.refuses, self.at, self.breaks, self.full = refuses, at, breaks, full
        self.attempts = 0
        self.broken = False
        memory = SimpleNamespace(_set_allocator_settings=self.settings.append)
        self.cuda = SimpleNamespace(
            memory=memory,
            get_device_name=lambda gpu: model,
            synchronize=lambda gpu=0: None,
            empty_cache=lambda: None,
            is_initialized=lambda: True,
            memory_reserved=lambda gpu: 0.0,
        )
        self.backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))

    def zeros(self, count: int | tuple[int, int], device: str) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if self.full and isinstance(count, int) and count > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 16.00 MiB")
        if self.expands and self.refuses:
            self.attempts += 1
            if self.attempts >= self.at:
                self.broken = self.breaks
                raise RuntimeError(self.refuses)

    def mm(self, one: None, other: None) -> None:
        pass

    @property
    def expands(self) -> bool:
        return self.settings[-1:] == ["expandable_segments:True"]


REFUSAL = "CUDA driver error: operation not supported"


def test_segments_expand_where_that_is_supported(cache: Path) -> None:
    torch = FakeTorch()
    assert expand_segments(torch) == ""
    assert torch.settings == ["expandable_segments:True"] and not cache.exists()


@pytest.mark.parametrize(("refusal", "at"), [(REFUSAL, 1), (REFUSAL, 2), ("CUDA out of memory", 1)])
def test_they_do_not_where_the_driver_refuses_and_this_is_remembered_for_a_day(
    cache: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, at: int
) -> None:
    torch, later = FakeTorch(refusal, at=at), FakeTorch(refusal)
    assert expand_segments(torch) == f"RuntimeError: {refusal}"
    assert not torch.expands
    torch.zeros(1 << 22, "cuda:0")
    assert expand_segments(later) == "" and later.settings == [], "another lane does not try"
    (note,) = cache.iterdir()
    assert note.name == "no-expandable-segments-580.82-NVIDIA-H200"
    assert expand_segments(FakeTorch(refusal, model="NVIDIA A40")) != "", "another model may"
    os.utime(note, (note.stat().st_atime, note.stat().st_mtime - 25 * 3600))
    assert expand_segments(FakeTorch(refusal)) != ""
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "595.10")
    assert expand_segments(FakeTorch(refusal)) != "", "another driver may support them"


def test_the_lanes_of_a_session_remember_it_where_there_is_no_cache(tmp_path: Path, cache: Path) -> None:
    cache.touch()  # A file where the folder should be.
    assert expand_segments(FakeTorch(REFUSAL), str(tmp_path)) != ""
    later = FakeTorch(REFUSAL)
    assert expand_segments(later, str(tmp_path)) == "" and later.settings == []
    assert expand_segments(FakeTorch(REFUSAL, model="NVIDIA A40"), str(tmp_path)) != ""


def test_a_full_gpu_says_nothing_about_segments(cache: Path) -> None:
    torch = FakeTorch(full=True)
    assert expand_segments(torch) == ""
    assert torch.expands and not cache.exists()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    torch = FakeTorch()
    assert expand_segments(torch) == "" and torch.settings == []


def test_an_old_pytorch_without_the_setting(cache: Path) -> None:
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda gpu: "NVIDIA H200"))
    assert expand_segments(torch) == ""

    def refuse(setting: str) -> None:
        raise RuntimeError(f"Unrecognized CachingAllocator option: {setting}")

    torch.cuda.memory = SimpleNamespace(_set_allocator_settings=refuse)
    assert expand_segments(torch) == "" and not cache.exists(), "the driver has refused nothing"


# --- As part of a lane's start


def start(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: tuple[tuple[str, str], ...] = ()
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    options = LaneOptions(0, kind="gpu", note=str(tmp_path / "lane-0"), environment=environment)
    warm_up(options, OwnMemory(options))


def test_a_lane_starts_without_them_where_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = FakeTorch(REFUSAL)
    start(torch, monkeypatch, tmp_path)
    assert torch.settings == ["expandable_segments:True", "expandable_segments:False"]


def test_a_lane_in_which_that_breaks_cuda_ends_and_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(DeviceUnusableError, match=r"further lanes do without: RuntimeError: CUDA driver error: oper"):
        start(FakeTorch(REFUSAL, breaks=True), monkeypatch, tmp_path)
    later = FakeTorch(REFUSAL, breaks=True)
    start(later, monkeypatch, tmp_path)
    assert later.settings == []


def test_a_client_of_mps_that_another_one_may_have_broken_says_nothing_to_later_sessions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    client = (("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps"),)
    with pytest.raises(DeviceUnusableError):
        start(FakeTorch("CUDA error: unspecified launch failure", breaks=True), monkeypatch, tmp_path, client)
    assert not cache.exists()
    later = FakeTorch()
    start(later, monkeypatch, tmp_path, client)
    assert later.settings == [], "the session does without, in case it was the driver"


def test_a_gpu_that_cannot_be_used_at_all_says_nothing_about_segments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    torch = FakeTorch()
    torch.broken = True
    with pytest.raises(DeviceUnusableError, match=r"^RuntimeError: CUDA error: unspecified launch failure$"):
        start(torch, monkeypatch, tmp_path)
    assert torch.settings == [] and not cache.exists()


@pytest.mark.gpu
def test_segments_expand_on_this_gpu() -> None:
    torch = pytest.importorskip("torch")
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    refusal = expand_segments(torch)
    if refusal:
        pytest.skip(f"this driver, or the sandbox around it, refuses them: {refusal}")
    kept = torch.zeros(1 << 20, device="cuda")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert kept.sum().item() == 0.0

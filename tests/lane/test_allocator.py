"""The settings of PyTorch's allocator, against a stand-in for PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluid.lane.allocator import expand_segments


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


class FakeTorch:
    """PyTorch on a GPU whose driver supports expandable segments, or does not."""

    def __init__(self, supported: bool = True) -> None:
        self.settings: list[str] = []
        self.supported = supported
        self.cuda = SimpleNamespace(memory=SimpleNamespace(_set_allocator_settings=self.settings.append))

    def zeros(self, count: int, device: str) -> None:
        if self.settings[-1:] == ["expandable_segments:True"] and not self.supported:
            raise RuntimeError("CUDA driver error: unknown error")


def test_segments_expand_where_that_is_supported() -> None:
    torch = FakeTorch()
    expand_segments(torch)
    assert torch.settings == ["expandable_segments:True"]


def test_they_do_not_where_the_driver_refuses() -> None:
    torch = FakeTorch(supported=False)
    expand_segments(torch)
    assert torch.settings[-1] == "expandable_segments:False"
    torch.zeros(1, "cuda:0")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    torch = FakeTorch()
    expand_segments(torch)
    assert torch.settings == []


def test_an_old_pytorch_without_the_setting() -> None:
    torch: Any = SimpleNamespace(cuda=SimpleNamespace())
    expand_segments(torch)

    def refuse(setting: str) -> None:
        raise RuntimeError(f"Unrecognized CachingAllocator option: {setting}")

    torch.cuda.memory = SimpleNamespace(_set_allocator_settings=refuse)
    expand_segments(torch)


@pytest.mark.gpu
def test_segments_expand_on_this_gpu() -> None:
    torch = pytest.importorskip("torch")
    expand_segments(torch)
    kept = torch.zeros(1 << 20, device="cuda")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert kept.sum().item() == 0.0

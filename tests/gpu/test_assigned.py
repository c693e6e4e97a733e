"""Which GPU a number means that Ray has assigned: NVML and CUDA, which count in other orders, are stand-ins here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import FAST_TOKEN, SLOW_TOKEN, make_library

from fluid.gpu import assigned
from fluid.gpu.assigned import find_assigned
from fluid.gpu.nvml import Gpu, find_gpus
from fluid.gpu.visible_devices import visible

GIB = float(1 << 30)
#: A node's GPUs, in the order of the PCI bus: the second is the faster one.
SLOW = Gpu(SLOW_TOKEN, 40 * GIB, "NVIDIA A100", 39 * GIB)
FAST = Gpu(FAST_TOKEN, 140 * GIB, "NVIDIA H200", 139 * GIB)


@pytest.fixture
def has_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes NVML know these GPUs."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def have(*gpus: Gpu) -> None:
        by_name: dict[int | str, Gpu] = {**dict(enumerate(gpus)), **{gpu.token: gpu for gpu in gpus}}

        def find_named(names: str | None) -> list[Gpu]:
            return [by_name[name] for name in visible(names, len(gpus), by_name.__contains__)]

        monkeypatch.setattr(assigned, "find_named", find_named)

    return have


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def has_cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))


@pytest.fixture
def no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def test_a_number_means_the_gpu_that_cuda_takes_it_for(has_gpus: Callable[..., None], has_cuda: None) -> None:
    has_gpus(SLOW, FAST)
    assert [find_assigned(name) for name in "01"] == [(FAST, ""), (SLOW, "")]


def test_cuda_is_not_asked_where_it_counts_by_the_bus(
    has_gpus: Callable[..., None], no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpus(SLOW, FAST)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [find_assigned(name) for name in "01"] == [(SLOW, ""), (FAST, "")]


def test_a_uuid_means_itself(has_gpus: Callable[..., None], no_cuda: None) -> None:
    has_gpus(SLOW, FAST)
    assert find_assigned(FAST.token) == (FAST, "")


def test_the_only_gpu_is_the_one(has_gpus: Callable[..., None], no_cuda: None) -> None:
    has_gpus(FAST)
    assert find_assigned("0") == (FAST, "")


def test_where_cuda_cannot_be_asked_unlike_gpus_are_doubtful(has_gpus: Callable[..., None], no_cuda: None) -> None:
    has_gpus(SLOW, FAST)
    gpu, doubt = find_assigned("1")
    assert gpu == FAST
    assert "NVIDIA A100, NVIDIA H200" in doubt and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in doubt
    twin = SLOW._replace(token="GPU-00000000-0000-0000-0000-0000000000c3")
    has_gpus(SLOW, twin)
    assert find_assigned("1") == (twin, "")


def test_without_nvml_cuda_tells_all(has_gpus: Callable[..., None], has_cuda: None) -> None:
    has_gpus()
    assert find_assigned("0") == (FAST._replace(free_bytes=None), "")
    assert find_assigned("7") == (None, ""), "CUDA has no such GPU"


def test_without_both_it_is_unknown(has_gpus: Callable[..., None], no_cuda: None) -> None:
    has_gpus()
    assert find_assigned("0") == (None, "")


@pytest.mark.gpu
def test_cuda_and_nvml_tell_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    for number, gpu in enumerate(find_gpus()):
        seen = assigned._ask_cuda(str(number))
        assert seen is not None and gpu.token.partition("-")[2] == seen.token
        assert seen.name == gpu.name
        assert os.environ.get("CUDA_VISIBLE_DEVICES") is None

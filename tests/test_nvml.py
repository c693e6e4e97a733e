"""Finding GPUs."""

from __future__ import annotations

import pytest

from fluid.nvml import find_gpus, visible

UUIDS = {"GPU-a", "GPU-b", "MIG-c"}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 0 ", [1, 0]),
        ("0,3,1", [0]),
        ("0,-1,1", [0]),
        ("1,1,0", [1]),
        ("GPU-b,MIG-c", ["GPU-b", "MIG-c"]),
        ("GPU-b,GPU-x,GPU-a", ["GPU-b"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(setting: str | None, expected: list[int | str]) -> None:
    assert visible(setting, 3, UUIDS.__contains__) == expected


def test_a_machine_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == []

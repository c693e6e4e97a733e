"""To which cores lanes are pinned on machines with several NUMA nodes, of which NVML tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fluid.backends.hosts import host as numa
from fluid.backends.hosts.host import NumaCores
from fluid.engine.commands import StartTrial
from fluid.engine.events import IterationDone
from fluid.resources import available_cores
from fluid.trainables.payload import payload_of


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({"GPU-a": (0, 1, 9), "GPU-b": (2, 3)}, [(0, 1), (2, 3)]),
        ({"GPU-a": (0, 1), "GPU-b": (0, 1)}, [(), ()]),  # No GPU of the session is near the other cores.
        ({"GPU-a": (0, 1, 2, 3), "GPU-b": (0, 1, 2, 3)}, [(), ()]),  # One node.
        ({"GPU-a": (0, 1, 2, 3), "GPU-b": ()}, [(), ()]),  # Unknown.
    ],
)
def test_lanes_are_pinned_where_every_core_serves_a_gpu(
    monkeypatch: pytest.MonkeyPatch, nodes: dict[str, tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(numa, "available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(numa, "cpu_cores", nodes.__getitem__)
    cores = NumaCores(list(nodes))
    assert [cores.near(token) for token in nodes] == expected
    both = tuple(sorted({core for found in expected for core in found}))
    assert cores.near("GPU-a,GPU-b") == both
    assert cores.near("GPU-a,GPU-later") == cores.near("") == ()


def test_without_gpus_no_lane_is_pinned() -> None:
    assert NumaCores([]).near("") == ()


class Cores:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def step(self) -> dict[str, Any]:
        return {"cores": available_cores()}


def test_a_lane_is_pinned_to_the_cores_of_its_gpu(
    make_drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = make_drive(1)
    first = available_cores()[0]
    monkeypatch.setattr(drive.backend._host._numa, "near", lambda token: (first,))
    drive.backend.register("t", payload_of(Cores, {}))
    (lane,) = drive.lanes(0)
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert drive.of(IterationDone, "t").metrics == {"cores": [first]}

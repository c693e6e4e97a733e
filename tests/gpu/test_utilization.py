"""The utilization of a GPU, against a stand-in for NVML's Python package, and on a GPU itself."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from fluid.gpu import nvml, utilization
from fluid.gpu.nvml import find_gpus, find_handle
from fluid.gpu.utilization import UnitUse, running_share

NAMES = {name: number for number, name in enumerate(utilization._UNITS, 4)}


class NVMLError(Exception):
    """As pynvml's."""


class FakeGpm:
    """What pynvml answers about a GPU whose units have been in use for so many seconds each."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        self.NVMLError = NVMLError
        self.now = 0.0
        self.used = dict.fromkeys(NAMES.values(), 0.0)
        self.broken: dict[int, int] = {}
        self.supported = True
        for name, number in NAMES.items():
            setattr(self, name, number)

    def run(self, seconds: float, **shares: float) -> None:
        self.now += seconds
        for name, share in shares.items():
            self.used[NAMES[f"NVML_GPM_METRIC_{name}"]] += share * seconds

    def nvmlGpmSampleAlloc(self) -> dict[str, Any]:
        return {}

    def nvmlGpmSampleGet(self, handle: Any, sample: dict[str, Any]) -> None:
        if not self.supported:
            raise NVMLError("Not Supported")
        sample.update(now=self.now, used=dict(self.used))

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=-1, value=0.0) for _ in range(210)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == 1
        seconds = asked.sample2["now"] - asked.sample1["now"]
        assert seconds >= 0.0, "the samples are in order"
        for metric in asked.metrics[: asked.numMetrics]:
            unit = metric.metricId
            metric.nvmlReturn = self.broken.get(unit, 0)
            used = asked.sample2["used"][unit] - asked.sample1["used"][unit]
            metric.value = 100.0 * used / seconds if seconds else float("nan")


@pytest.fixture
def gpm(monkeypatch: pytest.MonkeyPatch) -> FakeGpm:
    fake = FakeGpm()
    for module in (nvml, utilization):
        monkeypatch.setattr(module, "pynvml", fake, raising=False)
    return fake


def test_the_busiest_unit_counts_since_the_call_before(gpm: FakeGpm) -> None:
    use = UnitUse("handle")
    assert use.share() is None, "an interval begins"
    gpm.run(2.0, DRAM_BW_UTIL=0.7, ANY_TENSOR_UTIL=0.4)
    assert use.share() == pytest.approx(0.7)
    gpm.run(1.0, DRAM_BW_UTIL=0.1, FP32_UTIL=0.3)
    assert use.share() == pytest.approx(0.3)
    gpm.run(1.0)
    assert use.share() == 0.0


def test_a_unit_without_a_counter_says_nothing(gpm: FakeGpm) -> None:
    use = UnitUse("handle")
    use.share()
    assert use.share() is None, "no time has passed"
    gpm.run(1.0, FP64_UTIL=0.9, FP16_UTIL=0.2)
    gpm.broken[NAMES["NVML_GPM_METRIC_FP64_UTIL"]] = 3
    assert use.share() == pytest.approx(0.2)


def test_a_gpu_without_gpm_says_nothing(gpm: FakeGpm) -> None:
    gpm.supported = False
    use = UnitUse("handle")
    assert use.share() is None and use.share() is None
    assert UnitUse(None).share() is None and running_share(None) is None


@pytest.mark.gpu
def test_a_gpu_with_much_to_do_is_busy() -> None:
    """Large products in half precision keep the tensor cores of any GPU in use."""
    torch = pytest.importorskip("torch")
    handle = find_handle(find_gpus()[0].token)
    use = UnitUse(handle)
    matrix = torch.ones(8192, 8192, dtype=torch.float16, device="cuda")
    use.share()
    began = time.monotonic()
    while time.monotonic() - began < 2.0:
        for _ in range(10):
            matrix @ matrix
        torch.cuda.synchronize()
    shares = use.share(), running_share(handle)
    assert (shares[1] or 0.0) > 0.8
    if shares[0] is None:
        pytest.skip("this GPU or driver has no GPM")
    assert shares[0] > 0.3

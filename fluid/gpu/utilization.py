"""The utilization of a GPU: by the time in which kernels ran, and by the use of its units."""

from __future__ import annotations

from typing import Any

from fluid._imports import try_import
from fluid.gpu.nvml import query

with try_import("pynvml", install="pip install nvidia-ml-py"):
    import pynvml

#: GPM's names of the units. Trials that run side by side share each of them.
_UNITS = (
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "NVML_GPM_METRIC_FP64_UTIL",
    "NVML_GPM_METRIC_FP32_UTIL",
    "NVML_GPM_METRIC_FP16_UTIL",
    "NVML_GPM_METRIC_INTEGER_UTIL",
)


def running_share(handle: Any) -> float | None:
    """Returns the share of the last sampling period, up to a second, in which a kernel of any process ran on a GPU.

    Args:
        handle: of :func:`fluid.gpu.nvml.find_handle`.

    Returns:
        0 to 1, whatever part of the GPU the kernels filled; ``None`` if the GPU does not report it, or for no handle.

    Example:
        >>> from fluid.gpu.nvml import find_handle
        >>> running_share(find_handle("GPU-unknown")) is None
        True
    """
    if handle is None:
        return None
    share: float | None = query(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0)
    return share


class UnitUse:
    """Measures the use of a GPU's busiest unit: tensor cores, an arithmetic pipe or memory bandwidth.

    By NVML's GPU performance monitoring (GPM), which GPUs have from Hopper on.

    Args:
        handle: of :func:`fluid.gpu.nvml.find_handle`.

    Example:
        >>> from fluid.gpu.nvml import find_handle
        >>> UnitUse(find_handle("GPU-unknown")).share() is None
        True
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        #: The sample at the begin of the interval, and the one to be filled at its end; empty before the first.
        self._samples: list[Any] = []

    def share(self) -> float | None:
        """Ends an interval and begins the next one.

        Returns:
            Share of the interval in which all processes together used the busiest unit, 0 to 1; ``None`` at the first
            call, or if the GPU does not report it.
        """
        share: float | None = None if self._handle is None else query(self._read)
        return share

    def _read(self) -> float | None:
        if not self._samples:
            samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
            pynvml.nvmlGpmSampleGet(self._handle, samples[0])
            self._samples = samples
            return None
        begin, end = self._samples
        pynvml.nvmlGpmSampleGet(self._handle, end)
        self._samples = [end, begin]
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(_UNITS)
        asked.sample1, asked.sample2 = begin, end
        for index, name in enumerate(_UNITS):
            asked.metrics[index].metricId = getattr(pynvml, name)
        pynvml.nvmlGpmMetricsGet(asked)
        metrics = [asked.metrics[index] for index in range(len(_UNITS))]
        # NaN where a counter does not run.
        shares = [one.value / 100.0 for one in metrics if one.nvmlReturn == 0 and 0.0 <= one.value <= 100.0]
        return max(shares, default=None)

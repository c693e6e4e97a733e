"""PyTorch's global and per-thread settings, to be swapped between trials of one lane.

Each is read by a C function of some 50 ns. PyTorch's releases differ in which of them there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

#: What a getter gives where old and new ways to set the same were mixed, which PyTorch refuses to read.
_MIXED = "mixed"
_DEVICES = ("cpu", "cuda")
#: Backends and operators that have a precision of their own, from the general to the special.
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("matmul", "conv", "rnn")),
)
#: Getter and setter in ``torch._C``, and what a process that sets nothing has.
_FLAGS = (
    ("_get_cudnn_enabled", "_set_cudnn_enabled", True),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark", False),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic", False),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32", True),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled", True),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash", True),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient", True),
    ("_get_math_sdp_enabled", "_set_sdp_use_math", True),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", True),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory", True),
)


class TorchSettings:
    """Reads and writes them.

    Args:
        torch: the module.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        c = torch._C
        self._flags: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self._defaults: list[Any] = []
        for getter, setter, default in _FLAGS:
            if hasattr(c, getter) and hasattr(c, setter):
                self._flags.append((getattr(c, getter), getattr(c, setter)))
                self._defaults.append(default)
        self._precision = getattr(c, "_get_fp32_precision_getter", None)
        #: In force since inference mode was last changed here; what it replaced comes back when it is dropped.
        self._inference: Any = None

    def read(self) -> tuple[Any, ...]:
        """Returns them all."""
        torch, c = self._torch, self._torch._C
        return (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            self._autocast(),
            torch.get_default_dtype(),
            self._modes(),
            _read_or_mixed(c._get_float32_matmul_precision),
            () if self._precision is None else tuple([self._precision(*which) for which in _PRECISIONS]),
            tuple([_read_or_mixed(get) for get, _ in self._flags]),
            (c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        )

    def untouched(self) -> tuple[Any, ...]:
        """Returns what a process that sets nothing has."""
        torch = self._torch
        cast = tuple((False, dtype) for dtype in (torch.bfloat16, torch.float16))
        precisions = () if self._precision is None else ("none",) * len(_PRECISIONS)
        modes: tuple[Any, ...] = ((), None, None)
        flags = tuple(self._defaults)
        autocast = (0, True, *cast)
        return (
            False,
            True,
            autocast,
            torch.float32,
            modes,
            "highest",
            precisions,
            flags,
            (False, False),
            (False, True),
        )

    def write(self, wanted: tuple[Any, ...], found: tuple[Any, ...]) -> None:
        """Puts settings in force, given those that are."""
        torch = self._torch
        inference, grad, autocast, dtype, modes, matmul, precisions, flags, deterministic, anomaly = wanted
        if inference != found[0]:
            self._inference = None
            self._inference = torch.inference_mode(inference)
            self._inference.__enter__()
        torch.set_grad_enabled(grad)  # Inference mode changes it.
        if autocast != found[2]:
            self._set_autocast(autocast, found[2])
        if dtype != found[3]:
            torch.set_default_dtype(dtype)
        if modes != found[4]:
            self._set_modes(modes)
        if (matmul, precisions, flags) != (found[5], found[6], found[7]):
            self._set_flags(matmul, precisions, flags)
        if deterministic != found[8]:
            torch._C._set_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        if anomaly != found[9]:
            torch.autograd.set_detect_anomaly(*anomaly)

    def _autocast(self) -> tuple[Any, ...]:
        torch = self._torch
        nested = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        of_devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
        return (nested, torch.is_autocast_cache_enabled(), *of_devices)

    def _set_autocast(self, wanted: tuple[Any, ...], found: tuple[Any, ...]) -> None:
        torch = self._torch
        torch.clear_autocast_cache()  # It has the other trial's weights.
        for _ in range(wanted[0], found[0]):
            torch.autocast_decrement_nesting()
        for _ in range(found[0], wanted[0]):
            torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(wanted[1])
        for device, (enabled, dtype) in zip(_DEVICES, wanted[2:], strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)

    def _modes(self) -> tuple[Any, ...]:
        """The function modes, of which a default device is one, and what PyTorch notes about that device."""
        torch = self._torch
        count = torch._C._len_torch_function_stack()
        stack = tuple([torch._C._get_function_stack_at(at) for at in range(count)]) if count else ()
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return stack, context, getattr(_device_module(), "CURRENT_DEVICE", None)

    def _set_modes(self, wanted: tuple[Any, ...]) -> None:
        torch = self._torch
        stack, context, device = wanted
        for _ in range(torch._C._len_torch_function_stack()):
            torch._C._pop_torch_function_stack()
        for mode in stack:
            torch._C._push_on_torch_function_stack(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = context
        if (module := _device_module()) is not None:
            module.CURRENT_DEVICE = device

    def _set_flags(self, matmul: str, precisions: tuple[str, ...], flags: tuple[Any, ...]) -> None:
        """Sets precisions and flags; the old ways to set a precision first, as they set some of the new ones."""
        c = self._torch._C
        for (_, put), value in zip(self._flags, flags, strict=True):
            if value != _MIXED:
                put(value)
        if matmul != _MIXED:
            c._set_float32_matmul_precision(matmul)
        for which, precision in zip(_PRECISIONS, precisions, strict=False):
            c._set_fp32_precision_setter(*which, precision)


def _device_module() -> Any:
    return sys.modules.get("torch.utils._device")


def _read_or_mixed(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        return _MIXED

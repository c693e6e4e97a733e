"""Global settings of libraries that trials use, to be swapped between trials of one lane: rows of a table.

Each row names the settings, reads and writes them, and names the module without which there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

# -- torch settings ------------------------------------------------------------------------------
#
# PyTorch's settings: those of threads and flags are swapped between trials of one lane, flags are sent to lanes.
#
# Each is read by a C function of some 50 ns. PyTorch's releases differ in which of them there are.


#: What a getter gives where old and new ways to set the same were mixed, which PyTorch refuses to read.
_MIXED = "mixed"
_DEVICES = ("cpu", "cuda")
#: Backends and operators that have a precision of their own, from the general to the special.
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("matmul", "conv", "rnn")),
)
#: Getter and setter in ``torch._C``, and what a process that sets nothing has. A tuple is a setter's arguments.
_FLAGS: tuple[tuple[str, str, Any], ...] = (
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
    *(
        (
            f"_get_cublas_allow_{kind}_reduced_precision_reduction",
            f"_set_cublas_allow_{kind}_reduced_precision_reduction",
            (True, True),
        )
        for kind in ("fp16", "bf16")
    ),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation", False),
)


class TorchFlags(NamedTuple):
    """What holds for the whole process.

    Attributes:
        dtype: the default one.
        matmul: precision of products of float32 matrices.
        precisions: those of :data:`_PRECISIONS`; empty in releases that have none.
        flags: those of :data:`_FLAGS`, by getter.
        deterministic: whether only deterministic algorithms may be used, and whether others only warn.
        anomaly: whether anomalies are detected, and NaNs among them.
    """

    dtype: Any
    matmul: str
    precisions: tuple[str, ...]
    flags: Mapping[str, Any]
    deterministic: tuple[bool, bool]
    anomaly: tuple[bool, bool]


class ThreadModes(NamedTuple):
    """What holds for a thread.

    Attributes:
        inference: whether inference mode is on.
        grad: whether gradients are recorded.
        autocast: nesting, whether weights are cached, and for each device whether it is on and its type.
        functions: the function modes, of which a default device is one, and what PyTorch notes about that device.
    """

    inference: bool
    grad: bool
    autocast: tuple[Any, ...]
    functions: tuple[Any, ...]


class TorchSettings:
    """Reads and writes them.

    Args:
        torch: the module.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        c = torch._C
        self._flags: dict[str, tuple[Callable[[], Any], Callable[..., None]]] = {}
        self._defaults: dict[str, Any] = {}
        for getter, setter, default in _FLAGS:
            if hasattr(c, getter) and hasattr(c, setter):
                self._flags[getter] = getattr(c, getter), getattr(c, setter)
                has_one = isinstance(default, tuple) and not isinstance(
                    getattr(c, getter)(), tuple
                )  # In older releases.
                self._defaults[getter] = default[0] if has_one else default
        self._precision = getattr(c, "_get_fp32_precision_getter", None)
        #: In force since inference mode was last changed here; what it replaced comes back when it is dropped.
        self._inference: Any = None

    def read(self) -> tuple[ThreadModes, TorchFlags]:
        """Returns them all."""
        torch = self._torch
        modes = ThreadModes(
            torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self._autocast(), self._function_modes()
        )
        return modes, self.read_flags()

    def read_flags(self) -> TorchFlags:
        """Returns those that hold for the whole process."""
        torch, c = self._torch, self._torch._C
        return TorchFlags(
            torch.get_default_dtype(),
            _read_or_mixed(c._get_float32_matmul_precision),
            () if self._precision is None else tuple([self._precision(*which) for which in _PRECISIONS]),
            {name: _read_or_mixed(get) for name, (get, _) in self._flags.items()},
            (c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        )

    def untouched(self) -> tuple[ThreadModes, TorchFlags]:
        """Returns what a process that sets nothing has."""
        cast = tuple((False, dtype) for dtype in (self._torch.bfloat16, self._torch.float16))
        return ThreadModes(False, True, (0, True, *cast), ((), None, None)), self.untouched_flags()

    def untouched_flags(self) -> TorchFlags:
        """Returns the flags of a process that sets nothing."""
        precisions = () if self._precision is None else ("none",) * len(_PRECISIONS)
        return TorchFlags(self._torch.float32, "highest", precisions, self._defaults, (False, False), (False, True))

    def write(self, wanted: tuple[ThreadModes, TorchFlags], found: tuple[ThreadModes, TorchFlags]) -> None:
        """Puts settings in force, given those that are."""
        torch, (modes, flags), (now, flags_now) = self._torch, wanted, found
        if modes.inference != now.inference:
            self._inference = None
            self._inference = torch.inference_mode(modes.inference)
            self._inference.__enter__()
        torch.set_grad_enabled(modes.grad)  # Inference mode changes it.
        if modes.autocast != now.autocast:
            self._set_autocast(modes.autocast, now.autocast)
        if modes.functions != now.functions:
            self._set_function_modes(modes.functions)
        self.write_flags(flags, flags_now)

    def write_flags(self, wanted: TorchFlags, found: TorchFlags) -> None:
        """Puts flags in force, given those that are; the old ways to set a precision first, as they set new ones."""
        torch, c = self._torch, self._torch._C
        if wanted.dtype != found.dtype:
            torch.set_default_dtype(wanted.dtype)
        if wanted[1:4] != found[1:4]:
            for name, (_, put) in self._flags.items():
                if (value := wanted.flags.get(name, _MIXED)) != _MIXED:
                    put(*value) if isinstance(value, tuple) else put(value)
            if wanted.matmul != _MIXED:
                c._set_float32_matmul_precision(wanted.matmul)
            for which, precision in zip(_PRECISIONS, wanted.precisions, strict=False):
                c._set_fp32_precision_setter(*which, precision)
        if wanted.deterministic != found.deterministic:
            # It also tells the compiler.
            torch.use_deterministic_algorithms(wanted.deterministic[0], warn_only=wanted.deterministic[1])
        if wanted.anomaly != found.anomaly:
            torch.autograd.set_detect_anomaly(*wanted.anomaly)

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

    def _function_modes(self) -> tuple[Any, ...]:
        torch = self._torch
        count = torch._C._len_torch_function_stack()
        stack = tuple([torch._C._get_function_stack_at(at) for at in range(count)]) if count else ()
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return stack, context, getattr(_device_module(), "CURRENT_DEVICE", None)

    def _set_function_modes(self, wanted: tuple[Any, ...]) -> None:
        torch = self._torch
        stack, context, device = wanted
        for _ in range(torch._C._len_torch_function_stack()):
            torch._C._pop_torch_function_stack()
        for mode in stack:
            torch._C._push_on_torch_function_stack(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = context
        if (module := _device_module()) is not None:
            module.CURRENT_DEVICE = device


_made: list[TorchSettings] = []


def torch_settings(torch: Any) -> TorchSettings | None:
    """Returns those of this process; ``None`` while PyTorch is being imported.

    Args:
        torch: the module.
    """
    if not _made and hasattr(torch, "autocast_increment_nesting"):
        _made.append(TorchSettings(torch))
    return _made[0] if _made else None


def _device_module() -> Any:
    return sys.modules.get("torch.utils._device")


def _read_or_mixed(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        return _MIXED


# -- library settings ----------------------------------------------------------------------------


# -- logging -------------------------------------------------------------------------------------------------

#: Of a logger that nothing has set up: level, whether it is disabled, whether it propagates, handlers.
_PLAIN = (0, False, True)


def read_logging(logging: Any) -> tuple[Any, ...]:
    """Returns what was set up of all loggers, of the root logger first."""
    root, plain = logging.root, logging.PlaceHolder
    return (
        root.manager.disable,
        root.level,
        tuple(root.handlers),
        {
            name: (logger.level, logger.disabled, logger.propagate, *logger.handlers)
            for name, logger in root.manager.loggerDict.items()
            if type(logger) is not plain
            and (logger.level or logger.handlers or logger.disabled or not logger.propagate)
        },
    )


def write_logging(logging: Any, wanted: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    """Sets up all loggers as they were."""
    logging.disable(wanted[0])
    logging.root.setLevel(wanted[1])
    logging.root.handlers[:] = wanted[2]
    for name in found[3].keys() | wanted[3].keys():
        level, disabled, propagate, *handlers = wanted[3].get(name, _PLAIN)
        logger = logging.getLogger(name)
        logger.disabled, logger.propagate, logger.handlers[:] = disabled, propagate, handlers
        logger.setLevel(level)


def _handlers(found: tuple[Any, ...]) -> Iterator[Any]:
    yield from found[2]
    for _, _, _, *handlers in found[3].values():
        yield from handlers


# -- NumPy, decimal, multiprocessing, hydra, torch.distributed -------------------------------------------------


def _read_numpy(numpy: Any) -> tuple[Any, ...]:
    return numpy.geterr(), numpy.geterrcall()


def _write_numpy(numpy: Any, wanted: tuple[Any, ...], found: object) -> None:
    numpy.seterr(**wanted[0])
    numpy.seterrcall(wanted[1])


def _untouched_numpy(numpy: Any) -> tuple[Any, ...]:
    return {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}, None


def _read_decimal(decimal: Any) -> Any:
    return decimal.getcontext().__reduce__()[1]


def _write_decimal(decimal: Any, wanted: Any, found: object) -> None:
    decimal.setcontext(decimal.Context(*wanted))


def _read_start_method(context: Any) -> Any:
    return context._default_context.get_start_method(allow_none=True)


def _write_start_method(context: Any, wanted: Any, found: object) -> None:
    context._default_context.set_start_method(wanted, force=True)


def _read_hydra(hydra: Any) -> Any:
    return hydra.GlobalHydra.instance().hydra


def _write_hydra(hydra: Any, wanted: Any, found: object) -> None:
    hydra.GlobalHydra.instance().hydra = wanted


def _read_process_group(distributed: Any) -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def keep(module: Any, wanted: object, found: object) -> None:
    """Writes nothing: what is found stays."""


# -- matplotlib ------------------------------------------------------------------------------------------------


# As they were: the mapping's own ways check each, and resolve a backend. Its names do not change.


def _read_parameters(matplotlib: Any) -> tuple[Any, ...]:
    return tuple(dict.values(matplotlib.rcParams))


def _write_parameters(matplotlib: Any, wanted: tuple[Any, ...], found: object) -> None:
    for name, value in zip(dict.keys(matplotlib.rcParams), wanted, strict=True):
        dict.__setitem__(matplotlib.rcParams, name, value)


def _untouched_parameters(matplotlib: Any) -> tuple[Any, ...]:
    return tuple([dict.__getitem__(matplotlib.rcParamsOrig, name) for name in dict.keys(matplotlib.rcParams)])


def _read_pyplot(pyplot: Any) -> tuple[Any, ...]:
    return pyplot._backend_mod, tuple(_figures().items())


def _write_pyplot(pyplot: Any, wanted: tuple[Any, ...], found: object) -> None:
    pyplot._backend_mod = wanted[0]
    figures = _figures()
    figures.clear()
    figures.update(wanted[1])


def _figures() -> Any:
    return sys.modules["matplotlib._pylab_helpers"].Gcf.figs


# -- Weights & Biases --------------------------------------------------------------------------------------------

_WANDB_NAMES = (
    *("run", "config", "summary", "log", "save", "watch", "unwatch", "define_metric", "use_artifact", "log_artifact"),
    *("alert", "mark_preempting", "log_model", "use_model", "link_model"),
)


def _active_runs(wandb: Any) -> list[Any]:
    """The library's own list of runs that are not finished, from which it returns one that it has in place of a new."""
    setup = getattr(sys.modules.get("wandb.sdk.wandb_setup"), "_singleton", None)
    runs = getattr(setup, "_active_runs", None)
    return runs if isinstance(runs, list) else []


def _read_wandb(wandb: Any) -> tuple[Any, ...]:
    return tuple(_active_runs(wandb)), tuple([getattr(wandb, name, None) for name in _WANDB_NAMES])


def _write_wandb(wandb: Any, wanted: tuple[Any, ...], found: object) -> None:
    _active_runs(wandb)[:] = wanted[0]
    for name, value in zip(_WANDB_NAMES, wanted[1], strict=True):
        setattr(wandb, name, value)


def _untouched_wandb(wandb: Any) -> tuple[Any, ...]:
    before = _read_wandb(wandb)
    wandb.sdk.lib.module.unset_globals()
    _, names = _read_wandb(wandb)
    _write_wandb(wandb, before, None)
    return (), names


# -- PyTorch -------------------------------------------------------------------------------------------------------


def _read_torch(torch: Any) -> Any:
    settings = torch_settings(torch)
    return None if settings is None else settings.read()


def _write_torch(torch: Any, wanted: Any, found: Any) -> None:
    settings = torch_settings(torch)
    if settings is not None:
        settings.write(wanted or settings.untouched(), found or settings.untouched())


TABLE: tuple[tuple[str, Callable[..., Any], Callable[..., object], str, Callable[[Any], Any]], ...] = (
    ("settings of PyTorch", _read_torch, _write_torch, "torch", lambda torch: None),
    ("the default process group", _read_process_group, keep, "torch.distributed", lambda distributed: False),
    ("settings of NumPy", _read_numpy, _write_numpy, "numpy", _untouched_numpy),
    (
        "decimal context",
        _read_decimal,
        _write_decimal,
        "decimal",
        lambda decimal: decimal.DefaultContext.__reduce__()[1],
    ),
    ("start method", _read_start_method, _write_start_method, "multiprocessing.context", lambda context: None),
    ("settings of matplotlib", _read_parameters, _write_parameters, "matplotlib", _untouched_parameters),
    ("figures of matplotlib", _read_pyplot, _write_pyplot, "matplotlib.pyplot", lambda pyplot: (None, ())),
    ("runs of wandb", _read_wandb, _write_wandb, "wandb", _untouched_wandb),
    ("global state of hydra", _read_hydra, _write_hydra, "hydra.core.global_hydra", lambda hydra: None),
)


def close_what_is_open(found: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Closes what a trial that leaves has opened under global names: runs, figures, handlers of loggers."""
    for run in found.get("runs of wandb", ((), ()))[0]:
        with suppress(Exception):
            run.finish()
    end_run_of_mlflow()
    if found.get("figures of matplotlib", (None, ()))[1]:
        with suppress(Exception):
            sys.modules["matplotlib.pyplot"].close("all")
    kept = {id(handler) for handler in _handlers(base["logging"])}
    for handler in _handlers(found["logging"]):
        if id(handler) not in kept:
            with suppress(Exception):
                handler.close()


def end_run_of_mlflow() -> None:
    """Ends mlflow's active run, if there is one: the next one that a trial starts would be refused, or logged to it."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None:
        with suppress(Exception):
            if mlflow.active_run() is not None:
                mlflow.end_run()

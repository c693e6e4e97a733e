"""Global settings of libraries that trials use, to be swapped between trials of one lane: rows of a table.

Each row names the settings, reads and writes them, and names the module without which there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from fluid.lane.torch_settings import torch_settings

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

"""Loaded by the interpreter of a script that Fluid has started, before the script: sends what it logs to W&B to Fluid.

Each line that the script prints comes as a whole. wandb is not imported here: once the script has imported it, its
``log`` is replaced by one that also reports. Then the ``sitecustomize`` that there would have been is run. Fluid need
not be installed in this interpreter. Nothing is loaded that a script does not need: each start of each trial would wait
for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_LINK = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), "trainables", "script_link.py")
_NAME = "_fluid_script_link"


def _link() -> Any:
    """What reports, by its path."""
    if _NAME not in sys.modules:
        import importlib.util

        spec = importlib.util.spec_from_file_location(_NAME, _LINK)
        assert spec is not None and spec.loader is not None
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_NAME])
    return sys.modules[_NAME].LINK


def _reporting(log: Callable[..., Any], skips_self: bool) -> Callable[..., Any]:
    def log_and_report(*args: Any, **kwargs: Any) -> Any:
        result = log(*args, **kwargs)
        given = args[1:] if skips_self else args
        data = given[0] if given else kwargs.get("data", kwargs.get("row"))
        if isinstance(data, dict):
            _link().report(data, "wandb")
        return result

    log_and_report.__wrapped__ = log  # type: ignore[attr-defined]
    log_and_report.reports_to_fluid = True  # type: ignore[attr-defined]
    return log_and_report


class _Watcher:
    """Finds wandb as the others do, and replaces its ``log`` once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("wandb", "wandb.sdk.wandb_run"):
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec: Any = next(filter(None, (find(name, path, target) for find in others)), None)
        load = getattr(getattr(spec, "loader", None), "exec_module", None)
        if load is not None:

            def exec_module(module: Any) -> None:
                load(module)
                _replace(module)

            spec.loader.exec_module = exec_module
        return spec


def _configuring(module: Any, init: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a run the trial's parameters as its config, which a sweep of W&B's does, and has each run report."""

    def init_and_configure(*args: Any, **kwargs: Any) -> Any:
        run = init(*args, **kwargs)
        update = getattr(getattr(run, "config", None), "update", None)
        if update is not None:
            import json

            update(json.loads(os.environ.get("FLUID_CONFIG", "{}")), allow_val_change=True)
        log = getattr(run, "log", None)
        if log is not None and not hasattr(log, "reports_to_fluid"):
            run.log = module.log = _reporting(log, False)  # With WANDB_MODE=disabled, a run has a log of its own.
        return run

    return init_and_configure


def _replace(module: Any) -> None:
    run: Any = getattr(module, "Run", None)
    if module.__name__ == "wandb.sdk.wandb_run" and hasattr(run, "log"):
        run.log = _reporting(run.log, True)
    elif module.__name__ == "wandb" and "wandb.sdk.wandb_run" not in sys.modules and hasattr(module, "log"):
        module.log = _reporting(module.log, False)  # Another module of that name.
    if module.__name__ == "wandb" and hasattr(module, "init"):
        module.init = _configuring(module, module.init)


def _write_whole_lines() -> None:
    """Has each line written at once. Unbuffered, Python writes its end apart, and another process's may come between.

    A line that holds two reports, or half of one, would be none.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=False)


def _run_other() -> None:
    """Runs the ``sitecustomize`` of the user's, or of the system's, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine  # As Python expects of a module that is being imported.


if "FLUID_SCRIPT" in os.environ:
    _write_whole_lines()
    if os.environ.get("FLUID_SCRIPT_WANDB") == "1":
        sys.meta_path.insert(0, _Watcher())
_run_other()

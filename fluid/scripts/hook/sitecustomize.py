"""Loaded by the interpreter of a script that Fluid has started, before the script: sends what it logs to W&B to Fluid.

wandb is not imported here: once the script has imported it, its ``log`` is replaced by one that also reports. Then the
``sitecustomize`` that there would have been is run. Fluid need not be installed in this interpreter.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # Each script's start would wait for the module typing.
    from collections.abc import Callable
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_LINK = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), "trainables", "script_link.py")


def _load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _reporting(log: Callable[..., Any], link: Any, skips_self: bool) -> Callable[..., Any]:
    def log_and_report(*args: Any, **kwargs: Any) -> Any:
        result = log(*args, **kwargs)
        given = args[1:] if skips_self else args
        data = given[0] if given else kwargs.get("data", kwargs.get("row"))
        if isinstance(data, dict):
            link.report(data, "wandb")
        return result

    log_and_report.__wrapped__ = log  # type: ignore[attr-defined]
    return log_and_report


class _Watcher:
    """Finds wandb as the others do, and replaces its ``log`` once it is loaded."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("wandb", "wandb.sdk.wandb_run"):
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        load = None if spec is None else getattr(spec.loader, "exec_module", None)
        if load is not None:

            def exec_module(module: Any) -> None:
                load(module)
                self._replace(module)

            spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec

    def _replace(self, module: Any) -> None:
        run: Any = getattr(module, "Run", None)
        if module.__name__ == "wandb.sdk.wandb_run" and hasattr(run, "log"):
            run.log = _reporting(run.log, self._link, True)
        elif module.__name__ == "wandb" and "wandb.sdk.wandb_run" not in sys.modules and hasattr(module, "log"):
            module.log = _reporting(module.log, self._link, False)  # Another module of that name.


def _watch() -> None:
    if "FLUID_SCRIPT" in os.environ and os.environ.get("FLUID_SCRIPT_WANDB") == "1":
        sys.meta_path.insert(0, _Watcher(_load("_fluid_script_link", _LINK).LINK))


def _run_other() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _watch()
except Exception as error:  # The script runs all the same.
    print("fluid: wandb.log is not read:", error, file=sys.stderr)
_run_other()

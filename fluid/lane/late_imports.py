"""Calls that are made once a module is loaded: a lane sets nothing in a module that its trial may never load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fluid.random_state import find_behind


class LateImports:
    """Watches imports for the modules that calls wait for. It is in ``sys.meta_path`` from the first such call on."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[[], None]]] = {}

    def when_loaded(self, module: str, call: Callable[[], None]) -> None:
        """Makes a call at once if a module is loaded, else as soon as it is."""
        if module in sys.modules:
            call()
            return
        self._calls.setdefault(module, []).append(call)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def clear(self) -> None:
        """Drops the calls that wait."""
        self._calls.clear()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds a module that is waited for as the other finders do, to hear of its end."""
        if name not in self._calls:
            return None
        spec = find_behind(self, name, path, target)
        if spec is not None:
            self._follow(spec)
        return spec

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            with suppress(AttributeError):
                del loader.exec_module
            for call in self._calls.pop(spec.name, ()):
                call()

        with suppress(AttributeError):  # A loader that takes no attributes.
            loader.exec_module = exec_module

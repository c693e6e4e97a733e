"""Calls that are made once a module is loaded: a lane sets nothing in a module that its trial may never load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


class LateImports:
    """Calls that wait for modules to be loaded."""

    def __init__(self) -> None:
        #: By the module's name.
        self.calls: dict[str, list[Callable[[], None]]] = {}

    def when_loaded(self, module: str, call: Callable[[], None]) -> None:
        """Makes a call at once if a module is loaded, else as soon as it is."""
        if module in sys.modules:
            call()
            return
        self.calls.setdefault(module, []).append(call)
        if self not in _Watch.waiting:
            _Watch.waiting.append(self)
        if _Watch not in sys.meta_path:
            sys.meta_path.insert(0, _Watch)

    def clear(self) -> None:
        """Drops the calls that wait."""
        self.calls.clear()


class _Watch:
    """Watches imports. One finder for all: two that ask all other finders would ask each other for ever."""

    waiting: ClassVar[list[LateImports]] = []

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds a module that is waited for as the other finders do, to hear of its end."""
        if not any(name in late.calls for late in cls.waiting):
            return None
        for finder in sys.meta_path[sys.meta_path.index(cls) + 1 :]:  # Those before it were asked.
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                cls._follow(spec)
                return spec
        return None

    @classmethod
    def _follow(cls, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            with suppress(AttributeError):
                del loader.exec_module
            for call in [call for late in cls.waiting for call in late.calls.pop(spec.name, ())]:
                call()

        with suppress(AttributeError):  # A loader that takes no attributes.
            loader.exec_module = exec_module

"""What trials may set in their process, and a lane swaps between them: the table of it, and how it is read and written.

A trial finds the settings with which its lane began, and finds its own again when it goes on. Reading them all takes
some ten microseconds, so a lane whose trials take turns can do it between any two iterations. What still differs after
a trial has left and all was put back cannot be put back: the lane is then of no use to other trials.

A module is looked up, never imported. Settings of one that was loaded since the lane began are put back to what they
are in a process that sets none. Class attributes, and globals of modules that are not in the table, stay as they are.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # Its getsignal is thirty times as fast: it makes no enumerations.
import gc
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fluid.lane.output import DUMP_SIGNAL
from fluid.lane.process import libraries
from fluid.lane.process.threads import VARIABLES
from fluid.processes.interpreters import merged_path

#: Names in :data:`Settings`.
TIMERS, _PATH = "signal timers", "sys.path"
#: The settings of a process, by name.
Settings = Mapping[str, Any]

_SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, DUMP_SIGNAL}))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_STOPPED = ((0.0, 0.0),) * len(_TIMERS)
_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "STACK")
    if hasattr(resource, f"RLIMIT_{name}")
)
#: Variables of the environment that :class:`fluid.lane.process.threads.LaneThreads` sets.
_OF_THREADS = tuple(os.fsencode(name) for name in VARIABLES)
#: A umask while it is read, which is by writing: no thread makes a file that others may read.
_PRIVATE = 0o077


class _Row(NamedTuple):
    """One row of the table.

    Attributes:
        name: in words.
        read: returns the value, which nothing changes later; takes the module if there is one.
        write: puts a value in force, given the one that is; takes the module first if there is one.
        module: without which there is no such setting.
        untouched: the value in a process that sets none, if the module was loaded since the lane began.
    """

    name: str
    read: Callable[..., Any]
    write: Callable[..., object]
    module: str = ""
    untouched: Callable[[Any], Any] = lambda module: None


class ProcessSettings:
    """The settings of a lane's process.

    Made before the first trial comes; a trial that has none of its own yet gets what is in force then.
    """

    def __init__(self) -> None:
        #: What a new trial finds, and what is in force.
        self._base: dict[str, Any] = {}
        self._in_force: Settings = {}
        #: Added to ``sys.path`` by the lane itself.
        self._paths: list[str] = []
        self.rebase()

    def rebase(self) -> None:
        """Takes what is in force for what each further trial finds: a trainable's modules were loaded, once for all."""
        self._base = {**self.take(), TIMERS: _STOPPED}

    def take(self) -> Settings:
        """Returns what is in force; to be called before another trial's settings are put in force."""
        modules, found = sys.modules, dict[str, Any]()
        for name, read, _, module, _ in _TABLE:
            if not module:
                found[name] = read()
            elif module in modules:
                with suppress(Exception):  # A module whose import has failed.
                    found[name] = read(modules[module])
        self._in_force = found
        return found

    def put(self, wanted: Settings | None = None) -> bool:
        """Puts settings in force, with ``None`` those of a new trial; returns whether any was another."""
        found, changed = self._in_force, False
        wanted = self._base if wanted is None else wanted
        if found is wanted:
            return False
        for setting in _TABLE:
            name = setting.name
            if name in found and (name not in wanted or wanted[name] != found[name]):
                changed = True
                self._write(setting, wanted, found[name])
        self._in_force = wanted
        return changed

    def put_back(self) -> list[str]:
        """Puts the settings of a new trial in force, as one has left; returns the names of what cannot be put back."""
        libraries.close_what_is_open(self.take(), self._base)
        if not self.put():
            return []
        found = self.take()
        for row in _TABLE:
            if row.name in found and row.name not in self._base:
                # Its module was loaded since. It has been put back to what an untouched process has, if it can be.
                stays_as_it_is = row.write is libraries.keep
                self._base[row.name] = row.untouched(sys.modules[row.module]) if stays_as_it_is else found[row.name]
        stays = [name for name, value in self._base.items() if found.get(name) != value]
        self._in_force = self._base if not stays else found
        return stays

    def add_paths(self, paths: tuple[str, ...]) -> None:
        """Adds the driver's to ``sys.path``, for all trials."""
        new = [path for path in paths if path not in sys.path]
        if new:
            sys.path[:] = merged_path(sys.path, paths)
            self._paths += new
            self._base[_PATH] = tuple(merged_path(self._base[_PATH], paths))

    def _write(self, setting: _Row, wanted: Settings, found: Any) -> None:
        module = sys.modules.get(setting.module)
        if setting.name in wanted:
            value = wanted[setting.name]
        else:
            value = self._base[setting.name] if setting.name in self._base else setting.untouched(module)
        if setting.name == _PATH:
            value = (*value, *(path for path in self._paths if path not in value))
        with suppress(Exception):  # What cannot be put back is found afterwards, when the trial has left.
            setting.write(*(() if module is None else (module,)), value, found)


# -- the table: what is there in any process -------------------------------------------------------------------


def _write_streams(wanted: tuple[Any, ...], found: object) -> None:
    sys.stdout, sys.stderr, sys.stdin = wanted


def _write_hooks(wanted: tuple[Any, ...], found: object) -> None:
    sys.excepthook, sys.unraisablehook, threading.excepthook = wanted


def _read_environment() -> dict[bytes, bytes]:
    found = dict(os.environ._data)  # type: ignore[attr-defined]  # A hundred times as fast as dict(os.environb).
    for name in _OF_THREADS:
        found.pop(name, None)
    return found


def _write_environment(wanted: dict[bytes, bytes], found: dict[bytes, bytes]) -> None:
    for name in found.keys() - wanted.keys():
        os.environb.pop(name, None)
    for name, value in wanted.items():
        if found.get(name) != value:
            os.environb[name] = value


def _write_path(wanted: tuple[str, ...], found: object) -> None:
    sys.path[:] = wanted


def _write_warnings(wanted: tuple[Any, ...], found: object) -> None:
    filters, warnings.showwarning, warnings.formatwarning = wanted
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _write_handlers(wanted: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    for number, handler, now in zip(_SIGNALS, wanted, found, strict=True):
        if handler != now and handler is not None:  # None is one that was not set from Python.
            signal.signal(number, handler)


def _read_timers() -> tuple[tuple[float, float], ...]:
    return tuple([signal.getitimer(timer) for timer in _TIMERS])


def _write_timers(wanted: tuple[tuple[float, float], ...], found: tuple[tuple[float, float], ...]) -> None:
    for timer, value, now in zip(_TIMERS, wanted, found, strict=True):
        if value != now:
            signal.setitimer(timer, *value)


def _write_limits(wanted: tuple[tuple[int, int], ...], found: tuple[tuple[int, int], ...]) -> None:
    for limit, (soft, hard), now in zip(_LIMITS, wanted, found, strict=True):
        if (soft, hard) != now:
            try:
                resource.setrlimit(limit, (soft, hard))
            except (ValueError, OSError):  # A hard limit that was lowered.
                resource.setrlimit(limit, (now[1], now[1]))


def _read_umask() -> int:
    mask = os.umask(_PRIVATE)
    os.umask(mask)
    return mask


def _write_collector(wanted: tuple[Any, ...], found: object) -> None:
    enabled, thresholds = wanted
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*thresholds)


def _write_interpreter(wanted: tuple[int, float], found: object) -> None:
    sys.setrecursionlimit(wanted[0])
    sys.setswitchinterval(wanted[1])


def hold_timers() -> tuple[tuple[float, float], ...] | None:
    """Stops the signal timers; returns what to give :func:`go_on_with_timers`, ``None`` if none ran."""
    running = _read_timers()
    if running == _STOPPED:
        return None
    _write_timers(_STOPPED, running)
    return running


def go_on_with_timers(held: tuple[tuple[float, float], ...]) -> None:
    """Lets timers that were stopped go on."""
    _write_timers(held, _STOPPED)


_TABLE = (
    _Row(TIMERS, _read_timers, _write_timers),  # First: another trial's must not go off any more.
    _Row("sys.stdout", lambda: (sys.stdout, sys.stderr, sys.stdin), _write_streams),
    _Row("sys.excepthook", lambda: (sys.excepthook, sys.unraisablehook, threading.excepthook), _write_hooks),
    _Row("environment variables", _read_environment, _write_environment),
    _Row(_PATH, lambda: tuple(sys.path), _write_path),
    _Row(
        "warnings filters",
        lambda: (tuple(warnings.filters), warnings.showwarning, warnings.formatwarning),
        _write_warnings,
    ),
    _Row("signal handlers", lambda: tuple([_signal.getsignal(number) for number in _SIGNALS]), _write_handlers),
    _Row("resource limits", lambda: tuple([resource.getrlimit(limit) for limit in _LIMITS]), _write_limits),
    _Row("umask", _read_umask, lambda wanted, found: os.umask(wanted)),
    _Row(
        "nice value",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda wanted, found: os.setpriority(os.PRIO_PROCESS, 0, wanted),
    ),
    _Row("garbage collector", lambda: (gc.isenabled(), gc.get_threshold()), _write_collector),
    _Row("recursion limit", lambda: (sys.getrecursionlimit(), sys.getswitchinterval()), _write_interpreter),
    _Row("logging", lambda: libraries.read_logging(logging), lambda *values: libraries.write_logging(logging, *values)),
    *(_Row(*row) for row in libraries.TABLE),
)

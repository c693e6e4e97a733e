"""What a script has set in ``logging``, read in the driver and set in a lane.

Where the script has handlers, the lane has one that sends the records to the driver, which handles them: see
:mod:`fluid.lane.log_records`. A library that configures its loggers when it is imported does so in the lane, too: of
those only the levels are the script's.
"""

from __future__ import annotations

import functools
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any, NamedTuple

from fluid._late_imports import LateImports
from fluid.lane.log_records import DriversHandler, RecordOutbox


class LoggerSettings(NamedTuple):
    """What is set in a logger.

    Attributes:
        level: its own; 0 for that of its parent.
        propagates: whether its parents' handlers get its records.
        disabled: whether it drops all.
        handled_from: the least level that one of its handlers takes; ``None`` if it has none.
        module: a module that is to be loaded first, as it configures the logger; ``None`` for none.
        of_library: whether it configures the logger alone, but for the level.
    """

    level: int = 0
    propagates: bool = True
    disabled: bool = False
    handled_from: int | None = None
    module: str | None = None
    of_library: bool = False


class LogSettings(NamedTuple):
    """What is set in ``logging``.

    Attributes:
        loggers: by name, those in which something is set; the root logger's name is empty.
        disabled_to: as by ``logging.disable``.
        captures_warnings: as by ``logging.captureWarnings``.
    """

    loggers: Mapping[str, LoggerSettings] = {}
    disabled_to: int = 0
    captures_warnings: bool = False


def read_log_settings() -> LogSettings:
    """Returns what this process has set; what cannot be read is left out."""
    loggers: dict[str, LoggerSettings] = {}
    try:
        for name, logger in {"": logging.root, **logging.root.manager.loggerDict}.items():
            if isinstance(logger, logging.Logger) and _is_changed(name, logger):
                found = _read(name, logger)
                if found.level or not found.of_library:
                    loggers[name] = found
        captures = getattr(logging, "_warnings_showwarning", None) is not None
        return LogSettings(loggers, int(logging.root.manager.disable), captures)
    except (Exception, SystemExit, GeneratorExit):  # The class of loggers, and of their manager, may be the user's.
        return LogSettings()


def _is_changed(name: str, logger: logging.Logger) -> bool:
    level = 0 if name else logging.WARNING
    return bool(logger.level != level or logger.handlers or not logger.propagate or logger.disabled)


def _read(name: str, logger: logging.Logger) -> LoggerSettings:
    top = name.partition(".")[0]
    module: Any = None if top in sys.stdlib_module_names else sys.modules.get(top)
    path = getattr(module, "__file__", None)
    after = top if isinstance(path, str) else None
    if isinstance(path, str) and path.startswith(_library_folders()):
        return LoggerSettings(int(logger.level), module=after, of_library=True)
    handled_from = min((int(handler.level) for handler in logger.handlers), default=None)
    return LoggerSettings(int(logger.level), bool(logger.propagate), bool(logger.disabled), handled_from, after)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Where packages are installed."""
    folders = (*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib"))
    return tuple(os.path.join(folder, "") for folder in folders)


class LaneLogs:
    """The settings of a script's loggers that a lane has put in force.

    Args:
        records: takes the records that the script handles.
        late: watches imports; a call that waits is dropped before other settings come.
    """

    def __init__(self, records: RecordOutbox, late: LateImports) -> None:
        self._records = records
        self._late = late
        #: What was in force before the first script's, of the loggers that any has changed.
        self._before: dict[str, LoggerSettings] = {}
        #: Those that were added.
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._captures = False

    def apply(self, settings: LogSettings) -> None:
        """Puts these in force, and takes back what earlier ones had set."""
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
        self._handlers.clear()
        for name, before in self._before.items():
            _write(_logger(name), before)
        for name, found in settings.loggers.items():
            if found.module is None:
                self._set(name, found)
            else:
                self._late.when_loaded(found.module, lambda name=name, found=found: self._set(name, found))  # type: ignore[misc]
        if logging.root.manager.disable != settings.disabled_to:
            logging.disable(settings.disabled_to)
        if settings.captures_warnings != self._captures:
            self._captures = settings.captures_warnings
            logging.captureWarnings(self._captures)

    def _set(self, name: str, settings: LoggerSettings) -> None:
        logger = _logger(name)
        before = LoggerSettings(logger.level, logger.propagate, logger.disabled)
        before = self._before.setdefault(name, before)
        if settings.of_library:
            settings = before._replace(level=settings.level)
        _write(logger, settings)
        # A module of the user's that adds handlers when it is imported has done so here, too.
        if settings.handled_from is not None and not (settings.module and logger.handlers):
            handler = DriversHandler(self._records, settings.handled_from)
            logger.addHandler(handler)
            self._handlers.append((logger, handler))


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(name or None)


def _write(logger: logging.Logger, settings: LoggerSettings) -> None:
    if logger.level != settings.level:  # To set it clears what all loggers have cached.
        logger.setLevel(settings.level)
    logger.propagate, logger.disabled = settings.propagates, settings.disabled

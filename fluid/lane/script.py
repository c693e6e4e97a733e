"""The script whose trials a lane runs: its arguments, its settings, and its ``__main__``.

A trial's code finds in ``__main__`` what it refers to of the script, so that pickle finds it there. Processes that the
trial starts by ``spawn`` or ``forkserver`` get it from the lane, by value. They could run the script's file again, as
those of the script alone would. But that needs a file, which notebooks do not have nor other machines; it needs the
script to be guarded by ``if __name__ == "__main__"``, which Fluid does not ask for, and without which each such process
would begin the sweep anew; and what the guarded part has set would be missing, which trials of Fluid do have.
"""

from __future__ import annotations

import builtins
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from multiprocessing import process
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from fluid.lane.log_records import RecordOutbox
from fluid.lane.log_settings import LaneLogs, LogSettings, read_log_settings
from fluid.lane.script_settings import SettingsInForce, read_settings
from fluid.trainables.script_names import MAIN, dump_each, is_of_script, mentioned_in, receive_in

#: Names the file from which a process that a trial starts gets its ``__main__``.
_VARIABLE = "FLUID_SCRIPT"
#: Run by such a process in place of the script.
_CHILDS_MAIN = "fluid.lane.child_main"


class Script(NamedTuple):
    """What a script has set as it submits.

    Attributes:
        argv: its arguments.
        file: its path; ``None`` if it has none.
        settings: see :mod:`fluid.lane.script_settings`.
        logs: what it has set in ``logging``.
        mentioned: its functions and classes, pickled, that the trainable names in a text only.
    """

    argv: tuple[str, ...] = ()
    file: str | None = None
    settings: Mapping[str, bytes] = {}
    logs: LogSettings = LogSettings()
    mentioned: Mapping[str, bytes] = {}


def read_script() -> Script:
    """Returns what this process's script has set, as the calling thread sees it; nothing in there makes this fail."""
    argv = tuple(str(each) for each in getattr(sys, "argv", ()) if issubclass(type(each), str)) or ("",)
    file = getattr(sys.modules.get(MAIN), "__file__", None)
    if isinstance(file, str):
        file = os.path.join(getattr(process, "ORIGINAL_DIR", None) or "", file)
    return Script(argv, file if isinstance(file, str) else None, read_settings(), read_log_settings())


def dump_script(script: Script, trainable: bytes) -> bytes:
    """Pickles what a script has set, for the trials of a trainable.

    Args:
        script: as it was read.
        trainable: pickled.
    """
    return pickle.dumps(script._replace(mentioned=mentioned_in(trainable)))


class LaneScripts:
    """The scripts whose trials a lane runs, by the keys of their trainables: one is in force.

    Args:
        records: takes the log records that the script handles.
    """

    def __init__(self, records: RecordOutbox) -> None:
        self._settings = SettingsInForce()
        self._logs = LaneLogs(records, self._settings.late)
        self._scripts: dict[int, tuple[Script, ModuleType]] = {}

    def add(self, key: int, pickled: bytes) -> None:
        """Takes a script in; nothing is set where there is none."""
        if pickled:
            script = pickle.loads(pickled)
            self._scripts[key] = script, _main_of(script)

    def drop(self, key: int) -> None:
        """Drops a script; what it has set stays in force."""
        self._scripts.pop(key, None)

    def put_in_force(self, key: int) -> None:
        """Sets what a script has set, before its trainable is unpickled."""
        if key not in self._scripts:
            return
        self.show(key)
        script, _ = self._scripts[key]
        self._settings.apply(script.settings)
        self._logs.apply(script.logs)

    def show(self, key: int) -> None:
        """Puts the arguments and the ``__main__`` of a script where code finds them."""
        if key in self._scripts:
            script, main = self._scripts[key]
            receive_in(main)
            sys.argv[:] = script.argv


def _main_of(script: Script) -> ModuleType:
    """Makes the ``__main__`` of a lane, which is empty at first."""
    main = ModuleType(MAIN)
    names = vars(main)

    def find(name: str) -> Any:
        if name in script.mentioned:
            pickle.loads(script.mentioned[name])  # Which puts it there.
        if name not in names:
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}: the trainable does not refer to it")
        return names[name]

    names.update(__builtins__=builtins, __getattr__=find, __spec__=_MainSpec(main, pickle.dumps(script.settings)))
    if script.file is not None:
        names["__file__"] = script.file
    return main


class _MainSpec(ModuleSpec):
    """Tells ``multiprocessing``, which asks as it starts a process, what that is to run first.

    Args:
        main: what the process is to have.
        settings: the script's, pickled.
    """

    def __init__(self, main: ModuleType, settings: bytes) -> None:
        self._main, self._settings = main, settings
        #: Whose values were written last; and the files, which stay open: a process may read its own late.
        self._written: frozenset[str] | None = None
        self._files: list[BinaryIO] = []
        super().__init__(MAIN, None)

    @property
    def name(self) -> str:
        """The module to run; what it reads is written."""
        names = {name: value for name, value in vars(self._main).items() if is_of_script(value)}
        if self._written != names.keys():
            file = open(os.memfd_create("fluid-script"), "wb")  # noqa: SIM115
            file.write(self._settings + dump_each(names))
            file.flush()
            self._written = frozenset(names)
            self._files.append(file)
        os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{self._files[-1].fileno()}"
        return _CHILDS_MAIN

    @name.setter
    def name(self, name: str) -> None:
        """It is fixed."""


def enter_child() -> Callable[[str], Any]:
    """Puts the script's settings in force in a process that a trial has started; returns what finds its names.

    They are unpickled when the first is asked for: they may refer to much.
    """
    file: BinaryIO | None = None
    with suppress(OSError, KeyError, EOFError):
        file = open(os.environ[_VARIABLE], "rb")  # noqa: SIM115
        SettingsInForce().apply(pickle.load(file))

    def find(name: str) -> Any:
        nonlocal file
        if file is not None and not name.startswith("__"):
            whole, file = file, None
            receive_in(sys.modules[MAIN])
            with whole:
                pickle.load(whole)
        if name not in vars(sys.modules[MAIN]):
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}")
        return vars(sys.modules[MAIN])[name]

    return find

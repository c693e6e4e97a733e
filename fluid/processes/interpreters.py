"""Starts programs of Fluid in Python interpreters of their own, which import what this one would, in its order.

``python -m`` would look for modules in the working directory first, where a stranger's ``json.py`` may lie, and
``PYTHONPATH`` stands before the standard library, so that an obsolete backport beside Fluid would take its place. The
interpreter runs a text in memory instead, which sets ``sys.path`` before it imports anything. It takes Fluid from the
folder, or the archive, that has it here; where an import hook found it, as for editable installs, no entry of
``sys.path`` need lead there. The environment is not changed, so processes that the program starts have the user's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import spawn
from typing import Any

import fluid._version
from fluid.errors import FluidError

#: Only built-in modules are imported before ``sys.path`` is set.
_TEXT = """\
import sys
sys.path[:] = {path!a}
sys.argv[1:] = {arguments!a}
import os
os.close({descriptor})
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
spec = PathFinder.find_spec("fluid", [{root!a}])
if spec is not None:
    sys.modules["fluid"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fluid"])
import runpy
runpy.run_module({program!a}, run_name="__main__", alter_sys=True)
"""


def import_path() -> list[str]:
    """Returns ``sys.path`` as another process can use it, whatever its working directory is or becomes.

    What is no path, but a name by which an import hook knows its own, stays as it is.
    """
    entries = [str.__str__(entry) for entry in sys.path if isinstance(entry, str)]
    return [
        entry if os.path.isabs(entry) or not os.path.exists(entry or ".") else os.path.abspath(entry)
        for entry in entries
    ]


def merged_path(own: Sequence[str], told: Sequence[str]) -> list[str]:
    """Returns ``sys.path`` with the entries of another process that it lacks, each before the one that follows there.

    Args:
        own: entries of this process.
        told: those of the other one.

    Example:
        >>> merged_path(["lib", "site-packages"], ["src", "lib", "plugins"])
        ['src', 'lib', 'site-packages', 'plugins']
    """
    merged, place = list(own), len(own)
    for entry in reversed(told):
        if entry in merged:
            place = merged.index(entry)
        else:
            merged.insert(place, entry)
    return merged


def start_program(
    program: str, arguments: Sequence[str] = (), *, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a module of Fluid as ``__main__``, with the options of this interpreter (``-O``, ``-W``, ``-X`` ...).

    Args:
        program: name of the module.
        arguments: what it finds in ``sys.argv`` behind its path. Lists of processes do not show them.
        pass_fds: descriptors that it inherits.
        options: further ones of ``subprocess.Popen``.

    Raises:
        FluidError: it is not known where Python is.
        OSError: the process cannot be started.
    """
    # An application that embeds Python is no interpreter: it names one by multiprocessing.set_executable().
    python = os.fsdecode(spawn.get_executable() or "")
    if not python:
        raise FluidError("sys.executable is empty: tell multiprocessing.set_executable() which Python to start")
    text = os.memfd_create("fluid-program")
    try:
        with open(os.dup(text), "w", encoding="ascii") as file:
            file.write(
                _TEXT.format(
                    path=import_path(),
                    arguments=list(arguments),
                    descriptor=text,
                    root=os.path.dirname(os.path.dirname(os.path.abspath(fluid._version.__file__))),
                    program=program,
                )
            )
        # The same that multiprocessing hands on.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [python, *flags, f"/proc/self/fd/{text}", program]
        return subprocess.Popen(command, pass_fds=[text, *pass_fds], **options)
    finally:
        os.close(text)

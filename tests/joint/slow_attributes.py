"""Compiles the shim of ``slow_attributes.c``, and says how a process gets it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def compile_shim(folder: Path) -> Path | None:
    """Compiles the shim into a folder; ``None`` if there is no C compiler, or it fails."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "slow_attributes.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
    return library if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


def shim_variables(library: Path, below: Path, clock: Path | None = None, names_s: float = 3.0) -> dict[str, str]:
    """The variables of a process that is to have the shim.

    Args:
        library: the compiled shim.
        below: the folder whose files it is about.
        clock: the file with the seconds by which its wall clock is set off; ``None`` to leave that alone.
        names_s: how long it remembers that a name was not there.
    """
    variables = {"LD_PRELOAD": str(library), "SLOW_BELOW": str(below.resolve()), "SLOW_NAMES_S": str(names_s)}
    return variables if clock is None else {**variables, "SLOW_CLOCK": str(clock)}

"""Sources of replayed trials by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fluid.errors import InvalidFieldError
from fluid.rehearsal.benchmark import Benchmark

#: The environment variable that names the folder with benchmarks.
FOLDER_VARIABLE = "FLUID_BENCHMARKS"


def source_by_name(name: str, data: str | Path | None = None) -> Benchmark:
    """Returns a benchmark.

    Args:
        name: ``"lcbench:TASK"``, a task of YAHPO Gym's LCBench such as ``"lcbench:189866"``;
            or ``"run:FOLDER"``, one's own run folder (:func:`fluid.rehearsal.recorded`).
        data: the folder with the benchmark's files, or one with a folder for it; ``None`` for ``$FLUID_BENCHMARKS``.

    Raises:
        InvalidFieldError: there is no such benchmark, or its files are not there.
        MissingDependencyError: a package that it needs is not installed.
    """
    kind, _, rest = name.partition(":")
    if kind == "run":
        from fluid.rehearsal.recorded import recorded

        return recorded(rest)
    if kind not in _MAKERS:
        raise InvalidFieldError(
            "benchmark", name, f"must begin with one of {', '.join(f'{each}:' for each in (*_MAKERS, 'run'))}"
        )
    return _MAKERS[kind](rest, folder_of(data))


def folder_of(data: str | Path | None) -> Path:
    """Returns the folder with benchmarks.

    Raises:
        InvalidFieldError: none is named, or it is not there.
    """
    named = data or os.environ.get(FOLDER_VARIABLE)
    if not named:
        raise InvalidFieldError("data", data, f"must be the folder with the benchmark, or set {FOLDER_VARIABLE}")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise InvalidFieldError("data", str(named), "is not a folder")
    return folder


def _lcbench(task: str, folder: Path) -> Benchmark:
    from fluid.rehearsal.yahpo import YahpoBenchmark, folder_of_scenario

    return YahpoBenchmark("lcbench", task, folder_of_scenario("lcbench", folder))


_MAKERS: dict[str, Callable[[str, Path], Benchmark]] = {"lcbench": _lcbench}

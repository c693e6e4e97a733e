"""Sources of replayed trials by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fluid.errors import InvalidFieldError
from fluid.rehearsal.benchmark import Benchmark

#: The environment variable that names the folder with benchmarks.
FOLDER_VARIABLE = "FLUID_BENCHMARKS"
#: What the name of one's own run folder as a benchmark begins with.
_RUN = "run:"


def source_by_name(name: str, data: str | Path | None = None) -> Benchmark:
    """Returns a benchmark.

    Args:
        name: ``"lcbench:TASK"``, a task of YAHPO Gym's LCBench such as ``"lcbench:189866"``; ``"yahpo:SCENARIO:TASK"``,
            one of another scenario of YAHPO Gym; ``"blackbox:FOLDER:TASK"``, one of a table of Syne Tune's; or
            ``"run:FOLDER"``, one's own run folder (:func:`fluid.rehearsal.recorded`). Where there is one task only, it
            may be left out.
        data: the folder with the benchmark's files, or one with a folder for it; ``None`` for ``$FLUID_BENCHMARKS``.
            The folder of a table may be a path by itself.

    Raises:
        InvalidFieldError: there is no such benchmark, or its files are not there.
        MissingDependencyError: a package that it needs is not installed.
    """
    if str(name).startswith(_RUN):
        from fluid.rehearsal.recorded import recorded

        return recorded(name[len(_RUN) :])
    kind, made, task = _parts(name)
    folder = kind.find(made, data)
    tasks = kind.tasks(folder, made)
    return kind.make(folder, made, tasks[0] if not task and len(tasks) == 1 else task)


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


class _BenchmarkKind(NamedTuple):
    """A kind of benchmark.

    Attributes:
        find: returns the folder with its files, of a name and the folder with benchmarks.
        tasks: returns its tasks, of that folder and the name.
        make: makes it, of that folder, the name and the task.
    """

    find: Callable[[str, str | Path | None], Path]
    tasks: Callable[[Path, str], Sequence[str]]
    make: Callable[[Path, str, str], Benchmark]


def _parts(name: str) -> tuple[_BenchmarkKind, str, str]:
    """The kind that a name is of, what it is within the kind, and the task."""
    kind, _, rest = str(name).partition(":")
    if kind not in _KINDS:
        known = ", ".join((*(f"{each}:" for each in _KINDS), _RUN))
        raise InvalidFieldError("benchmark", name, f"must begin with one of {known}")
    made, _, task = (kind, "", rest) if kind == "lcbench" else rest.partition(":")
    if not made:
        raise InvalidFieldError("benchmark", name, f"must say which, after {kind}:")
    return _KINDS[kind], made, task


def _find_scenario(scenario: str, data: str | Path | None) -> Path:
    from fluid.rehearsal.yahpo import folder_of_scenario

    return folder_of_scenario(scenario, folder_of(data))


def _scenario_tasks(folder: Path, scenario: str) -> Sequence[str]:
    from fluid.rehearsal.yahpo import tasks_of

    return tasks_of(scenario, folder)


def _scenario(folder: Path, scenario: str, task: str) -> Benchmark:
    from fluid.rehearsal.yahpo import YahpoBenchmark

    return YahpoBenchmark(scenario, task, folder)


def _find_table(named: str, data: str | Path | None) -> Path:
    """Where a table of Syne Tune is: in the folder with benchmarks, or at the path that is its name."""
    direct = Path(named).expanduser()
    if (direct / "metadata.json").is_file():
        return direct
    folder = folder_of(data)
    places = (folder / named, folder / "blackbox" / named, folder / "blackbox-repository" / named, folder)
    return next((place for place in places if (place / "metadata.json").is_file()), folder / named)


def _table_tasks(folder: Path, _: str) -> Sequence[str]:
    from fluid.rehearsal.blackbox import tasks_of_table

    return tasks_of_table(folder)


def _table(folder: Path, _: str, task: str) -> Benchmark:
    from fluid.rehearsal.blackbox import BlackboxBenchmark

    return BlackboxBenchmark(folder, task)


_YAHPO = _BenchmarkKind(_find_scenario, _scenario_tasks, _scenario)
_KINDS = {"lcbench": _YAHPO, "yahpo": _YAHPO, "blackbox": _BenchmarkKind(_find_table, _table_tasks, _table)}

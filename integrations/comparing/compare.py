"""Algorithms compared on a benchmark: each is rehearsed with several seeds, in processes of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fluid._clock import MonotonicClock
from fluid.errors import InvalidFieldError, require_one_of
from fluid.integrations.comparing.algorithms import ALGORITHMS, BenchmarkSweep
from fluid.integrations.comparing.playing import Players, Unplayed
from fluid.rehearsal.benchmark import Benchmark
from fluid.rehearsal.outcome import SweepOutcome
from fluid.rehearsal.overheads import FREE, Overheads
from fluid.rehearsal.sources import source_by_name

#: Of the normalised regret to which algorithms are timed.
TARGET = 0.05


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """What to compare.

    Attributes:
        benchmark: the name of the benchmark.
        data: the folder with its files; ``None`` for ``$FLUID_BENCHMARKS``.
        algorithms: names of :data:`ALGORITHMS`.
        devices: numbers of devices.
        seeds: how many of each.
        samples: configs of a sweep.
        budget: most iterations of a trial; ``None`` for all that the benchmark has.
        given: overheads by name; the others are those that the benchmark has measured, if it is a run, else none.
        options: of the executors.

    Raises:
        InvalidFieldError: one of them cannot be used, or no value of the metric is known of the benchmark.
        MissingDependencyError: the benchmark needs a package that is not installed.
    """

    benchmark: str
    data: str | None = None
    algorithms: Sequence[str] = ("random", "asha", "hyperband")
    devices: Sequence[int] = (8,)
    seeds: int = 1
    samples: int = 64
    budget: int | None = None
    given: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            require_one_of("algorithms", algorithm, ALGORITHMS)
        if not self.algorithms:
            raise InvalidFieldError("algorithms", self.algorithms, "must not be empty")
        self.sweep(self.algorithms[0], self.devices[0], 0)
        if math.isnan(self.source.best_known):
            reason = f"{self.source.name} has no value of {self.source.metric!r}, by which algorithms are compared"
            raise InvalidFieldError("benchmark", self.benchmark, reason)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "source"}  # Each process opens its own.

    @cached_property
    def source(self) -> Benchmark:
        """The benchmark itself."""
        return source_by_name(self.benchmark, self.data)

    @cached_property
    def overheads(self) -> Overheads:
        """What packing, scaling and moves cost."""
        measured = getattr(self.source, "overheads", None)
        return (measured if isinstance(measured, Overheads) else FREE).with_given(self.given)

    def sweep(self, algorithm: str, devices: int, seed: int) -> BenchmarkSweep:
        """One of the sweeps."""
        return BenchmarkSweep(
            benchmark=self.source,
            algorithm=algorithm,
            devices=devices,
            samples=self.samples,
            budget=self.budget,
            seed=seed,
            overheads=self.overheads,
            options=self.options,
        )

    def name_of(self, algorithm: str, devices: int) -> str:
        """What a row of the comparison is called."""
        return algorithm if len(self.devices) == 1 else f"{algorithm} on {devices}"


@dataclass
class Comparison:
    """What came of it.

    Attributes:
        outcomes: by row, one for each seed that did not fail.
        problems: why sweeps could not be played, by row, or by row and seed.
        wall_s: seconds that all took.
        seeds: of the outcomes, by row; a row that is left out has those from 0 on.
    """

    outcomes: dict[str, list[SweepOutcome]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0
    seeds: dict[str, list[int]] = field(default_factory=dict)

    @property
    def virtual_s(self) -> float:
        """Seconds that the sweeps would have taken."""
        return sum(outcome.makespan_s for of_row in self.outcomes.values() for outcome in of_row)

    @property
    def common_seeds(self) -> list[int]:
        """The seeds that all rows with outcomes have: by these, rows can be compared."""
        known = [set(of_row) for of_row in self._by_seed.values()]
        return sorted(set.intersection(*known)) if known else []

    @property
    def _by_seed(self) -> dict[str, dict[int, SweepOutcome]]:
        """The outcomes by row and seed."""
        return {
            name: dict(zip(self.seeds.get(name, range(len(of_row))), of_row, strict=True))
            for name, of_row in self.outcomes.items()
            if of_row
        }

    def firsts(self, value: float) -> dict[str, float]:
        """The share of the common seeds in which each row is the first to reach a value; equal ones share it."""
        rows, seeds = self._by_seed, self.common_seeds
        won = dict.fromkeys(rows, 0.0)
        for seed in seeds:
            times = {name: of_row[seed].seconds_to(value) for name, of_row in rows.items()}
            known = {name: at for name, at in times.items() if at is not None}
            first = [name for name, at in known.items() if at == min(known.values())]
            for name in first:
                won[name] += 1.0 / len(first) / len(seeds)
        return won


def compare(request: ComparisonRequest, folder: Path, *, jobs: int = 1, progress: Callable[[str], None]) -> Comparison:
    """Rehearses all sweeps of a comparison.

    Args:
        request: what to compare.
        folder: for run folders, and a log of what libraries print.
        jobs: processes at once.
        progress: told, in words, how far it is.
    """
    began, clock = MonotonicClock().now(), MonotonicClock()
    cells = [
        (algorithm, devices, seed)
        for algorithm in request.algorithms
        for devices in request.devices
        for seed in range(request.seeds)
    ]
    comparison = Comparison()
    found: dict[tuple[str, int, int], SweepOutcome] = {}
    log = folder / "log.txt"
    with Players(log) as players, ThreadPoolExecutor(min(jobs, len(cells))) as pool:
        tasks = {cell: (_play, request, cell, folder / "-".join(map(str, cell))) for cell in cells}
        waiting = {pool.submit(players.play, task): cell for cell, task in tasks.items()}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                cell = waiting[future]
                name = request.name_of(cell[0], cell[1])
                answer = future.result()
                if not isinstance(answer, Unplayed):
                    found[cell] = answer
                elif answer.is_missing:
                    comparison.problems[name] = answer.text
                else:
                    if request.seeds > 1:
                        name = f"{name} with seed {cell[2]}"
                    comparison.problems[name] = f"{answer.text}; see {log}"
                progress(f"{done} of {len(cells)} sweeps rehearsed")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for cell in cells:
        if cell in found:
            name = request.name_of(cell[0], cell[1])
            comparison.outcomes.setdefault(name, []).append(found[cell])
            comparison.seeds.setdefault(name, []).append(cell[2])
    comparison.wall_s = clock.now() - began
    return comparison


def _play(request: ComparisonRequest, cell: tuple[str, int, int], run_dir: Path) -> SweepOutcome:
    return request.sweep(*cell).play(run_dir)

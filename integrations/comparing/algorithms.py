"""One rehearsed sweep of a benchmark by the name of its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.executor import FluidExecutor
from fluid.rehearsal.benchmark import Benchmark
from fluid.rehearsal.outcome import SweepOutcome, outcome_of
from fluid.rehearsal.overheads import FREE, Overheads
from fluid.rehearsal.plan import RehearsalPlan, rehearsing
from fluid.rehearsal.seeding import seeded_draws
from fluid.sweep import run
from fluid.sweeping.algorithms import ALGORITHMS as NATIVE

#: One in so many trials continues at each rung.
_ETA = 3
#: Iterations between two exploits of PBT, as a share of the budget, and the size of its population.
_PBT_INTERVAL, _PBT_POPULATION = 10, 16
#: HpBandSter rounds the logarithm of the ratio of its budgets down, and would leave a rung out where that is just below
#: a whole number. So the largest budget is larger by this factor; Fluid rounds budgets to whole iterations.
_ABOVE = 1.0 + 1e-9


@dataclass(frozen=True, kw_only=True)
class BenchmarkSweep:
    """What to rehearse.

    Attributes:
        benchmark: gives the trials.
        algorithm: one of :data:`ALGORITHMS`.
        devices: how many.
        samples: configs that the sweep tries; PBT has a population of 16 whatever this is.
        budget: most iterations of a trial; ``None`` for all that the benchmark has.
        seed: of the algorithm.
        overheads: what packing, scaling and moves cost.
        options: of the executor, such as ``planner``.

    Raises:
        InvalidFieldError: one of them cannot be used.
    """

    benchmark: Benchmark
    algorithm: str
    devices: int
    samples: int = 64
    budget: int | None = None
    seed: int = 0
    overheads: Overheads = FREE
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_one_of("algorithm", self.algorithm, ALGORITHMS)
        require_integer("devices", self.devices, at_least=1)
        require_integer("samples", self.samples, at_least=1)
        most = self.benchmark.max_iterations
        if self.budget is not None and require_integer("budget", self.budget, at_least=1) > most:
            raise InvalidFieldError("budget", self.budget, f"must be at most {most}: {self.benchmark.name} has no more")

    @property
    def iterations(self) -> int:
        """Most iterations of a trial."""
        return self.benchmark.max_iterations if self.budget is None else self.budget

    def play(self, run_dir: Path) -> SweepOutcome:
        """Plays the sweep.

        Args:
            run_dir: folder of the session, in which there is none yet.

        Raises:
            MissingDependencyError: the algorithm needs a package that is not installed.
            FluidError: the sweep failed.
        """
        plan = RehearsalPlan(devices=self.devices, source=self.benchmark, overheads=self.overheads)
        with rehearsing(plan), FluidExecutor(run_dir=run_dir, verbose=0, **self.options) as executor:
            _PLAYERS.get(self.algorithm, _play_natively)(self, executor)
        return outcome_of(run_dir, self.benchmark.metric, self.benchmark.mode)


class ReplayedTrial:
    """Stands for the trials of a benchmark, which are replayed. They can be moved, and be widened."""

    fluid_elastic = True

    def setup(self, config: dict[str, Any]) -> None:
        """Never called."""
        raise NotImplementedError

    def step(self) -> dict[str, Any]:
        """Never called."""
        raise NotImplementedError

    def save_checkpoint(self, folder: str) -> None:
        """Never called."""
        raise NotImplementedError

    def load_checkpoint(self, folder: str) -> None:
        """Never called."""
        raise NotImplementedError


class FusedReplayedTrial(ReplayedTrial):
    """Those of a benchmark that knows what it takes to fuse them."""

    fluid_fusible = True


def _play_natively(sweep: BenchmarkSweep, executor: FluidExecutor) -> None:
    benchmark = sweep.benchmark
    run(
        FusedReplayedTrial if getattr(benchmark, "fuses", False) else ReplayedTrial,
        benchmark.space,
        metric=benchmark.metric,
        mode=benchmark.mode,
        samples=_PBT_POPULATION if sweep.algorithm == "pbt" else sweep.samples,
        algorithm=sweep.algorithm,
        budget=sweep.iterations,
        eta=_ETA,
        seed=sweep.seed,
        executor=executor,
    )


def _play_hpbandster(sweep: BenchmarkSweep, executor: FluidExecutor) -> None:
    from fluid.integrations.hpbandster import run as run_hpbandster

    benchmark, tried, brackets = sweep.benchmark, 0, 0
    sizes = _bracket_sizes(sweep.iterations)
    while tried < sweep.samples:
        tried += sizes[brackets % len(sizes)]
        brackets += 1
    run_hpbandster(
        "BOHB",
        benchmark.configspace(),
        ReplayedTrial,
        max_budget=sweep.iterations * _ABOVE,
        min_budget=sweep.iterations / _ETA ** (len(sizes) - 1),
        eta=_ETA,
        n_iterations=brackets,
        metric=benchmark.metric,
        mode=benchmark.mode,
        seed=sweep.seed,
        executor=executor,
    )


def _bracket_sizes(iterations: int) -> list[int]:
    """Configs that the brackets of HpBandSter begin with, in order."""
    deepest = 0
    while _ETA ** (deepest + 1) <= iterations:
        deepest += 1
    return [(deepest + 1) // (each + 1) * _ETA**each for each in range(deepest, -1, -1)]


def _play_raytune_pbt(sweep: BenchmarkSweep, executor: FluidExecutor) -> None:
    from fluid import tune
    from fluid.integrations.ray_tune.side_by_side import start_ray

    benchmark = sweep.benchmark
    space = benchmark.tune_space()
    interval = max(1, sweep.iterations // _PBT_INTERVAL)
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        metric=benchmark.metric,
        mode=benchmark.mode,
        perturbation_interval=interval,
        hyperparam_mutations=benchmark.tune_mutations(),
    )
    start_ray()  # Before the seed is set: Ray draws random numbers as it starts.
    with seeded_draws(sweep.seed):  # Tune draws configs, and PBT what it perturbs, from the global generators.
        tune.run(
            _report,
            config=space,
            num_samples=_PBT_POPULATION,
            scheduler=scheduler,
            stop={"training_iteration": sweep.iterations},
            storage_path=str(executor.run_dir / "tune"),
            verbose=0,
            executor=executor,
        )


def _report(config: dict[str, Any]) -> None:
    """Stands for the trials under Ray Tune; never called."""
    raise NotImplementedError


_PLAYERS: dict[str, Callable[[BenchmarkSweep, FluidExecutor], None]] = {
    "hpbandster-bohb": _play_hpbandster,
    "raytune-pbt": _play_raytune_pbt,
}
#: By name: those of :func:`fluid.run`, HpBandSter's BOHB, and Ray Tune's PBT.
ALGORITHMS = (*NATIVE, *_PLAYERS)

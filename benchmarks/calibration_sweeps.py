"""How well forecasts of sweeps are calibrated: simulated ones on the real engine, and real ones of trials that sleep.

``python benchmarks/calibration.py --part sweeps`` runs it. A simulated sweep is looked at as a session would after a
quarter, a half and three quarters of its iterations. A real one is asked for its forecast ten times a second from
another thread, as a user would: what counts is what it said at these shares, also where that was some seconds old.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fluid
from fluid import Cluster, FluidExecutor, Portfolio
from fluid.engine.events import Event, GroupSubmitted, IterationDone, StopRequested, TrialsAdded
from fluid.forecasting.play import play
from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.forecasting.search_now import SearchNow, shape_of
from fluid.search import loguniform, uniform
from fluid.session.forecasting.search import search_now
from fluid.simulation.simulate import _Simulation
from fluid.simulation.sweeps import Sweep
from fluid.simulation.workloads import GroupRequest, ScheduledSearch
from fluid.trialgroup import Search, TrialState

SHARES = (0.25, 0.5, 0.75)
ODDS = (0.1, 0.5, 0.9)
ALGORITHMS = ("asha", "successive_halving", "hyperband", "random")
_GROUP = "sweep"


@dataclass(frozen=True)
class SweepForecast:
    """A forecast of a sweep, and what came of it.

    Attributes:
        kind: of the sweep.
        share: of the iterations that were done.
        seconds: from then on, at each of the odds.
        actual: seconds from then on after which the sweep ended.
        age_s: seconds since the forecast was worked out.
    """

    kind: str
    share: float
    seconds: tuple[float, ...]
    actual: float
    age_s: float = 0.0

    def is_covered(self, place: int) -> bool:
        """Whether the sweep ended by the time forecast for the odds at a place."""
        return self.actual <= self.seconds[place] + 1e-9


# -- simulated sweeps ------------------------------------------------------------------------------------------


class WatchedSweep(_Simulation):
    """A simulated sweep that looks like a native one to the engine: one group, whose search lets losers go.

    Args:
        scenario: what to run.
        at: numbers of iterations after which the search is looked at, ascending.

    Attributes:
        iterations: how many were run.
        seen: when it was looked at, and what was seen.
    """

    def __init__(self, scenario: Scenario, at: Sequence[int] = ()) -> None:
        super().__init__(scenario, Portfolio(), False, None)
        self.iterations = 0
        self.seen: list[tuple[float, SearchNow | None]] = []
        self._at = list(at)
        shape = shape_of(scenario.workload)
        trials, extends = shape.trials or scenario.workload.trials, shape.algorithm != "full"
        self._search = Search("loss", "min", trials, extends=extends, shape=shape)
        self._has_begun = False
        #: How many of the trials that are over were let go.
        self._let_go_of = 0

    def _handle(self, events: Iterable[Event]) -> None:
        events = list(events)
        fresh = [trial for event in events if isinstance(event, GroupSubmitted) for trial in event.trials]
        told = [event for event in events if not isinstance(event, GroupSubmitted)]
        if fresh:
            made = TrialsAdded if self._has_begun else GroupSubmitted
            told.insert(0, made(events[0].at, _GROUP, tuple(fresh)))
            self._has_begun = True
        self.iterations += sum(isinstance(event, IterationDone) for event in events)
        super()._handle(told)
        while self._at and self.iterations >= self._at[0]:
            del self._at[0]
            now = self._backend.now()
            self.seen.append((now, search_now(self._state, _GROUP, self._search, now)))

    def _submit(self, sweep: Sweep, groups: list[GroupRequest]) -> None:
        super()._submit(sweep, groups)
        if self._search.extends and isinstance(sweep.algorithm, ScheduledSearch):
            over = sweep.algorithm.over
            self._let_go(sweep, over[self._let_go_of :])
            self._let_go_of = len(over)

    def _let_go(self, sweep: Sweep, trials: Iterable[int]) -> None:
        events = []
        for trial in sorted(trials):
            record = self._state.trials.get(self._id_of(sweep, trial))
            if record is not None and record.state is TrialState.DONE:
                events.append(StopRequested(self._backend.now(), record.trial_id, outcome=TrialState.STOPPED))
        if events:
            self._execute(self._state.handle(*events))


def simulated(sweeps: int, seed: int = 7) -> list[tuple[Scenario, list[SweepForecast]]]:
    """Runs sweeps of four shapes on 2 to 8 devices; on half of them trials share devices or span several."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(sweeps):
        shared = bool(rng.integers(2))
        workload = Workload(ALGORITHMS[number % 4], int(rng.choice([16, 32, 64])), int(rng.choice([9, 27, 81])))
        scenario = Scenario(
            Cluster.of(int(rng.choice([2, 4, 8]))),
            workload,
            Runtimes("lognormal", 1.0, 0.5),
            alpha=1.2,
            beta=1.15,
            c=4 if shared else 1,
            d=4 if shared else 1,
            runtime_error=float(rng.uniform(0.1, 1.0)),
            early_stop=float(rng.choice([0.0, 0.1, 0.3, 0.5])),
            seed=number,
        )
        found.append((scenario, _simulated(scenario)))
    return found


def _simulated(scenario: Scenario) -> list[SweepForecast]:
    first = WatchedSweep(scenario)
    end = first.run().makespan
    sweep = WatchedSweep(scenario, [max(1, int(share * first.iterations)) for share in SHARES])
    sweep.run()
    taken = []
    for share, (at, search) in zip(SHARES, sweep.seen, strict=True):
        if search is not None:
            ends = play(search, len(scenario.cluster))
            seconds = tuple(ends.quantile(q) for q in ODDS)
            taken.append(SweepForecast(scenario.workload.algorithm, share, seconds, end - at))
    return taken


# -- real sweeps -----------------------------------------------------------------------------------------------


def sleeper(config: dict[str, Any]) -> Any:
    """A trial that sleeps: as long each iteration, but for some noise."""
    noise = np.random.default_rng(int(1e6 * config["x"]))
    for step in range(1, 10):
        time.sleep(config["pace"] * float(np.exp(0.2 * noise.standard_normal())))
        yield {"loss": config["x"] / step}


def tune_sleeper(config: dict[str, Any]) -> None:
    """The same as a function of Ray Tune."""
    from ray import tune

    for result in sleeper(config):
        tune.report(result)


class Watch:
    """Asks the newest group of an executor for its forecast, ten times a second, in a thread.

    Args:
        executor: runs the sweep.
    """

    def __init__(self, executor: FluidExecutor) -> None:
        self._executor = executor
        self._known = len(executor.handles)
        self._stops = threading.Event()
        self._taken: list[tuple[float, int, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end = time.monotonic()
        self._stops.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stops.wait(0.1):
            if len(self._executor.handles) > self._known:
                group = self._executor.handles[-1]
                forecast = group.forecast(q=ODDS)
                status = self._executor.status().groups[-1]
                self._taken.append((time.monotonic(), status.iterations_done, forecast))

    def taken(self, kind: str) -> list[SweepForecast]:
        """What was said at each share of the iterations."""
        if not self._taken:
            return []
        iterations = max(done for _, done, _ in self._taken)
        found = []
        for share in SHARES:
            at, _, forecast = next(each for each in self._taken if each[1] >= share * iterations)
            if forecast is not None:
                seconds = tuple(forecast.seconds.values())
                found.append(SweepForecast(kind, share, seconds, self._end - at, forecast.age_s))
        return found


SPACE = {"x": uniform(0.0, 1.0), "pace": loguniform(0.03, 0.3)}


def _native(executor: FluidExecutor, algorithm: str, seed: int) -> None:
    arguments = {"metric": "loss", "algorithm": algorithm, "samples": 24, "budget": 9, "seed": seed}
    fluid.run(sleeper, SPACE, executor=executor, **arguments)


def _tune(executor: FluidExecutor, seed: int) -> None:
    from ray.tune.schedulers import ASHAScheduler

    from fluid import tune

    tune.run(
        tune_sleeper,
        config={"x": tune.uniform(0.0, 1.0), "pace": tune.loguniform(0.03, 0.3)},
        num_samples=24,
        scheduler=ASHAScheduler(max_t=9, reduction_factor=3),
        metric="loss",
        mode="min",
        verbose=0,
        executor=executor,
    )


def _optuna(executor: FluidExecutor, seed: int) -> None:
    import optuna

    from fluid.integrations.optuna import optimize

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    if seed % 2:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), pruner=pruner)

    def space(trial: Any) -> dict[str, float]:
        return {
            "x": trial.suggest_float("x", 0.0, 1.0),
            "pace": trial.suggest_float("pace", 0.03, 0.3, log=True),
        }

    optimize(study, sleeper, n_trials=24, space=space, metric="loss", budget=9, executor=executor)


REAL: tuple[tuple[str, Callable[[FluidExecutor, int], None]], ...] = (
    *((name, lambda executor, seed, name=name: _native(executor, name, seed)) for name in ("asha", "sha")),
    *((name, lambda executor, seed, name=name: _native(executor, name, seed)) for name in ("hyperband", "random")),
    ("Ray Tune's ASHA", _tune),
    ("Optuna", _optuna),
)


def run_real(kind: str, seed: int) -> list[SweepForecast]:
    """Runs one real sweep on 4 CPU devices, one trial on each."""
    sweep = dict(REAL)[kind]
    with (
        tempfile.TemporaryDirectory() as folder,
        FluidExecutor("local", devices=4, max_packing=1, verbose=0, run_dir=Path(folder) / "run") as executor,
    ):
        with Watch(executor) as watch:
            sweep(executor, seed)
        return watch.taken(kind)


def real() -> list[SweepForecast]:
    """Runs 20 real sweeps, each in a process of its own: 15 native ones, 3 of Ray Tune's ASHA and 2 of Optuna."""
    kinds = [("asha", "sha", "hyperband", "random")[number % 4] for number in range(15)]
    kinds += ["Optuna"] * 2 + ["Ray Tune's ASHA"] * 3
    found: list[SweepForecast] = []
    for number, kind in enumerate(kinds):
        command = [sys.executable, str(Path(__file__).resolve()), kind, str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env={**os.environ})
        lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
        if not lines:
            raise RuntimeError(f"a sweep of {kind} failed: {done.stderr[-2000:]}")
        taken = [SweepForecast(**fields) for fields in json.loads(lines[-1])]
        found += taken
        print(number, kind, [(each.share, each.is_covered(2), round(each.age_s, 1)) for each in taken], flush=True)
    return found


# -- figures ---------------------------------------------------------------------------------------------------


def figures_of(taken: Sequence[SweepForecast]) -> dict[str, Any]:
    """The share of forecasts that covered the end, by their odds, and how far the median was off."""
    if not taken:
        return {"forecasts": 0}
    figures: dict[str, Any] = {"forecasts": len(taken)}
    for place, odds in enumerate(ODDS):
        figures[f"covered_by_{odds}"] = float(np.mean([each.is_covered(place) for each in taken]))
    ratios = [each.actual / each.seconds[1] for each in taken if each.seconds[1] > 0.0 and each.actual > 0.0]
    if ratios:
        figures["actual_over_median"] = float(np.median(ratios))
        figures["error_of_median"] = float(math.exp(np.median([abs(math.log(ratio)) for ratio in ratios])) - 1.0)
    figures["age_s"] = float(np.median([each.age_s for each in taken]))
    return figures


def measure(sweeps: int, *, with_real: bool = True) -> dict[str, Any]:
    """Measures both kinds of sweeps.

    Args:
        sweeps: number of simulated ones.
        with_real: whether to run the real ones, too.
    """
    runs = simulated(sweeps)
    taken = [each for _, found in runs for each in found]
    early = sorted({scenario.early_stop for scenario, _ in runs})
    result: dict[str, Any] = {"sweeps": sweeps, "simulated": {"all": figures_of(taken)}}
    result["simulated"]["by_share"] = {str(s): figures_of([t for t in taken if t.share == s]) for s in SHARES}
    result["simulated"]["by_algorithm"] = {a: figures_of([t for t in taken if t.kind == a]) for a in ALGORITHMS}
    result["simulated"]["by_early_stop"] = {
        str(share): figures_of([each for scenario, found in runs if scenario.early_stop == share for each in found])
        for share in early
    }
    if with_real:
        real_taken = real()
        result["real"] = {
            "sweeps": 20,
            "all": figures_of(real_taken),
            "by_share": {str(s): figures_of([t for t in real_taken if t.share == s]) for s in SHARES},
            "covered_at_half_time": sum(t.is_covered(2) for t in real_taken if t.share == 0.5),
            "by_kind": {kind: figures_of([t for t in real_taken if t.kind == kind]) for kind, _ in REAL},
        }
    return result


def main() -> None:
    """Runs one real sweep, and prints its forecasts."""
    kind, seed = sys.argv[1], int(sys.argv[2])
    taken = run_real(kind, seed)
    print(json.dumps([asdict(each) for each in taken]))


if __name__ == "__main__":
    main()

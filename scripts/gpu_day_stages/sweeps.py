"""Whole sweeps through the public API, in each way of sharing a GPU: what users run. Their results are compared."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fluid
from fluid import FluidExecutor, Trial, TrialGroup, TrialListener
from gpu_day_stages.place import Place, taught
from gpu_day_stages.results import Figures

#: Profile key of the trials.
_KEY = "gpu-day-sweeps"
#: Most seconds of a sweep of a few seconds, so that one that hangs costs the others nothing.
_PATIENCE_S = 30.0
#: Seconds for an executor to close.
_CLOSE_S = 4.0

#: Losses of a sweep, by trial and iteration.
Losses = dict[tuple[str, int], float]


class Heard(TrialListener):
    """Collects results, and counts how many trials ran at once."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.first: float | None = None
        self.most = 0
        self._running: set[str] = set()

    def on_start(self, trial_id: str) -> None:
        """Counts a trial that runs."""
        self._running.add(trial_id)
        self.most = max(self.most, len(self._running))

    def on_result(self, result: Any) -> None:
        """Keeps a result."""
        self.first = self.first or time.perf_counter()
        self.results.append(result)

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        """Counts off a trial."""
        self._running.discard(trial_id)


def worst_difference(expected: Losses, found: Losses) -> float | None:
    """The largest difference of losses, relative; of iterations that both have. ``None`` if they share none."""
    both = expected.keys() & found.keys()
    return max((abs(found[one] - expected[one]) / max(1e-12, abs(expected[one])) for one in both), default=None)


def sweeps(place: Place, figures: Figures) -> None:
    """Trials of one class in each way, then ``fluid.run`` with ASHA: seconds, processes, rows, and their losses."""
    import torch  # noqa: F401  as the driver of a user has it: lanes then find it loaded

    packed = {"max_packing": 4}
    ways: dict[str, dict[str, Any]] = {
        "off": {},
        "timeslice": packed,
        "mps": packed,
        "fused": {},
        "lane": {},
        "auto": {},
    }
    expected: Losses = {}
    for way, options in ways.items():
        if way == "mps" and not place.gpus:
            continue
        if options:
            options = {**options, "profile": taught(_KEY, 4)}
        figures.attempt(way, lambda w=way, o=options: _sweep(place, w, o, expected))
    from gpu_day_stages.trainables import Net, regression

    expected = {}
    for way in ("off", "fused", "auto"):
        figures.attempt(f"asha, {way}", lambda w=way: _asha(place, w, Net, expected))
    figures.attempt("asha, auto, a function", lambda: _asha(place, "auto", regression, {}))


def _sweep(place: Place, way: str, options: dict[str, Any], expected: Losses) -> dict[str, Any]:
    from gpu_day_stages.trainables import Net, configs

    count, budget = (8, 20) if place.gpus else (4, 3)
    trials = [
        Trial(Net, config, budget=budget, trial_id=f"t{number}", profile_key=_KEY)
        for number, config in enumerate(configs(count))
    ]
    begun = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as home,
        FluidExecutor(
            "local", [place.device()], packing=way, run_dir=Path(home, "run"), max_failures=0, verbose=0, **options
        ) as executor,
    ):
        made = time.perf_counter() - begun
        heard = Heard()
        handle = executor.submit_trialgroup(TrialGroup(trials), heard)
        in_time = handle.wait(timeout=min(_PATIENCE_S, max(1.0, place.left() - _CLOSE_S)))
        results, ended = heard.results, time.perf_counter() - begun
        failures = {name: failure.message[:200] for name, failure in handle.failures.items()}
        if not in_time:
            failures["did not end"] = str({name: str(state) for name, state in handle.states.items()})[:300]
    losses = {(result.trial_id, result.iteration): result.metrics["loss"] for result in results}
    expected.update({} if expected else losses)
    return {
        "ended_s": ended,
        "made_s": made,
        "first_result_s": heard.first and heard.first - begun,
        "closed_s": time.perf_counter() - begun,
        "results": len(results),
        "wanted": count * budget,
        "worst_difference": worst_difference(expected, losses),
        "most_at_once": heard.most,
        **_how(results),
        "median_iteration_ms": 1e3 * statistics.median([result.seconds for result in results] or [0.0]),
        "failures": str(failures or ""),
    }


def _how(results: Iterable[Any]) -> dict[str, Any]:
    """In which processes trials ran, and how many at once in a step."""
    metrics = [result.metrics for result in results]
    return {
        "processes": len({one["pid"] for one in metrics}),
        "results_of_mps": sum(one["mps"] for one in metrics),
        "results_with_cuda": sum(one["cuda"] for one in metrics),
        "rows": str(dict(sorted(Counter(result.rows for result in results).items()))),
    }


def _asha(place: Place, way: str, trainable: Any, expected: Losses) -> dict[str, Any]:
    """A sweep by ASHA. Which trials go on depends on the order of results: iterations that both have are compared."""
    samples, budget = (16, 9) if place.gpus else (4, 3)
    begun = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as home,
        FluidExecutor("local", [place.device()], packing=way, run_dir=Path(home, "run"), verbose=0) as executor,
    ):
        found = fluid.run(
            trainable,
            {"lr": fluid.search.loguniform(1e-3, 1e-1), "seed": fluid.search.randint(0, 1000)},
            metric="loss",
            mode="min",
            algorithm="asha",
            samples=samples,
            budget=budget,
            time_budget_s=max(1.0, min(_PATIENCE_S, place.left() - _CLOSE_S)),
            seed=0,
            executor=executor,
        )
        results = [(str(trial.config), result) for trial in found.trials for result in trial.results]
    losses = {(config, result.iteration): result.metrics["loss"] for config, result in results}
    expected.update({} if expected else losses)
    return {
        "ended_s": time.perf_counter() - begun,
        "results": len(results),
        "trials": len(found.trials),
        "compared": len(expected.keys() & losses.keys()),
        "worst_difference": worst_difference(expected, losses),
        "best": found.best.value,
        **_how([result for _, result in results]),
        "failures": str([*found.notes, *map(str, found.failures)] or ""),
    }

"""Simulated groups on the real engine: what is forecast of their ends at some shares of progress, and what is true."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from fluid import Cluster
from fluid.engine.view import seconds_left
from fluid.forecasting.group import EarlyEnds, TrialLeft, TrialsLeft, forecast_group
from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.planners.instance import EndDistribution
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.session.forecasting.left import trials_left
from fluid.simulation.simulate import simulate

SHARES = (0.25, 0.5, 0.75)
ODDS = (0.1, 0.5, 0.9)
ERRORS, EARLY_STOPS = (0.1, 0.3, 0.5, 1.0), (0.0, 0.1, 0.3, 0.5)


@dataclass
class ForecastTaken:
    """A forecast of a group, and what came of it.

    Attributes:
        share: of the iterations that were done.
        eta: the predicted seconds, one number.
        ends: the forecast.
        likely: ids of the trials most likely to end last, the likeliest first.
        odds: of the first of these.
        milliseconds: that reading the engine took, and that the forecast took.
        left: seconds that the group still took.
        rank: position in ``likely`` of the trial that ended last; ``rank_of_any``: of one that ended within an
            iteration of the end.
    """

    share: float
    at: float
    eta: float
    ends: EndDistribution
    likely: list[str]
    odds: float
    milliseconds: tuple[float, float]
    left: float = 0.0
    rank: int = 0
    rank_of_any: int = 0


@dataclass
class GroupRun:
    """A simulated group with its forecasts."""

    scenario: Scenario
    taken: list[ForecastTaken] = field(default_factory=list)


def scenario_of(seed: int) -> Scenario:
    """Draws a group: 2 to 16 devices, 1 to 8 trials per device, which share devices, or are widened, or neither."""
    rng = np.random.default_rng(seed)
    devices, per_device = int(rng.choice([2, 4, 8, 16])), int(rng.choice([1, 2, 4, 8]))
    c, d = int(rng.choice([1, 2])), int(rng.choice([1, 4]))
    kind = str(rng.choice(["lognormal", "uniform", "bimodal"]))
    return Scenario(
        Cluster.of(devices),
        Workload("random", trials=max(4, devices * per_device), max_iterations=int(rng.choice([20, 50]))),
        Runtimes(kind, 1.0, float(rng.choice([0.2, 0.5]))),
        c=c,
        d=d,
        alpha=1.2 if c > 1 else 1.0,
        beta=1.1,
        epsilon=0.5,
        runtime_error=ERRORS[seed % len(ERRORS)],
        early_stop=EARLY_STOPS[seed // len(ERRORS) % len(EARLY_STOPS)],
        seed=seed,
    )


def run_group(scenario: Scenario) -> GroupRun:
    """Runs a group to its end, and compares its forecasts with that."""
    run, shares, states = GroupRun(scenario), list(SHARES), []

    def watch(state: EngineState, now: float) -> None:
        states[:] = [state]
        if not shares or "0" not in state.groups:
            return
        trials = [state.trials[trial_id] for trial_id in state.groups["0"].trial_ids]
        of_all = sum(trial.progress.done if trial.state.ended else trial.progress.budget for trial in trials)
        if sum(trial.progress.done for trial in trials) < shares[0] * of_all:
            return
        share, eta = shares.pop(0), seconds_left(trials, state.occupancy, state.estimates)
        begun = time.thread_time()
        left = trials_left(state, "0", now)
        read = time.thread_time()
        if left is None or eta is None:
            return
        forecast = left.forecast()
        took = 1e3 * (read - begun), 1e3 * (time.thread_time() - read)
        likely = sorted(zip(left.trial_ids, forecast.odds_last.tolist(), strict=True), key=lambda pair: -pair[1])
        run.taken.append(
            ForecastTaken(share, now, eta, forecast.ends, [name for name, _ in likely], likely[0][1], took)
        )

    planner = make_planner("portfolio", c=scenario.c, d=scenario.d)
    result = simulate(scenario, planner, record=True, watch=watch)
    ends: dict[str, float] = {}
    for segment in result.segments:
        name = result.trial_ids[segment.row]
        ends[name] = max(ends.get(name, 0.0), segment.end)
    last = max(ends, key=ends.__getitem__)
    pace = {name: states[0].trials[name].pace.seconds or 0.0 for name in ends}
    tied = {name for name, end in ends.items() if end >= result.makespan - pace[name]}
    for each in run.taken:
        each.left = result.makespan - each.at
        each.rank = each.likely.index(last)
        each.rank_of_any = min(each.likely.index(name) for name in tied if name in each.likely)
    return run


def pinball(q: float, forecast: float, true: float) -> float:
    """The loss of a forecast quantile."""
    return q * (true - forecast) if true >= forecast else (1.0 - q) * (forecast - true)


def figures_of(taken: list[ForecastTaken]) -> dict[str, float]:
    """The figures of some forecasts."""
    quantiles = [each.ends.quantiles(ODDS) for each in taken]
    loss = sum(pinball(q, found[q], each.left) for each, found in zip(taken, quantiles, strict=True) for q in ODDS)
    point = sum(pinball(q, each.eta, each.left) for each in taken for q in ODDS)
    relative = [
        sum(pinball(q, found[q], each.left) for q in ODDS) / each.left
        for each, found in zip(taken, quantiles, strict=True)
    ]
    point_relative = [sum(pinball(q, each.eta, each.left) for q in ODDS) / each.left for each in taken]
    covered = {q: [each.left <= found[q] for each, found in zip(taken, quantiles, strict=True)] for q in ODDS}
    return {
        "forecasts": len(taken),
        **{f"covered_by_{q:g}": round(float(np.mean(covered[q])), 3) for q in ODDS},
        "pinball_over_eta": round(loss / point, 3),
        "pinball_over_eta_relative": round(float(np.sum(relative) / np.sum(point_relative)), 3),
        "median_over_true": round(
            float(np.median([f[0.5] / e.left for e, f in zip(taken, quantiles, strict=True)])), 3
        ),
        "last_first": round(float(np.mean([each.rank == 0 for each in taken])), 3),
        "last_in_three": round(float(np.mean([each.rank < 3 for each in taken])), 3),
        "within_an_iteration_first": round(float(np.mean([each.rank_of_any == 0 for each in taken])), 3),
        "within_an_iteration_in_three": round(float(np.mean([each.rank_of_any < 3 for each in taken])), 3),
    }


def odds_of_the_first(taken: list[ForecastTaken]) -> dict[str, dict[str, float]]:
    """How often the trial named first ended last, by the odds that it was given."""
    found = {}
    for low, high in ((0.0, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.0)):
        named = [each for each in taken if low <= each.odds < high or each.odds == high == 1.0]
        if named:
            found[f"{low:g} to {high:g}"] = {
                "forecasts": len(named),
                "odds": round(float(np.mean([each.odds for each in named])), 3),
                "ended_last": round(float(np.mean([each.rank == 0 for each in named])), 3),
                "ended_within_an_iteration": round(float(np.mean([each.rank_of_any == 0 for each in named])), 3),
            }
    return found


def measure_speed(trials: int = 1000, runs: int = 20) -> dict[str, float]:
    """Milliseconds of a forecast of many trials: all running, most waiting, and both where trials end early."""
    rng, found = np.random.default_rng(0), {}
    seconds = np.sort(rng.lognormal(3.0, 0.5, trials))[::-1].tolist()
    early = EarlyEnds(rng.random(100).tolist(), [1.0] * 200)
    for name, servers, ends in (
        ("all_run", trials, EarlyEnds([], [])),
        ("64_run", 64, EarlyEnds([], [])),
        ("all_run_some_end_early", trials, early),
        ("64_run_some_end_early", 64, early),
    ):
        rows = [TrialLeft(seconds=each, sigma=0.3, runs=row < servers) for row, each in enumerate(seconds)]
        left, times = TrialsLeft.of(rows), []
        for _ in range(runs):
            begun = time.thread_time()
            forecast_group(left, servers, ends)
            times.append(1e3 * (time.thread_time() - begun))
        found[name] = round(float(np.median(times)), 2)
    return found


def measure(groups: int) -> dict[str, object]:
    """Runs the groups; returns the figures of all, by share of progress, error, early stops, and kind of group."""
    runs = [run_group(scenario_of(seed)) for seed in range(groups)]
    pairs = [(run.scenario, each) for run in runs for each in run.taken]

    def by(name: str, value: object) -> list[ForecastTaken]:
        return [each for scenario, each in pairs if getattr(scenario, name) == value]

    half = [each for _, each in pairs if each.share == 0.5]
    return {
        "groups": groups,
        "all": figures_of([each for _, each in pairs]),
        "by_progress": {f"{share:g}": figures_of([e for _, e in pairs if e.share == share]) for share in SHARES},
        "by_runtime_error": {f"{error:g}": figures_of(by("runtime_error", error)) for error in ERRORS},
        "by_early_stop": {f"{stop:g}": figures_of(by("early_stop", stop)) for stop in EARLY_STOPS},
        "by_packing": {str(c): figures_of(by("c", c)) for c in (1, 2)},
        "by_widest": {str(d): figures_of(by("d", d)) for d in (1, 4)},
        "half_time_by_devices": {
            str(n): figures_of([e for s, e in pairs if len(s.cluster) == n and e.share == 0.5]) for n in (2, 4, 8, 16)
        },
        "half_time_by_trials_per_device": {
            str(n): figures_of(found)
            for n in (1, 2, 4, 8)
            if (found := [e for s, e in pairs if round(s.workload.trials / len(s.cluster)) == n and e.share == 0.5])
        },
        "half_time": figures_of(half),
        "odds_of_the_trial_named_first": odds_of_the_first([each for _, each in pairs]),
        "milliseconds_for_1000_trials": measure_speed(),
        "milliseconds_to_read_the_engine": round(float(np.median([e.milliseconds[0] for _, e in pairs])), 2),
    }

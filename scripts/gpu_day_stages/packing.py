"""What packing gains: trials by hand, in k processes without Fluid, and what Fluid measures and makes of the same."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from packing import Size, crew, throughput, ways_to_share
from packing_workload import Workload

from fluid import FluidExecutor, Trial, TrialGroup
from gpu_day_stages.place import Place
from gpu_day_stages.results import Figures

#: What fills a GPU must not gain; what waits for input gains anywhere.
_LOOPS = ("cnn", "mlp", "wide", "input")
#: Processes of the loop that fills a GPU: more change nothing.
_MOST_WIDE = 4
#: Most trials that Fluid may pack.
_MOST = 8
#: Iterations of the trial that tells the pace.
_PROBE = 30
#: Seconds of a trial alone. One more trial is tried only where that repays the start of a lane several times.
_TRIAL_S = 3.0
#: The part of the time one after another that trials take at least: packing saves more.
_LEAST_PART = 0.6
#: How Fluid packs, and so many trials.
_PLANS = (("cnn", "mps", 16), ("cnn", "timeslice", 10), ("wide", "mps", 4), ("mlp", "mps", 12))


def _size(place: Place) -> Size:
    size = Size(gpu=bool(place.gpus), quick=True, counts="1,2,4,8,16" if place.gpus else "1,2")
    size.seconds, size.rounds = (0.6, 2) if place.gpus else (0.1, 1)
    return size


def by_hand(place: Place, figures: Figures) -> None:
    """Iterations per second of k processes at once, in time slices and under MPS, and relative to one process."""
    size = _size(place)
    gpu = place.gpus[0] if place.gpus else None
    with contextlib.closing(ways_to_share(gpu)) as ways:  # MPS ends here in any case.
        for way, environment in ways:
            with crew(max(size.counts), environment, None) as connections:
                for loop in _LOOPS:
                    counts = [k for k in size.counts if loop != "wide" or k <= _MOST_WIDE]
                    some = connections[: max(counts)]
                    rates = figures.attempt(f"{way}, {loop}", lambda c=some, n=loop, k=counts: _rates(c, size, n, k))
                    if rates is not None:
                        figures[f"{way}, {loop}, gain"] = {k: rate / rates[1] for k, rate in rates.items()}


def _rates(connections: list[Any], size: Size, loop: str, counts: list[int]) -> dict[int, float]:
    return {k: one["rate"] for k, one in throughput(connections, size, loop, counts).items()}


def alpha(place: Place, figures: Figures) -> None:
    """What Fluid measures by itself on the same loops, and its iterations per second with the ramp of packing."""
    import torch  # noqa: F401  so that lanes find it loaded, as those of users do

    paces: dict[str, float] = {}
    for loop, way, trials in _PLANS if place.gpus else (("cnn", "timeslice", 3),):
        if loop not in paces:
            alone = figures.attempt(
                f"{loop}, off", lambda name=loop: _packed(place, name, "off", 1, place.repeats(_PROBE))
            )
            if alone is None:
                continue
            paces[loop] = alone["iteration_s"]
        budget = max(10, int(_TRIAL_S / paces[loop])) if place.gpus else 3
        if place.left() < _LEAST_PART * trials * budget * paces[loop]:
            figures[f"{loop}, {way}"] = "no time left"
            continue
        figures.attempt(f"{loop}, {way}", lambda n=loop, w=way, t=trials, b=budget: _packed(place, n, w, t, b))


def _packed(place: Place, loop: str, way: str, trials: int, budget: int) -> dict[str, Any]:
    config = _size(place).config(loop)
    with (
        tempfile.TemporaryDirectory() as home,
        FluidExecutor(
            "local", [place.device()], packing=way, max_packing=_MOST, run_dir=Path(home, "run"), verbose=0
        ) as executor,
    ):
        group = [Trial(Workload, {**config, "seed": seed}, budget=budget, profile_key=loop) for seed in range(trials)]
        handle = executor.submit_trialgroup(TrialGroup(group))
        ends, own = [], []
        for result in handle.results():
            ends.append(time.perf_counter())
            own.append(result.seconds)
        handle.raise_failures()
        profile = executor.profile
        measured = profile.measured_packing(loop)
        return {
            "per_s": (len(ends) - 1) / (ends[-1] - ends[0]),
            "seconds": ends[-1] - ends[0],
            "iteration_s": statistics.median(own),
            "alpha": profile.alpha(loop),
            "measured": measured,
            "c": profile.packing_limit(loop, max(1, measured)),
            "memory": str(profile.memory(loop)),
        }

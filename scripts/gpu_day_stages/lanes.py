"""What Fluid adds to a trial: the start of a lane, each iteration, and the switch between two resident trials."""

from __future__ import annotations

import os
import queue
import statistics
import time
from typing import Any

from fluid import FluidExecutor, Trial, TrialGroup, TrialListener
from gpu_day_stages.place import Place, taught
from gpu_day_stages.results import Figures

#: Longest wait for a result, seconds.
_PATIENCE_S = 60.0
#: Iterations that are measured. The lane reports empty ones in batches, so many are needed.
_ITERATIONS, _EMPTY_ITERATIONS = 1000, 20_000
#: A budget that no trial of these stages comes to the end of.
_ENDLESS = 10**7
_KEY = "gpu-day"


class Heard(TrialListener):
    """Hears results as they arrive."""

    def __init__(self) -> None:
        self._results: queue.Queue[tuple[str, float]] = queue.Queue()

    def on_result(self, result: Any) -> None:
        """Notes when a result arrived."""
        self._results.put((result.trial_id, time.perf_counter()))

    def next_of(self, trial_id: str) -> float:
        """Returns when the next result of a trial arrived; others are forgotten."""
        while True:
            found, at = self._results.get(timeout=_PATIENCE_S)
            if found == trial_id:
                return at

    def forget(self) -> None:
        """Forgets the results that have arrived."""
        while not self._results.empty():
            self._results.get()


class Small:
    """A trial with short iterations: a training step of one convolution; or, with ``empty``, nothing.

    It has a tensor on its device in both cases, so that its lane measures memory. No optimizer is used: the first one
    of a process imports much.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the layer and its input."""
        import torch

        self._empty = config["empty"]
        self._layer = torch.nn.Conv2d(3, 64, 3, device=config["device"])
        self._images = torch.randn(32, 3, 32, 32, device=config["device"])

    def step(self) -> dict[str, float]:
        """Runs an iteration."""
        if self._empty:
            return {"loss": 0.0}
        import torch

        loss = self._layer(self._images).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self._layer.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        return {"loss": float(loss.detach())}  # Waits for the device.


def config_of(place: Place, *, empty: bool = False) -> dict[str, Any]:
    """Returns the config of a trial."""
    return {"device": place.kind, "empty": empty}


def trial(place: Place, trial_id: str, budget: int = _ENDLESS, *, empty: bool = False) -> Trial:
    """Returns a trial."""
    return Trial(Small, config_of(place, empty=empty), budget=budget, trial_id=trial_id, profile_key=_KEY)


def lanes(place: Place, figures: Figures) -> None:
    """Records the figures."""
    import torch  # noqa: F401  so that lanes find it loaded, as those of users do

    some, many = place.repeats(_ITERATIONS), place.repeats(_EMPTY_ITERATIONS)
    figures["bare_iteration_ms"] = 1e3 * _mean_gap(_ends_without_fluid(place, _with_warm_up(some)), some)
    begun = time.perf_counter()
    with FluidExecutor("local", [place.device()], packing="off", verbose=0) as executor:
        arrivals = _arrivals(executor, trial(place, "small", _with_warm_up(some)))
        figures["first_result_s"] = arrivals[0] - begun
        figures["iteration_ms"] = 1e3 * _mean_gap(arrivals, some)
        arrivals = _arrivals(executor, trial(place, "empty", _with_warm_up(many), empty=True))
        figures["empty_iteration_ms"] = 1e3 * _mean_gap(arrivals, many)
        figures["memory"] = str(executor.profile.memory(_KEY))
        _switch(place, executor, figures)
    _second_lane(place, figures)


def _with_warm_up(iterations: int) -> int:
    return iterations * 10 // 9 + 2


def _mean_gap(times: list[float], iterations: int) -> float:
    """The mean of the last so many iterations, seconds."""
    return (times[-1] - times[-1 - iterations]) / iterations


def _ends_without_fluid(place: Place, iterations: int) -> list[float]:
    """When each iteration of a trial in a bare loop ended."""
    bare = Small()
    bare.setup(config_of(place))
    ends = []
    for _ in range(iterations):
        bare.step()
        ends.append(time.perf_counter())
    return ends


def _arrivals(executor: FluidExecutor, measured: Trial) -> list[float]:
    """When each result of a trial arrived."""
    handle = executor.submit_trialgroup(TrialGroup([measured]))
    arrivals = [time.perf_counter() for _ in handle.results()]
    handle.raise_failures()
    return arrivals


def _switch(place: Place, executor: FluidExecutor, figures: Figures) -> None:
    """From a request to pause the running trial and resume another one to the other's next result.

    Both are resident. The iteration that is finished first and the other's own are subtracted.
    """
    heard = Heard()
    handle = executor.submit_trialgroup(TrialGroup([trial(place, "one"), trial(place, "other")]), heard)
    heard.next_of("one")
    gaps, iterations = [], []
    running, waiting = "one", "other"
    for _ in range(place.repeats(30) + 2):
        begun = time.perf_counter()
        handle.pause(running)
        handle.resume(waiting)
        gaps.append(heard.next_of(waiting) - begun)
        running, waiting = waiting, running
        last = heard.next_of(running)
        iterations.append(heard.next_of(running) - last)
        heard.forget()
    for name in ("one", "other"):
        handle.stop(name)
    handle.wait()
    gaps = gaps[2:]  # The first switch sets the other trial up.
    figures["pause_and_resume_ms"] = 1e3 * max(0.0, statistics.median(gaps) - 2 * statistics.median(iterations))
    figures["slowest_pause_and_resume_ms"] = 1e3 * max(gaps)


def _second_lane(place: Place, figures: Figures) -> None:
    """From the submission of a second trial to its first result, in a lane of its own beside a running one."""
    with FluidExecutor(
        "local", [place.device()], packing="timeslice", max_packing=2, profile=taught(_KEY, 2), verbose=0
    ) as executor:
        heard = Heard()
        first = executor.submit_trialgroup(TrialGroup([trial(place, "first")]), heard)
        for _ in range(place.repeats(20)):
            heard.next_of("first")
        begun = time.perf_counter()
        second = executor.submit_trialgroup(TrialGroup([trial(place, "second")]), heard)
        figures["second_lane_s"] = heard.next_of("second") - begun
        second.stop("second")
        first.stop("first")


def lanes_memory(place: Place, figures: Figures) -> None:
    """Bytes of 64 small trials that take turns in one lane, and of as many in a process each."""
    import lanes as benchmark  # benchmarks/lanes.py

    os.environ["PYTHONPATH"] = os.pathsep.join([str(benchmark.HERE), os.environ.get("PYTHONPATH", "")])
    arguments = ["--device", "gpu"] if place.gpus else ["--device", "cpu", "--trials", "2"]
    figures["memory"] = benchmark.memory(benchmark.make_parser().parse_args(arguments))

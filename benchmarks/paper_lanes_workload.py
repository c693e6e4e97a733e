"""Trials of paper.py whose work is known: they sleep, or compute on one core, for the seconds that their config says.

Eight lanes of trials that sleep are as fast as eight devices on a machine with two cores, so that what a schedule gains
or loses there (idle tails, stragglers, packing, widening) shows in real sweeps. What devices would cost is assumed, and
paid by all systems: each of k trials on one device takes ``alpha ** (k - 1)`` times as long as alone, on w devices a
trial takes ``beta ** (w - 1) / w`` times as long. Trials that compute share cores for real: only their beta is assumed.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.data import DataSet
from models.trial import FIXED, now
from overhead_workload import burn
from tuning.scales import Scale
from tuning.workload import Workload

from fluid import tune
from fluid.elastic import ElasticTrainable

#: Standard deviation of the logarithm of an iteration's seconds over the trial's.
_SIGMA = 0.05
#: Seconds of sleep after which a trial looks how many others share its device.
_SLICE = 0.02
#: Longest stretch of arithmetic in one call, in milliseconds.
_STRETCH = 20.0


class KnownWork(ElasticTrainable):
    """A trial of known length; ``accuracy`` approaches a peak that depends on the rate.

    Its config: ``seconds`` of an iteration, in units of the scale; ``lr``; and under ``fixed`` ``unit`` (seconds),
    ``alpha`` (``None`` for one that computes instead of sleeping), ``beta``, and ``sharing``, a folder in which trials
    tell which device they use.
    """

    def build(self, config: dict[str, Any]) -> None:
        self._config, self._accuracy = config, 0.0

    def extra_state(self) -> float:
        return self._accuracy

    def load_extra_state(self, state: float) -> None:
        self._accuracy = state

    def train_iteration(self) -> dict[str, float]:
        fixed = self._config[FIXED]
        seconds = seconds_of(self._config, self.iteration) * fixed["beta"] ** (self.size - 1) / self.size
        if fixed["alpha"] is None:
            compute(seconds)
        else:
            sleep(seconds, fixed["alpha"], Path(fixed["sharing"]))
        self.all_reduce_mean(0.0, count=1)  # As devices wait for each other to average gradients.
        self._accuracy += (peak(self._config) - self._accuracy) * 0.25
        return {"accuracy": self._accuracy, "width": self.size, **now()}


def seconds_of(config: Mapping[str, Any], iteration: int) -> float:
    """Seconds of an iteration by itself on one device, the same wherever and whenever it runs."""
    drawn = random.Random(f"{config['seed']} {config['seconds']} {iteration}")
    return float(config[FIXED]["unit"] * config["seconds"] * drawn.lognormvariate(0.0, _SIGMA))


def peak(config: Mapping[str, Any]) -> float:
    """The accuracy that a trial approaches: 0.9 at the best rate and the largest size."""
    return max(0.1, 0.9 - 0.08 * (math.log10(config["lr"]) + 2.0) ** 2 - 0.05 * (1.0 - config["seconds"]))


def compute(seconds: float) -> None:
    """Uses that many seconds of one core."""
    until = time.thread_time() + seconds
    while (left := until - time.thread_time()) > 0.0:
        burn(min(_STRETCH, 1e3 * left))


def sleep(seconds: float, alpha: float, sharing: Path) -> None:
    """Sleeps as long as an iteration takes that has so many seconds of work, with others on its device or without."""
    last = time.monotonic()
    with on_device(sharing) as others:
        while seconds > 0.0:
            slowdown = alpha ** others()
            time.sleep(min(_SLICE, seconds * slowdown))
            passed, last = time.monotonic() - last, time.monotonic()
            seconds -= passed / slowdown


@contextmanager
def on_device(sharing: Path) -> Iterator[Any]:
    """Says in a folder that this process uses its device; gives a function that counts others that do."""
    (index,) = json.loads(os.environ.get("FLUID_DEVICES", "[-1]"))
    if index < 0:  # Ray Tune alone, where no two trials share a device.
        yield lambda: 0
        return
    folder = sharing / str(index)
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / str(os.getpid())
    mine.touch()
    try:
        # One that was killed in an iteration has left its file.
        yield lambda: sum(name != mine.name and os.path.exists(f"/proc/{name}") for name in os.listdir(folder))
    finally:
        mine.unlink()


class KnownWorkload(Workload):
    """A workload whose sizes are its own; ``fixed`` of the config has them."""

    def scale(self, name: str) -> Scale:
        """Returns the size of a scale; "full" is as large as "small"."""
        if name == "tiny":
            return Scale(3, 3, 3, 0.3, {**FIXED_OF[self.name], "unit": 0.1})
        return Scale(*(9, 6, 9) if self.name == "arithmetic" else (27, 16, 27), 0.7, FIXED_OF[self.name])


#: Alpha and beta of ``benchmarks/rehearsal.py`` (two, three, four trials on a device have 1.54, 1.78, 1.82 times the
#: throughput; two, three, four devices make a trial as many times as fast), and of ``paper_shapes.py``.
FIXED_OF = {
    "sleep": {"unit": 0.6, "alpha": 1.3, "beta": 1.3},
    "sleep_scaling": {"unit": 0.6, "alpha": 1.12, "beta": 1.06},
    "arithmetic": {"unit": 0.3, "alpha": None, "beta": 1.3},
}
_TITLES = {
    "sleep": "iterations that sleep 0.12 to 0.6 s, alpha 1.3, beta 1.3",
    "sleep_scaling": "iterations that sleep 0.12 to 0.6 s, alpha 1.12, beta 1.06",
    "arithmetic": "iterations of 0.06 to 0.3 s of a core, beta 1.3",
}
WORKLOADS = {
    name: KnownWorkload(
        name=name,
        title=title,
        trainable=KnownWork,
        data=DataSet("nothing", "nothing", lambda folder: True, lambda folder: None, ""),
        metric="accuracy",
        mode="max",
        space={"lr": tune.loguniform(1e-5, 1.0), "seconds": tune.loguniform(0.2, 1.0)},
        changing=("lr",),
        # A folder of the measurement's own, as its home is.
        prepare=lambda folder: {"sharing": str(Path.home() / "sharing")},
    )
    for name, title in _TITLES.items()
}

"""Measures how soon a lane starts: from a trial's end on a device to the next trial's `setup`, and what a lane takes.

    python benchmarks/lane_starts.py [--trials 60] [--lanes 256] [--paused 20] [--json FILE]

Commands go to the local backend, without an engine, so that every lane is used for one trial. Times are read on the
machine's monotonic clock, in the lanes and in the driver:

* ``turnover``: a trial is released, and the next one is told to start in a lane that is forked then ("no spare"), or
  that waits ("spare": another one is forked at the same moment). "fork to ready" is from the request to the lane's
  first message. Modules are loaded by the fork server; with ``torch``, the trial makes a layer.
* ``lanes``: so many lanes without PyTorch, one after the other on each of two devices, from the start of the first to
  the end of the last.
* ``memory``: small trials with an optimizer, paused in a lane each: private memory of a lane, its descriptors, and the
  CPU seconds of the first optimizer; of the first lane, and of those that were forked after the fork server had loaded
  what the first one was found to load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import machine

from fluid import Device
from fluid.backends.hosts.lane_limits import private_bytes
from fluid.backends.local.backend import LocalBackend
from fluid.engine.commands import Command, StartLane, StartTrial, StopLane, StopTrial
from fluid.engine.events import Event, IterationDone, LaneLost, LaneReady, TrialFailed, TrialReleased
from fluid.trainables.payload import payload_of

#: Seconds after which the fork server has loaded what the first lane was found to load.
_LATE_S = 10.0


class Empty:
    """Tells when it was set up."""

    def setup(self, config: dict[str, Any]) -> None:
        """Notes the time."""
        self.at = time.monotonic()

    def step(self) -> dict[str, float]:
        """Tells it."""
        return {"setup": self.at}


class Layer(Empty):
    """Makes a layer of PyTorch as well."""

    def setup(self, config: dict[str, Any]) -> None:
        """Notes the time, and makes the layer."""
        super().setup(config)
        import torch

        self.layer = torch.nn.Linear(64, 64)


class Small:
    """A layer that is trained."""

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the layer, and the process's first optimizer."""
        import torch

        begun = time.process_time()
        self.layer = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.seconds = time.process_time() - begun
        self.inputs = torch.ones(16, 64)

    def step(self) -> dict[str, float]:
        """Trains."""
        self.optimizer.zero_grad()
        self.layer(self.inputs).pow(2).mean().backward()
        self.optimizer.step()
        return {"pid": os.getpid(), "first_optimizer_s": self.seconds, "descriptors": len(os.listdir("/proc/self/fd"))}


class Lanes:
    """Runs lanes and waits for their events."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self.ready: dict[int, LaneReady] = {}

    def run(self, *commands: Command) -> None:
        """Carries commands out."""
        self.backend.execute(commands)

    def until(self, is_it: Callable[[Event], bool]) -> Event:
        """Waits for an event."""
        while True:
            found = None
            for event in self.backend.poll(60.0):
                if isinstance(event, LaneReady):
                    self.ready[event.lane_id] = event
                elif isinstance(event, (LaneLost, TrialFailed)):
                    raise RuntimeError(str(event))
                if is_it(event):
                    found = event
            if found is not None:
                return found


def turnover(trainable: type, modules: list[str], trials: int, *, spare: bool) -> dict[str, float]:
    """Medians of what lies between a trial's release and the next one's `setup`, milliseconds."""
    free_to_setup: list[float] = []
    with LocalBackend([Device(0, kind="cpu")], preload=modules) as backend:
        lanes, payload = Lanes(backend), payload_of(trainable, {})
        lanes.run(StartLane(0, 0))
        lanes.until(lambda event: isinstance(event, LaneReady))
        free_at = None
        for number in range(1, trials + 1):
            trial_id = f"trial-{number}"
            backend.register(trial_id, payload)
            lane = number - 1 if spare else number
            start = StartTrial(trial_id, (lane,), iterations=1)
            lanes.run(*((start, StartLane(number, 0)) if spare else (StartLane(number, 0), start)))
            done = lanes.until(lambda event: isinstance(event, IterationDone))
            assert isinstance(done, IterationDone)
            if free_at is not None:
                free_to_setup.append(done.metrics.decode()["setup"] - free_at)
            while spare and number not in lanes.ready:
                lanes.until(lambda event: isinstance(event, LaneReady))
            lanes.run(StopTrial(trial_id, (lane,)))
            free_at = lanes.until(lambda event: isinstance(event, TrialReleased)).at
            lanes.run(StopLane(lane))
            backend.forget(trial_id)
    ready = [event.seconds for number, event in lanes.ready.items() if number]
    figures = {"free to setup": free_to_setup, "fork to ready": ready}
    return {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in figures.items()}


def many_lanes(count: int) -> float:
    """Seconds from the start of the first of so many lanes to the end of the last one, on two devices."""
    with LocalBackend([Device(0, kind="cpu"), Device(1, kind="cpu")], preload=[]) as backend:
        lanes, payload = Lanes(backend), payload_of(Empty, {})
        lane_of, numbers = {}, iter(range(count))

        def start(device: int) -> None:
            number = next(numbers, None)
            if number is not None:
                lane_of[f"trial-{number}"] = number, device
                backend.register(f"trial-{number}", payload)
                lanes.run(StartLane(number, device), StartTrial(f"trial-{number}", (number,), iterations=1))

        begun = time.perf_counter()
        start(0)
        start(1)
        while lane_of:
            for event in backend.poll(60.0):
                if isinstance(event, IterationDone):
                    lanes.run(StopTrial(event.trial_id, (event.lane_id,)))
                elif isinstance(event, TrialReleased):
                    number, device = lane_of.pop(event.trial_id)
                    lanes.run(StopLane(number))
                    backend.forget(event.trial_id)
                    start(device)
        backend.end()
        return time.perf_counter() - begun


def memory(paused: int) -> dict[str, float]:
    """What lanes of paused trials take: the first one, and the median of the others."""
    with LocalBackend([Device(0, kind="cpu")], preload=["torch"]) as backend:
        lanes, payload, found = Lanes(backend), payload_of(Small, {}), []
        for number in range(paused + 1):
            backend.register(f"trial-{number}", payload)
            lanes.run(StartLane(number, 0), StartTrial(f"trial-{number}", (number,), iterations=1))
            done = lanes.until(lambda event: isinstance(event, IterationDone))
            assert isinstance(done, IterationDone)
            found.append(done.metrics.decode())
            until = time.monotonic() + (0.0 if number else _LATE_S)
            while time.monotonic() < until:
                backend.poll(0.1)
        private = [1e-6 * (private_bytes(int(each["pid"])) or 0.0) for each in found]
        return {
            "first lane, MB": round(private[0], 1),
            "lane, MB": round(statistics.median(private[1:]), 1),
            "first lane's optimizer, ms": round(1e3 * found[0]["first_optimizer_s"], 1),
            "lane's optimizer, ms": round(1e3 * statistics.median(each["first_optimizer_s"] for each in found[1:]), 1),
            "descriptors of a lane": max(each["descriptors"] for each in found[1:]),
            "descriptors of the driver": len(os.listdir("/proc/self/fd")),
        }


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=60, help="trials of each turnover; the medians count")
    parser.add_argument("--lanes", type=int, default=256, help="lanes without PyTorch")
    parser.add_argument("--paused", type=int, default=20, help="lanes whose memory is measured, after the first one")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, trainable, modules in (("empty", Empty, []), ("torch", Layer, ["torch"])):
        for spare in (False, True):
            found = turnover(trainable, modules, options.trials, spare=spare)
            figures[f"{name}, {'spare' if spare else 'no spare'}"] = found
            print(f"{name}, {'spare' if spare else 'no spare'}: {found} ms")
    figures["lanes_s"] = many_lanes(options.lanes)
    print(f"{options.lanes} lanes on two devices: {figures['lanes_s']:.2f} s")
    figures["memory"] = memory(options.paused)
    print(f"paused trials: {figures['memory']}")
    if options.json:
        written = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **figures}
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Checks that packing harms no trial: random packings that need more memory than the device has, and a faulting trial.

    python benchmarks/packing_safety.py [--device auto|gpu|cpu] [--ways timeslice,mps] [--packings 200] [--seconds S]
        [--mixed 200] [--seed 0] [--json FILE]

Packings: each is a handful of trials of random shapes, which hold and allocate random amounts of memory, often more
than the device has. Every shape is first measured alone; then the profile says that packing pays, and Fluid packs as
far as its memory condition allows. The benchmark counts trials that had to start again and trials that failed: both
must be 0.

Fault: one of four trials on a device faults in its third iteration, each time. On a GPU it reads beyond the end of a
tensor, which is fatal to every client of MPS; on a CPU it kills its process. The other trials must end with every
iteration reported once and no failure.

Mixed sizes: a sweep of trials of one profile key, whose configs decide how much memory each takes. The first 60 teach
the profile; then the benchmark measures how full the device is while trials wait: the bytes that running trials need,
on average over time. The three ways are cohorts, one key (``Profile(cohorts=False)``), and an oracle, which is told
what each trial needs. The trials that run must never need more than the device has.

On a CPU the device is one core and a share of the host's memory. On a GPU it needs PyTorch.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import time
from collections import Counter
from typing import Any

import numpy as np
from measuring import write_json

from fluid import Device, FluidExecutor, MemoryNeed, Profile, Trial, TrialGroup, TrialListener

MIB = 1 << 20
#: Memory of a CPU device.
CPU_MEMORY = 256 * MIB
#: Seconds an iteration waits, so that trials run at the same time.
WAIT_S = 0.1
#: Most trials of a packing, and different shapes among them.
MOST, SHAPES = 8, 3
#: Of mixed sizes: trials that teach the profile, most trials at once, batch sizes and widths.
TAUGHT, MOST_MIXED, BATCHES, WIDTHS = 60, 12, (8, 16, 32, 64), (32, 64, 128, 256)


class Eater:
    """Holds memory between iterations and allocates more within each.

    The config: ``kept`` and ``taken``, bytes; ``wait``, seconds; ``fault_at``, the iteration that faults, 0 for none.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Allocates the memory that it holds."""
        self._config = config
        self._cuda = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        self._kept = self._take(config["kept"])
        self._done = 0

    def step(self) -> dict[str, Any]:
        """Allocates more for a while."""
        taken = self._take(self._config["taken"])
        time.sleep(self._config["wait"])
        self._done += 1
        if self._done == self._config["fault_at"]:
            self._fault()
        return {"bytes": len(taken) + len(self._kept)}

    def save_checkpoint(self, folder: str) -> dict[str, int]:
        """Saves the number of iterations."""
        return {"done": self._done}

    def load_checkpoint(self, state: dict[str, int]) -> None:
        """Loads the number of iterations."""
        self._done = state["done"]

    def _take(self, size: int) -> Any:
        if not self._cuda:
            return b"x" * size
        import torch

        return torch.ones(size, dtype=torch.uint8, device="cuda")

    def _fault(self) -> None:
        if not self._cuda:
            os.kill(os.getpid(), signal.SIGKILL)
        import torch

        beyond = torch.tensor([1 << 20], device="cuda")
        torch.zeros(1, device="cuda")[beyond].cpu()


class Sized(Eater):
    """Holds memory by its width, and allocates more by its batch size and width.

    The config: ``batch_size``, ``width``, ``wait``, and ``memory``, bytes of the device.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Allocates the memory that it holds."""
        need = need_of(config)
        kept, taken = int(need.persistent_bytes), int(need.ephemeral_bytes)
        super().setup({"kept": kept, "taken": taken, "wait": config["wait"], "fault_at": 0})


def need_of(config: dict[str, Any]) -> MemoryNeed:
    """Returns what a trial with sizes takes: up to 0.06 and 0.3 of the device's memory."""
    width = config["width"] / WIDTHS[-1]
    persistent, ephemeral = 0.06 * width, 0.3 * width * config["batch_size"] / BATCHES[-1]
    return MemoryNeed(persistent * config["memory"], ephemeral * config["memory"])


class Fill(TrialListener):
    """Adds up what running trials need."""

    def __init__(self, needs: dict[str, float]) -> None:
        self.failed: list[str] = []
        self.most = 0.0
        self.starts: Counter[str] = Counter()
        self._needs = needs
        self._running: set[str] = set()
        self._last = time.monotonic()
        self._stretches: list[tuple[float, float]] = []  # Seconds, and bytes that running trials needed meanwhile.
        self._until = 0

    def on_start(self, trial_id: str) -> None:
        """Adds a trial."""
        self._note()
        self.starts[trial_id] += 1
        self._running.add(trial_id)
        self.most = max(self.most, self._bytes())
        self._until = len(self._stretches)  # What follows the last start is the end of the sweep.

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        """Takes it off."""
        self._note()
        self._running.discard(trial_id)
        if failure is not None:
            self.failed.append(f"{trial_id}: {failure.message}")

    def mean_bytes(self) -> float:
        """Returns the mean over the time in which trials waited."""
        stretches = self._stretches[1 : self._until]
        seconds = sum(each for each, _ in stretches)
        return sum(each * held for each, held in stretches) / seconds if seconds else 0.0

    def _bytes(self) -> float:
        return sum(self._needs[trial_id] for trial_id in self._running)

    def _note(self) -> None:
        now = time.monotonic()
        self._stretches.append((now - self._last, self._bytes()))
        self._last = now


class Starts(TrialListener):
    """Counts how often each trial started, what it reported, and how many ran at once."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self.results: Counter[str] = Counter()
        self.most_packed = 0
        self._running: set[str] = set()

    def on_start(self, trial_id: str) -> None:
        """Counts a start."""
        self.starts[trial_id] += 1
        self._running.add(trial_id)
        self.most_packed = max(self.most_packed, len(self._running))

    def on_result(self, result: Any) -> None:
        """Counts an iteration."""
        self.results[result.trial_id] += 1

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        """Counts an end."""
        self._running.discard(trial_id)


def draw(packings: int, seed: int, memory: float) -> list[dict[str, list[dict[str, Any]]]]:
    """Returns random packings: the configs of the trials of each, by profile key."""
    rng = np.random.default_rng(seed)
    drawn = []
    for number in range(packings):
        shapes = []
        for _ in range(int(rng.integers(1, SHAPES + 1))):
            kept, taken = rng.uniform(0.01, 0.3) * memory, rng.uniform(0.01, 0.3) * memory
            shapes.append({"kept": int(kept), "taken": int(taken), "wait": WAIT_S, "fault_at": 0})
        picks = rng.integers(0, len(shapes), size=int(rng.integers(2, MOST + 1)))
        by_key: dict[str, list[dict[str, Any]]] = {}
        for pick in picks.tolist():
            by_key.setdefault(f"packing {number}, shape {pick}", []).append(shapes[pick])
        drawn.append(by_key)
    return drawn


def measured(drawn: list[dict[str, list[dict[str, Any]]]], device: Device) -> Profile:
    """Runs one trial of each shape alone; returns a profile of the measurements that says that packing pays."""
    # On a GPU the start of a process takes a second, and what a trial takes is the same in any.
    isolation = "lane" if device.kind == "gpu" else None
    trials = [
        Trial(Eater, {**configs[0], "wait": 0.0}, budget=2, profile_key=key, isolation=isolation)
        for by_key in drawn
        for key, configs in by_key.items()
    ]
    with FluidExecutor("local", [device], packing="off", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        handle.wait()
        handle.raise_failures()
        profile = executor.profile
    taught = Profile()
    for by_key in drawn:
        for key in by_key:
            teach(taught, key, MOST)
            need = profile.memory(key)
            if need is not None:
                taught.observe_memory(key, need)
    return taught


def teach(profile: Profile, key: str, most: int) -> None:
    """Records in a profile that a number of trials on a device do not slow each other down."""
    for p in range(1, most + 1):
        while profile.needs_measuring(key, co_residents=p):
            profile.observe(key, WAIT_S, co_residents=p)


def random_packings(packings: int, seed: int, device: Device, sharing: str, seconds: float) -> dict[str, Any]:
    """Runs the random packings, and begins none once the seconds are over; returns the outcome."""
    end = time.monotonic() + seconds
    drawn = draw(packings, seed, float(device.memory_bytes or 0.0))
    profile = measured(drawn, device)
    wanted, heard = 0, list[Starts]()
    failed: dict[str, str] = {}
    with FluidExecutor("local", [device], packing=sharing, max_packing=MOST, profile=profile, verbose=0) as executor:
        for by_key in drawn:
            if time.monotonic() > end:
                break
            trials = [
                Trial(Eater, config, budget=3, profile_key=key) for key, configs in by_key.items() for config in configs
            ]
            needs = [profile.memory(trial.key) for trial in trials]
            wanted += sum(need.peak_bytes for need in needs if need is not None) > (device.memory_bytes or 0.0)
            heard.append(Starts())
            handle = executor.submit_trialgroup(TrialGroup(trials), heard[-1])
            handle.wait()
            failed |= {trial_id: failure.message for trial_id, failure in handle.failures.items()}
    return {
        "packings": len(heard),
        "wanted_more_than_there_is": wanted,
        "trials": sum(len(one.starts) for one in heard),
        "most_packed": dict(sorted(Counter(one.most_packed for one in heard).items())),
        "started_again": sum(count - 1 for one in heard for count in one.starts.values()),
        "failed": failed,
    }


def mixed_sizes(count: int, seed: int, device: Device, sharing: str) -> dict[str, Any]:
    """Runs sweeps of mixed sizes; returns how full the device is in each way, and what came of the trials."""
    memory = float(device.memory_bytes or 0.0)
    rng, found = np.random.default_rng(seed), dict[str, Any]()
    sizes = [(int(rng.choice(BATCHES)), int(rng.choice(WIDTHS))) for _ in range(TAUGHT + count)]
    for way in ("oracle", "cohorts", "one key"):
        profile = Profile(cohorts=way == "cohorts")
        teach(profile, "sized", MOST_MIXED)
        trials = []
        for number, (batch, width) in enumerate(sizes):
            config = {"batch_size": batch, "width": width, "wait": 2 * WAIT_S, "memory": memory, "lr": rng.random()}
            need = need_of(config) if way == "oracle" else None
            name = f"{way} {number}"
            trials.append(Trial(Sized, config, budget=3, profile_key="sized", trial_id=name, memory=need))
        fill = Fill({trial.id: need_of(trial.config).peak_bytes for trial in trials})
        options: dict[str, Any] = {"packing": sharing, "max_packing": MOST_MIXED, "profile": profile, "verbose": 0}
        with FluidExecutor("local", [device], **options) as executor:
            handle = executor.submit_trialgroup(TrialGroup(trials[:TAUGHT]))
            handle.wait()
            handle.raise_failures()
            begun = time.monotonic()
            executor.submit_trialgroup(TrialGroup(trials[TAUGHT:]), fill).wait()
        found[way] = {
            "seconds": time.monotonic() - begun,
            "fill": fill.mean_bytes() / memory,
            "most": fill.most / memory,
            "started_again": sum(count - 1 for count in fill.starts.values()),
            "failed": fill.failed,
        }
    for way in ("cohorts", "one key"):
        found[way]["density"] = found[way]["fill"] / found["oracle"]["fill"]
    return found


def fault(device: Device, sharing: str) -> dict[str, Any]:
    """Runs four trials on a device, of which one faults; returns the outcome of the others."""
    profile, budget = Profile(), 12
    teach(profile, "fault", 4)
    config = {"kept": MIB, "taken": MIB, "wait": WAIT_S, "fault_at": 0}
    trials = [Trial(Eater, config, budget=budget, profile_key="fault", trial_id=f"good-{index}") for index in range(3)]
    trials.insert(1, Trial(Eater, {**config, "fault_at": 3}, budget=budget, profile_key="fault", trial_id="faulty"))
    heard = Starts()
    with FluidExecutor("local", [device], packing=sharing, max_packing=4, profile=profile, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials), heard)
        handle.wait()
        failures, states = handle.failures, handle.states
    good = [trial.id for trial in trials if trial.id != "faulty"]
    return {
        "most_packed": heard.most_packed,
        "faulty": states["faulty"],
        "others": {trial_id: states[trial_id] for trial_id in good},
        "iterations_of_others": {trial_id: heard.results[trial_id] for trial_id in good},
        "others_are_whole": all(heard.results[trial_id] == budget and trial_id not in failures for trial_id in good),
    }


def find_device(kind: str) -> tuple[Device, str, list[str]]:
    """Returns the device to use, its description, and the ways to share it."""
    from fluid.gpu.nvml import describe_gpus, driver_version

    gpus = [] if kind == "cpu" else describe_gpus()
    if kind == "gpu" and not gpus:
        raise SystemExit("--device gpu: no usable GPU was found")
    if not gpus:
        name = f"one core of {os.cpu_count()} of {platform.machine()}, {CPU_MEMORY / MIB:.0f} MiB"
        return Device(0, kind="cpu", memory_bytes=CPU_MEMORY), name, ["timeslice"]
    from fluid.gpu.mps_support import unsupported_reason_here

    ways = ["timeslice"] if unsupported_reason_here(gpus[:1]) else ["timeslice", "mps"]
    name = f"{gpus[0].name}, driver {driver_version()}"
    return Device(0, kind="gpu", memory_bytes=gpus[0].memory_bytes), name, ways


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--device", choices=["auto", "gpu", "cpu"], default="auto", help="auto is a GPU if there is one"
    )
    parser.add_argument("--ways", default="timeslice,mps", help="ways to share a GPU, comma-separated, where usable")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no packing after so many, each way")
    parser.add_argument("--packings", type=int, default=200, help="how many")
    parser.add_argument("--mixed", type=int, default=200, help="trials of mixed sizes, besides those that teach")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random packings")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return parser


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs both parts for each way to share the device; prints and returns the outcome."""
    options = make_parser().parse_args(arguments)
    device, name, ways = find_device(options.device)
    found: dict[str, Any] = {"machine": name, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    print(f"{name}, {found['date']}")
    for way in (way for way in ways if way in options.ways.split(",")):
        found[way] = figures = {}
        figures["packings"] = packed = random_packings(options.packings, options.seed, device, way, options.seconds)
        write_json(options.json, found)
        figures["fault"] = faulted = fault(device, way)
        write_json(options.json, found)
        print(
            f"{way}: {packed['packings']} packings of {packed['trials']} trials, of which "
            f"{packed['wanted_more_than_there_is']} needed more than its memory; {packed['started_again']} trials "
            f"started again, {len(packed['failed'])} failed; a fault left the others "
            f"{'whole' if faulted['others_are_whole'] else 'NOT whole'}"
        )
        if options.mixed:
            figures["mixed"] = mixed = mixed_sizes(options.mixed, options.seed, device, way)
            write_json(options.json, found)
            for name, one in mixed.items():
                print(
                    f"{way}, mixed sizes, {name}: {one['fill']:.2f} of the memory in use while trials wait, at most "
                    f"{one['most']:.2f}; {len(one['failed'])} failed, {one['started_again']} started again, "
                    f"{one['seconds']:.1f} s"
                )
    return found


if __name__ == "__main__":
    main()

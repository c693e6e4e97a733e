"""The peers of elastic_resize.py: how other systems resize a trial from one device to two and back."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_resize_workload import Perceptron, note

HERE = Path(__file__).resolve().parent
#: Iterations whose median is the time of an iteration.
SETTLED = 5
#: Seconds after which a peer is given up.
PATIENCE_S = 120.0
_HOROVODRUN = "from horovod.runner.launch import run_commandline; run_commandline()"


def read(log: Path) -> list[tuple[float, int]]:
    """Reads the workers' log: when iterations ended, and at which width."""
    rows = [line.split() for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return [(float(at), int(size)) for at, size in (row for row in rows if len(row) == 2)]


def pauses_in(rows: Sequence[tuple[float, int]]) -> dict[str, list[float]]:
    """Returns the pauses at changes of width: between two ends, less the time of an iteration afterwards."""
    pauses: dict[str, list[float]] = {"1->2": [], "2->1": []}
    for index in range(1, len(rows) - SETTLED):
        (before, old), (after, new) = rows[index - 1], rows[index]
        if old != new:
            ends = [at for at, _ in rows[index : index + SETTLED + 1]]
            usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))
            pauses[f"{old}->{new}"].append(after - before - usual)
    return pauses


def horovod_driver(config: dict[str, Any], runs: int) -> dict[str, list[float]]:
    """Measures Horovod's elastic driver on this machine, with a script that prints the number of slots."""
    with tempfile.TemporaryDirectory() as folder:
        log, slots, script = Path(folder, "log"), Path(folder, "slots"), Path(folder, "discover.sh")
        script.write_text(f"#!/bin/sh\ncat {slots}\n", encoding="utf-8")
        script.chmod(0o755)
        slots.write_text("localhost:1\n", encoding="utf-8")
        worker = [sys.executable, str(HERE / "elastic_resize_workload.py"), str(config["hidden"]), str(log)]
        # Without given interfaces, the driver waits for a second host to find the common ones.
        command = [sys.executable, "-c", _HOROVODRUN, "--gloo", "--network-interfaces", "lo"]
        command += ["-np", "1", "--min-np", "1", "--max-np", "2"]
        command += ["--host-discovery-script", str(script), *worker]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(Path(folder, "output"), "wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            for width in [1, *[2, 1] * runs]:
                replacement = slots.with_suffix(".new")
                replacement.write_text(f"localhost:{width}\n", encoding="utf-8")
                replacement.rename(slots)
                _await_width(log, width, process, Path(folder, "output"))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return pauses_in(read(log))


def _await_width(log: Path, width: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """Waits for some iterations at a width."""
    deadline = time.perf_counter() + PATIENCE_S
    while [size for _, size in read(log)[-2 * SETTLED :]] != [width] * 2 * SETTLED:
        if process.poll() is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"Horovod's driver did not get to width {width}:\n{output.read_text(errors='replace')}")
        time.sleep(0.1)


def ray_resource_changing(config: dict[str, Any], runs: int) -> dict[str, list[float]]:
    """Measures Ray Tune's ResourceChangingScheduler: it saves the trial and restarts it with other resources."""
    import ray
    from ray import tune
    from ray.tune import PlacementGroupFactory
    from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler

    class Resized(tune.Trainable):  # type: ignore[misc]
        """The trial with one thread per core."""

        def setup(self, config: dict[str, Any]) -> None:
            import torch

            self.cores = int(self.trial_resources.head_cpus)
            torch.set_num_threads(self.cores)
            self.inner = Perceptron()
            self.inner.setup(config)

        def step(self) -> dict[str, Any]:
            metrics = self.inner.step()
            note(self.config["log"], self.cores)
            return metrics

        def save_checkpoint(self, folder: str) -> None:
            self.inner.save_checkpoint(folder)

        def load_checkpoint(self, folder: str) -> None:
            self.inner.load_checkpoint(folder)

    stay = 3 * SETTLED

    def allocate(controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
        cores = 1 + (result["training_iteration"] // stay) % 2
        return PlacementGroupFactory([{"CPU": cores}])

    if not ray.is_initialized():
        os.environ["RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS"] = "0"
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        tune.run(
            Resized,
            config={**config, "log": str(log)},
            stop={"training_iteration": stay * (2 * runs + 1)},
            resources_per_trial={"cpu": 1},
            scheduler=ResourceChangingScheduler(FIFOScheduler(), allocate),
            storage_path=folder,
            verbose=0,
        )
        return pauses_in(read(log))

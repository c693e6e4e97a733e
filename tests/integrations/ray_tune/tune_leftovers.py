"""Functions for Ray Tune that leave things behind in their process, as users' code does, and report what they found."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import resource
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tune_sweeps import Climber

from fluid import tune

VARIABLE = "FLUID_TEST_LEFT"
#: What trials have appended, in the process in which they run.
SEEN: list[Any] = []
#: Bytes that a trial leaves behind.
LEAK_BYTES = 64 << 20
#: Longest that a trial waits, in seconds, for what another one is to give up.
_PATIENCE = 60.0


class Counted(Climber):
    """Reports how many trials were set up in its process."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        SEEN.append(self.trial_id)

    def step(self) -> dict[str, Any]:
        return {**super().step(), "set_ups": len(SEEN)}


def set_flags(config: dict[str, Any]) -> None:
    """Changes settings that other libraries read: the environment, a module's list, PyTorch's dtype, warnings."""
    import torch

    found = {"variable": os.environ.get(VARIABLE), "dtype": str(torch.get_default_dtype())}
    os.environ[VARIABLE] = str(config["x"])
    SEEN.append(config["x"])
    torch.set_default_dtype(torch.float64)
    warnings.warn("a warning that a trial before it may have made an error", UserWarning, stacklevel=1)
    tune.report({**found, "seen": len(SEEN), "process": os.getpid()})
    warnings.simplefilter("error")


def count(config: dict[str, Any]) -> None:
    """Reports how many trials have run in its process."""
    SEEN.append(config["x"])
    tune.report({"seen": len(SEEN), "process": os.getpid()})


def log_to_own_file(config: dict[str, Any]) -> None:
    """Sets up logging, as the first thing that scripts do."""
    path = Path(config["folder"], f"{config['x']}.log")
    # The tests' own process has handlers of the root logger, which reach its trials.
    logging.basicConfig(filename=str(path), format="%(message)s", level="INFO", force=True)
    logging.getLogger("left").info("trial %s", config["x"])
    tune.report({"done": True})


def start_once(config: dict[str, Any]) -> None:
    """Does what a process can do once: a start method, a default process group, Hydra's global configuration."""
    import hydra
    import torch.distributed as dist

    multiprocessing.set_start_method("spawn")
    store = Path(config["folder"], f"store-{config['x']}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    hydra.initialize_config_dir(config["folder"], version_base=None)
    tune.report({"ranks": dist.get_world_size()})


def start_run(config: dict[str, Any]) -> None:
    """Reads its hyperparameters from a run of Weights & Biases that it does not finish."""
    import wandb

    run = wandb.init(project="left", config={"x": config["x"]}, mode="offline", dir=config["folder"])
    tune.report({"read": wandb.config["x"], "run": run.id})


def leak(config: dict[str, Any]) -> None:
    """Keeps memory, and reports the bytes that its process held before."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    SEEN.append(bytearray(os.urandom(1) * LEAK_BYTES))
    tune.report({"before": pages * resource.getpagesize(), "held": len(SEEN)})


def report_through_errors(config: dict[str, Any]) -> None:
    """Takes Tune's request to stop for an error, and goes on."""
    n = 0
    while True:
        n += 1
        try:
            time.sleep(0.01)
            tune.report({"n": n, "x": config["x"]})
        except:  # noqa: E722
            print("an error; going on")


def report_from_a_thread(config: dict[str, Any]) -> None:
    """Leaves a thread that reports on and on."""

    def report() -> None:
        for n in range(100):
            with suppress(BaseException):
                tune.report({"n": -n, "x": config["x"]})
            time.sleep(0.02)

    threading.Thread(target=report, daemon=True).start()
    for n in range(1, 4):
        tune.report({"n": n, "x": config["x"]})


def overrun(config: dict[str, Any]) -> None:
    """Is still in an iteration when its sweep ends, and reports once another sweep runs."""
    folder = Path(config["folder"])
    if config["who"] == "first":
        tune.report({"who": "first"})
        (folder / "waits").touch()
        until = time.monotonic() + _PATIENCE
        while not (folder / "second").exists() and time.monotonic() < until:
            time.sleep(0.01)
    for _ in range(40):
        (folder / config["who"]).touch()
        tune.report({"who": config["who"]})
        time.sleep(0.01)


def lock(config: dict[str, Any]) -> None:
    """Holds a lock while it trains."""
    from filelock import FileLock

    with FileLock(config["lock"], timeout=_PATIENCE):
        for n in range(5):
            tune.report({"n": n, "got": True})


def listen(config: dict[str, Any]) -> None:
    """Holds a port while it trains."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", config["port"]))
        server.listen()
        for n in range(5):
            tune.report({"n": n})


def leave_work(config: dict[str, Any]) -> None:
    """Ends with a task of a thread pool under way, and an exit function."""
    note = Path(config["folder"], f"{config['x']}.txt")
    ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.3), note.write_text("task\n")))
    atexit.register(lambda: note.write_text(note.read_text() + "exit function\n"))
    tune.report({"done": True})

"""Made the run folders in ``f877213/``, and what ``fluid.load`` of that version said of them (``expected.json``).

They were made once, by commit f877213, the last version whose results travelled one by one, with Python 3.11, in a
folder of a neutral name:

    git worktree add /tmp/f877213 f877213
    cd /tmp/fluid-runs && PYTHONPATH=/tmp/f877213 python make_run_folders.py f877213

``fluid.__version__`` says nothing of the commit, so the script says which package it uses. What it trains is pickled by
value, being of ``__main__``: the folders can be resumed wherever Python 3.11 runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def curves(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reports, besides a loss, what JSON does not have, and nests it."""
    from datetime import datetime
    from decimal import Decimal
    from fractions import Fraction

    import numpy as np

    for step in range(1, config["steps"] + 1):
        if step == config.get("fails"):
            raise ValueError(f"no step {step}")
        yield {
            "loss": config["scale"] / step,
            "eval": {"top": {"accuracy": np.float32(1.0 - 0.5**step)}, "counts": {step: "a", (1, 2): "b"}},
            "exact": Decimal(step) / 10,
            "ratio": Fraction(step, 3),
            "point": (step, -0.0),
            "hidden": np.arange(step),
            "scalar": np.int64(step),
            "when": datetime(2026, 1, step),
            "bad": float("nan") if step % 2 else float("inf"),
            "note": "schön\n",
            "raw": b"\x00\xff",
            "nothing": None,
            "is_even": step % 2 == 0,
        }


class Counter:
    """Counts, and is saved and restored; takes a moment, so that it can be killed on the way."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.count, self.seen = config, 0, []

    def step(self) -> dict[str, Any]:
        import time

        time.sleep(self.config.get("seconds", 0.0))
        self.count += 1
        self.seen = [*self.seen, self.count]
        return {"loss": self.config["x"] + 1.0 / self.count, "count": self.count, "seen": {"last": self.seen[-3:]}}

    def save_checkpoint(self, folder: str) -> None:
        import json
        from pathlib import Path

        (Path(folder) / "state.json").write_text(json.dumps([self.count, self.seen]), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        import json
        from pathlib import Path

        self.count, self.seen = json.loads((Path(folder) / "state.json").read_text(encoding="utf-8"))


def metrics(folder: Path) -> None:
    """A group of generators: one that ends, one whose trainable fails, one that is stopped."""
    from fluid import FluidExecutor, Trial, TrialGroup

    trials = [
        Trial(curves, {"scale": 1.0, "steps": 6, "lr": 0.1}, trial_id="whole", budget=6),
        Trial(curves, {"scale": 0.5, "steps": 6, "fails": 4, "nested": {"a": [1, 2]}}, trial_id="failed", budget=6),
        Trial(curves, {"scale": 2.0, "steps": 3, "pair": (1, 2)}, trial_id="short", budget=9),
    ]
    with FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0, max_failures=0) as executor:
        assert executor.submit_trialgroup(TrialGroup(trials, name="curves")).wait(60)


def kept(folder: Path) -> None:
    """A group of a class, with a checkpoint of each trial; one of them was extended."""
    from fluid import FluidExecutor, Trial, TrialGroup

    trials = [Trial(Counter, {"x": x}, trial_id=f"x{x}", budget=4) for x in (0.5, 0.25, 1.0)]
    with FluidExecutor(backend="local", devices=1, run_dir=folder, keep="last", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials, name="counters"))
        assert handle.wait(60)
        handle.extend("x0.25", 3)
        assert handle.wait(60)


def _sweep(folder: Path, seconds: float, **options: Any) -> None:
    import fluid
    from fluid.search import uniform

    fluid.run(
        Counter,
        {"x": uniform(0.0, 1.0), "seconds": seconds},
        metric="loss",
        mode="min",
        samples=6,
        budget=9,
        algorithm="asha",
        seed=1,
        name="sweep",
        run_dir=folder,
        **options,
    )


def swept(folder: Path) -> None:
    """A sweep of ``fluid.run`` that ended."""
    _sweep(folder, 0.0)


def slowly(folder: Path) -> None:
    """A sweep of ``fluid.run`` that is begun, or gone on with."""
    _sweep(folder, 0.05, resume=True)


def group(folder: Path) -> None:
    """A group of a class whose session is killed."""
    from fluid import FluidExecutor, Trial, TrialGroup

    trials = [Trial(Counter, {"x": x, "seconds": 0.05}, trial_id=f"x{x}", budget=12) for x in (0.5, 0.25, 1.0)]
    with FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0, keep="last") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials, name="counters"))
        while not any(result.iteration >= 6 for result in handle.results()):
            pass
        handle.pause("x0.5")  # Is saved.
        handle.wait(1)
        handle.resume("x0.5")
        handle.wait(60)


def tuned(folder: Path) -> None:
    """A sweep of Ray Tune, with ASHA."""
    import ray
    from ray.tune.schedulers import ASHAScheduler

    from fluid import FluidExecutor, tune

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    def train(config: dict[str, Any]) -> None:
        for step in range(1, 5):
            tune.report({"loss": config["x"] / step, "curve": {"steps": list(range(step)), "pair": (step, 0.5)}})

    with FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0) as executor:
        tune.run(
            train,
            config={"x": tune.grid_search([1.0, 2.0, 3.0, 4.0])},
            scheduler=ASHAScheduler(metric="loss", mode="min", max_t=4, grace_period=1, reduction_factor=2),
            storage_path=str(folder.parent.absolute() / "storage"),
            name="tuned",
            executor=executor,
            verbose=0,
        )
    ray.shutdown()


def run(made: Callable[[Path], None], folder: Path, results: int | None = None) -> None:
    """Runs a session in another process; kills it once its folder has so many results, if a number is given."""
    process = subprocess.Popen([sys.executable, __file__, made.__name__, str(folder)], start_new_session=True)
    while process.poll() is None:
        path = folder / "results.jsonl"
        if results is not None and path.is_file() and path.read_bytes().count(b"\n") >= results:
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(3.0)  # Its lanes end.
            return
        time.sleep(0.01)
    assert results is None and process.returncode == 0, (made.__name__, process.returncode)


def clean(folder: Path) -> None:
    """Leaves out what says where the folder was made, and what lanes printed outside of trials."""
    import fluid

    (folder / "session.lock").unlink(missing_ok=True)
    shutil.rmtree(folder / "logs")
    package = os.path.realpath(Path(fluid.__file__).parents[1])
    host = re.compile(r'"(hostname|node_ip)": "[^"]*"')
    for path in [*folder.glob("*.jsonl"), *folder.rglob("output.log")]:
        text = path.read_text(encoding="utf-8").replace(package, "/tmp/f877213")
        path.write_text(host.sub(r'"\1": "localhost"', text), encoding="utf-8")
    payloads = (folder / "payloads.pkl").read_bytes()
    place = str(Path(sys.prefix).parent).encode()  # In the code of what was pickled by value.
    payloads = payloads.replace(place, b"/tmp/fluid"[: len(place)].ljust(len(place), b"-"))  # As long as it was.
    address = re.compile(rb"\b\d+\.\d+\.\d+\.\d+:\d+")
    payloads = address.sub(lambda found: b"127.0.0.1:".ljust(len(found[0]), b"1"), payloads)
    (folder / "payloads.pkl").write_bytes(payloads)


def said_of(folder: Path) -> dict[str, Any]:
    """What ``fluid.load`` says of a folder."""
    import fluid

    result = fluid.load(folder, metric="loss", mode="min")
    best = result.best
    return {
        "name": result.name,
        "state": result.state,
        "best": {"trial": best.trial_id, "value": best.value, "iteration": best.iteration, "config": best.config},
        "checkpoint": best.checkpoint is not None,
        "trials": {
            trial.trial_id: {
                "state": trial.state,
                "iteration": trial.iteration,
                "config": trial.config,
                "last": trial.results[-1].metrics if trial.results else None,
                "iterations": [result.iteration for result in trial.results],
                "losses": [result.metrics["loss"] for result in trial.results],
            }
            for trial in result.trials
        },
    }


def main(target: Path) -> None:
    import fluid

    print("made by", fluid.__file__)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    run(metrics, target / "metrics")
    run(kept, target / "kept")
    run(group, target / "killed", results=26)
    run(swept, target / "swept")
    run(slowly, target / "killed_sweep", results=11)
    run(slowly, target / "resumed_sweep", results=8)
    run(slowly, target / "resumed_sweep")
    run(tuned, target / "tuned")
    shutil.rmtree(target / "storage")
    said = {}
    for folder in sorted(path for path in target.iterdir() if path.is_dir()):
        clean(folder)
        said[folder.name] = said_of(folder)
    (target / "expected.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        os.environ["RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS"] = "0"
        globals()[sys.argv[1]](Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))

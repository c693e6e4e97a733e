"""The part ``with_parameters`` of benchmarks/shared_data.py: eight trials with a large array and a large tensor.

On lanes that are warm, Fluid alone runs the first trial, the second one, then the others, which stay there. The seconds
of a trial are from its submission until it has its data; the first one's are also those of pickling them. Under Ray
Tune all trials are submitted at once, and only memory is measured.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Measured: who runs the trials, and how they get their data.
WAYS = (
    ("fluid", "with_parameters"),
    ("fluid", "closure"),
    ("fluid", "none"),
    ("tune", "with_parameters"),
    ("tune", "none"),
)
#: Seconds between two looks for a note.
_LOOK_S = 0.002


class Measuring:
    """Measures one way.

    Args:
        pss_of: returns the proportional set size of a process, bytes.
        lanes: lanes, one per CPU device, and trials.
        size: bytes of the array, and of the tensor.
        patience_s: seconds after which a trial has failed.
    """

    def __init__(self, pss_of: Callable[[int], float], lanes: int, size: int, patience_s: float) -> None:
        self._pss_of, self._lanes, self._size, self._patience_s = pss_of, lanes, size, patience_s

    def measure(self, runner: str, mode: str) -> dict[str, Any]:
        """Returns the bytes of all lanes, and, for Fluid alone, the seconds of each trial."""
        from shared_parameters_workload import make_trainable

        from fluid import FluidExecutor

        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"devices": self._lanes, "packing": "off", "max_width": 1, "verbose": 0}
            options["run_dir"] = Path(folder, "run")
            if runner == "tune":
                return self._in_tune(options, Path(folder), lambda: make_trainable(mode, self._size))
            with FluidExecutor("local", **options) as executor:
                return self._alone(executor, Path(folder), make_trainable("none", 1), make_trainable(mode, self._size))

    def _alone(self, executor: Any, folder: Path, warming: Any, trainable: Any) -> dict[str, Any]:
        from fluid import Trial, TrialGroup

        def submit(trainable: Any, notes: Path, numbers: range) -> Any:
            configs = [{"notes": str(notes), "number": number} for number in numbers]
            return executor.submit_trialgroup(TrialGroup([Trial(trainable, config, budget=1) for config in configs]))

        (warm := folder / "warm").mkdir()
        handles = [submit(warming, warm, range(self._lanes))]
        self._notes(warm, range(self._lanes))
        (warm / "go").touch()
        handles[0].wait()
        (notes := folder / "notes").mkdir()
        noted, seconds = [], []
        for begin, end in ((0, 1), (1, 2), (2, self._lanes)):
            begun = time.time()
            handles.append(submit(trainable, notes, range(begin, end)))
            found = self._notes(notes, range(begin, end))
            noted += found
            seconds += [note["at"] - begun for note in found]
        pss = self._pss(noted)
        (notes / "go").touch()
        for handle in handles:
            handle.wait()
            handle.raise_failures()
        return {"pss_bytes": pss, "seconds": seconds}

    def _in_tune(self, executor_options: dict[str, Any], folder: Path, make: Callable[[], Any]) -> dict[str, Any]:
        import ray
        from ray import tune as ray_tune

        from fluid import FluidExecutor, tune

        ray.init(num_cpus=self._lanes, object_store_memory=6 * self._size + (256 << 20), log_to_driver=False)
        try:
            (notes := folder / "notes").mkdir()
            config = {"notes": str(notes), "number": ray_tune.grid_search(list(range(self._lanes)))}
            options = {
                "executor": FluidExecutor("local", **executor_options),
                "storage_path": str(folder / "tune"),
                "verbose": 0,
            }
            thread = threading.Thread(target=lambda: tune.run(make(), config=config, **options))
            thread.start()
            pss = self._pss(self._notes(notes, range(self._lanes)))
            (notes / "go").touch()
            thread.join()
        finally:
            ray.shutdown()
        return {"pss_bytes": pss}

    def _pss(self, noted: list[dict[str, Any]]) -> float:
        pids = {note["pid"] for note in noted}
        if len(pids) != self._lanes:
            raise RuntimeError(f"{self._lanes} trials are in {len(pids)} lanes")
        return sum(map(self._pss_of, pids))

    def _notes(self, folder: Path, numbers: range) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._patience_s
        paths = [folder / f"{number}.json" for number in numbers]
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {sorted(path.name for path in folder.iterdir())} are there")
            time.sleep(_LOOK_S)
        return [json.loads(path.read_text()) for path in paths]


def summary_of_parameters(runs: dict[str, list[dict[str, Any]]], size: int) -> dict[str, Any]:
    """Returns medians over the runs: by way, memory in times of the data, and seconds of the first and later trials."""
    found: dict[str, Any] = {"data_bytes": 2 * size}
    for runner, mode in WAYS:
        if mode == "none":
            continue
        without = statistics.median(run["pss_bytes"] for run in runs[f"{runner} none"])
        mine = runs[f"{runner} {mode}"]
        taken = statistics.median(run["pss_bytes"] for run in mine) - without
        figures = found[f"{runner} {mode}"] = {"memory_bytes": taken, "memory_times_data": taken / (2 * size)}
        if "seconds" in mine[0]:
            first = statistics.median(run["seconds"][0] for run in mine)
            second = statistics.median(run["seconds"][1] for run in mine)
            later = statistics.median(max(run["seconds"][2:]) for run in mine)
            figures |= {"first_s": first, "second_s": second, "second_by_first": second / first, "others_s": later}
    for mode, position in (("first", 0), ("second", 1)):
        found[f"{mode}_without_data_s"] = statistics.median(run["seconds"][position] for run in runs["fluid none"])
    return found


def show_parameters(found: dict[str, Any], lanes: int) -> None:
    """Prints the figures."""
    print(f"{lanes} lanes, {found['data_bytes'] / 1e6:.0f} MB of data: an array and a tensor, half each")
    for way, figures in found.items():
        if isinstance(figures, dict):
            text = f"{way}: {figures['memory_times_data']:.2f} times the data in memory"
            if "first_s" in figures:
                text += (
                    f"; first trial {figures['first_s']:.3f} s, second {figures['second_s']:.4f} s "
                    f"({figures['second_by_first']:.3f} of it), the others {figures['others_s']:.4f} s"
                )
            print(text)
    print(f"without data: first {found['first_without_data_s']:.4f} s, second {found['second_without_data_s']:.4f} s")

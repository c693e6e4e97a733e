"""Measures all that is to be known of one GPU, in runs of at most ten minutes.

    python scripts/gpu_day.py [--budget 560] [--stages costs,mps] [--out benchmarks/results]

Each stage is a group of processes with a time limit of its own, so that one that hangs or loses its GPU costs only
itself. gpu_day.json and gpu_day.md are written after every stage. What does not fit the budget is left to the next run:
the same command goes on with the stages that have no result yet, as long as machine and packages are the same.
``--stages`` measures the named ones, again if need be; ``--list`` shows all.

It needs PyTorch, numpy, cloudpickle, rich and nvidia-ml-py; the stage "tests" also needs pytest, pytest-timeout and
hypothesis. Nothing resets the GPU or changes its modes. ``--cpu`` tries the code on a machine without a GPU: its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
for _folder in (ROOT, ROOT / "scripts", ROOT / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_day_stages.costs import costs  # noqa: E402
from gpu_day_stages.elastic import elastic  # noqa: E402
from gpu_day_stages.lanes import lanes  # noqa: E402
from gpu_day_stages.machine import facts, identify  # noqa: E402
from gpu_day_stages.mps import mps  # noqa: E402
from gpu_day_stages.place import Figures, Place  # noqa: E402
from gpu_day_stages.report import markdown  # noqa: E402

from fluid.gpu.nvml import find_gpus  # noqa: E402

#: A stage is not begun with fewer seconds left.
LEAST_S = 20.0
#: Seconds that a stage has to end its processes once it is interrupted.
END_S = 10.0
#: Characters of a stage's output that the results keep, if it did not succeed.
TAIL = 3000


#: The status of a stage that was interrupted.
TIMED_OUT = "timed out"
#: The part of its limit that a stage needs to be begun, but for the first of a run.
LEAST_PART = 0.6


class Stage(NamedTuple):
    """A measurement.

    Attributes:
        limit: most seconds.
        what: what it measures.
        arguments: of Python for a script of its own; its figures go to a file that is named last. Empty for one of
            :data:`FUNCTIONS`.
        on_cpu: further arguments, which make it small, with ``--cpu``.
    """

    limit: float
    what: str
    arguments: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()


#: Stages that are functions of this program.
FUNCTIONS: dict[str, Callable[[Place, Figures], None]] = {
    "facts": facts,
    "costs": costs,
    "mps": mps,
    "lanes": lanes,
    "elastic": elastic,
}


def gpu_tests() -> tuple[str, ...]:
    """Returns the arguments of Python for the tests marked gpu, but for those that need Ray."""
    marked = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu\b", re.MULTILINE)
    paths = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "ray_tune" not in path.parts)
    files = (str(path) for path in paths if marked.search(path.read_text(encoding="utf-8")))
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files)


def packing(*arguments: str) -> tuple[str, ...]:
    """Returns the arguments of Python for benchmarks/packing.py."""
    return (str(ROOT / "benchmarks" / "packing.py"), "--quick", *arguments)


def safety(*arguments: str) -> tuple[str, ...]:
    """Returns the arguments of Python for benchmarks/packing_safety.py."""
    return (str(ROOT / "benchmarks" / "packing_safety.py"), *arguments)


_FEW_TRIALS = ("--workloads", "input", "--counts", "1,2", "--trials", "2")
_ONE_PACKING = ("--packings", "1")

#: In order of worth.
STAGES = {
    "facts": Stage(60, "the machine, the driver, and what decides about MPS"),
    "costs": Stage(90, "the context, library handles, memory statistics, the emptied cache, copies"),
    "mps": Stage(120, "the daemon: start, kill of a client, fault, restart"),
    "lanes": Stage(120, "the start of a lane, an iteration in it, pause and resume of a resident trial"),
    "tests": Stage(240, "the tests marked gpu", gpu_tests()),
    "packing": Stage(
        420,
        "1 to 64 small CNNs in time slices and under MPS, and what Fluid makes of them",
        packing("--workloads", "cnn", "--counts", "1,2,4,8,16,32,64", "--trials", "16"),
        _FEW_TRIALS,
    ),
    "safety": Stage(
        300,
        "random packings that need more memory than there is, and a fault, in time slices",
        safety("--ways", "timeslice", "--packings", "100", "--seconds", "240"),
        _ONE_PACKING,
    ),
    "safety_mps": Stage(
        300,
        "the same under MPS",
        safety("--ways", "mps", "--packings", "100", "--seed", "1", "--seconds", "240"),
        _ONE_PACKING,
    ),
    "lanes_memory": Stage(
        240,
        "64 small trials that take turns in one lane against a process each: bytes of the device",
        (str(ROOT / "benchmarks" / "lanes.py"), "--parts", "memory"),
        ("--trials", "2"),
    ),
    "fusion": Stage(
        300,
        "packs of 1, 8 and 64 fused trials against trials one by one, and against CUDA graphs of one trial alone",
        (str(ROOT / "benchmarks" / "fusion.py"), "--models", "MLP, width 32;MLP, width 256;CNN", "--quick"),
        ("--rows", "2", "--models", "MLP, width 32", "--runs", "1"),
    ),
    "elastic": Stage(120, "resizes of an elastic trial, over NCCL where there are two GPUs"),
    "packing_more": Stage(
        540,
        "1 to 16 trials of three other models",
        packing("--workloads", "lstm,dcgan,input", "--counts", "1,2,4,8,16", "--trials", "8"),
        _FEW_TRIALS,
    ),
}


class Run:
    """One run of the program.

    Args:
        place: the device under test.
        out: folder of the results.
        budget: most seconds.
    """

    def __init__(self, place: Place, out: Path, budget: float) -> None:
        self._place, self._out = place, out
        self._end = time.monotonic() + budget
        out.mkdir(parents=True, exist_ok=True)
        self.results = self._earlier()

    def _earlier(self) -> dict[str, Any]:
        """The results of earlier runs on the same machine, to go on with, or empty ones."""
        machine = {"kind": "gpu" if self._place.gpus else "cpu", **identify(self._place)}
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self._out / "gpu_day.json").read_text(encoding="utf-8"))
            if found["machine"] == machine:
                return found
        return {"machine": machine, "stages": {}}

    def is_left(self, name: str) -> bool:
        """Whether a stage has no result yet."""
        return self._status(name) != "done"

    def has_failed(self, name: str) -> bool:
        """Whether a stage was measured without success: it is tried again once all others were measured."""
        return self._status(name) not in ("done", None, TIMED_OUT)

    def _status(self, name: str) -> str | None:
        found: str | None = self.results["stages"].get(name, {}).get("status")
        return found

    def measure(self, names: Sequence[str]) -> list[str]:
        """Runs stages, as far as there is time; returns those that did not fit."""
        for place, name in enumerate(names):
            left = self._end - time.monotonic()
            least = LEAST_S if place == 0 else max(LEAST_S, LEAST_PART * STAGES[name].limit)
            if left < least:
                return list(names[place:])
            self.results["stages"][name] = result = self._run(name, min(STAGES[name].limit, left))
            self._write()
            print(f"{name:14} {result['status']:10} {result['seconds']:6.1f} s", flush=True)
        return []

    def _write(self) -> None:
        self.results["date"] = time.strftime("%Y-%m-%d")
        text = json.dumps(self.results, indent=1, default=str) + "\n"
        (self._out / "gpu_day.json").write_text(text, encoding="utf-8")
        about = {name: stage.what for name, stage in STAGES.items()}
        (self._out / "gpu_day.md").write_text(markdown(self.results, about), encoding="utf-8")

    def _run(self, name: str, limit: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="gpu-day-") as home:
            written = Path(home, "figures.json")
            begun = time.monotonic()
            status, output = run_limited(self.command(name, written), self._environment(home), limit)
            result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begun, 1)}
            result["date"] = time.strftime("%Y-%m-%d")
            with contextlib.suppress(OSError, ValueError):
                result["figures"] = json.loads(written.read_text(encoding="utf-8"))
        if status != "done" or "figures" not in result:
            result["output"] = output[-TAIL:]
        return result

    def command(self, name: str, written: Path) -> list[str]:
        """Returns the command line of a stage, whose figures go to a file."""
        if name in FUNCTIONS:
            options = [] if self._place.gpus else ["--cpu"]
            options += ["--mps-program", self._place.mps_program] if self._place.mps_program else []
            return [sys.executable, str(Path(__file__).resolve()), "--stage", name, "--figures", str(written), *options]
        stage = STAGES[name]
        if stage.arguments[0] == "-m":
            return [sys.executable, *stage.arguments]
        device = ("--device", "gpu") if self._place.gpus else ("--device", "cpu", *stage.on_cpu)
        return [sys.executable, *stage.arguments, *device, "--json", str(written)]

    def _environment(self, home: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "FLUID_RUNS": home, "PYTHONUNBUFFERED": "1"}
        # A machine without byte code of PyTorch compiles it in each process: that took 6 s, and torch._dynamo 6 s more.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "gpu-day-byte-code")), **environment}


def run_limited(command: list[str], environment: dict[str, str], limit: float) -> tuple[str, str]:
    """Runs a command in a process group; returns how it ended, and its output.

    At the limit the group is interrupted, so that it can end what it has started, and killed some seconds later.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "done" if process.wait(max(1.0, limit - END_S)) == 0 else f"status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
            with contextlib.suppress(subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=560.0, help="most seconds of this run (default: %(default)g)")
    parser.add_argument("--stages", help="which, comma-separated (default: all that have no result yet)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--cpu", action="store_true", help="try the code on a CPU")
    parser.add_argument("--list", action="store_true", help="show the stages")
    parser.add_argument("--mps-program", help="control program of MPS (default: the installed one)")
    parser.add_argument("--stage", choices=list(FUNCTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        for name, stage in STAGES.items():
            print(f"{name:14} {stage.limit:4.0f} s  {stage.what}")
        return
    gpus = () if options.cpu else tuple(gpu.token for gpu in find_gpus())
    if not gpus and not options.cpu:
        parser.error("no usable GPU was found; --cpu tries the code without one")
    place = Place(gpus=gpus, mps_program=options.mps_program)
    if options.stage:
        FUNCTIONS[options.stage](place, Figures(options.figures))
        return
    run = Run(place, options.out, options.budget)
    names = options.stages.split(",") if options.stages else sorted(filter(run.is_left, STAGES), key=run.has_failed)
    if unknown := sorted(set(names) - set(STAGES)):
        parser.error(f"--stages: {', '.join(unknown)} is not among {', '.join(STAGES)}")
    left = run.measure(names)
    print(f"written to {options.out / 'gpu_day.md'}{'; left for the next run: ' + ', '.join(left) if left else ''}")


if __name__ == "__main__":
    main()

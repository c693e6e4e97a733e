"""Measures what is to be known of one GPU, in runs of some minutes. What matters most comes first.

    python scripts/gpu_day.py [--budget 560] [--out FOLDER] [--stages sweeps,fusion] [--wheels FOLDER] [--cpu]

Each stage is a group of processes with a time limit of its own, so that one that hangs or loses its GPU costs only
itself. Each figure is in gpu_day.jsonl at once: whatever is killed, and be it this program, loses nothing that was
measured. gpu_day.md, for people, is written after every stage, and gpu_day.log has what the stages print. What does not
fit the budget is left to the next run: with the same folder, the same command goes on with the stages that have no
result yet, as long as machine and packages are the same. ``--stages`` measures the named ones, again if need be;
``--list`` shows all.

It needs what Fluid needs, and PyTorch; the stage "fusion" also needs scikit-learn, and "tests" pytest, pytest-timeout
and hypothesis, and uses pytest-xdist. Where a package is missing and cannot be installed, ``--wheels`` takes it from a
folder of wheels. Nothing resets the GPU or changes its modes. ``--cpu`` tries the code on a machine without a GPU: its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
for _folder in (ROOT, ROOT / "scripts", ROOT / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_day_stages.report import markdown  # noqa: E402
from gpu_day_stages.results import BEGUN, DONE, FILE, Day, Figures, append  # noqa: E402

if TYPE_CHECKING:
    from gpu_day_stages.place import Place

#: What all stages need: the module, and the package that has it.
NEEDED = {
    "cloudpickle": "cloudpickle",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "pynvml": "nvidia-ml-py",
    "rich": "rich",
    "torch": "torch",
}
#: A stage is not begun with fewer seconds left.
LEAST_S = 20.0
#: Seconds that a stage has to end its processes once it is interrupted, and that those have that it has left behind.
END_S, LEFT_S = 8.0, 5.0
#: Characters of a stage's output that the results keep, if it did not succeed.
TAIL = 3000
#: On a CPU limits are so many times as long: other programs may use it, too.
PATIENCE_ON_CPU = 6.0
#: The status of a stage that was interrupted.
TIMED_OUT = "timed out"
#: The variable by which processes of a stage are found, whatever has become of their parents.
MARK = "GPU_DAY_STAGE"


class Stage(NamedTuple):
    """A measurement: the function of its name in a module of ``gpu_day_stages``.

    Attributes:
        limit: most seconds.
        module: the module.
        what: what it measures.
    """

    limit: float
    module: str
    what: str


#: In order of worth.
STAGES = {
    "facts": Stage(40, "machine", "the machine, the driver, and what decides about MPS"),
    "sweeps": Stage(
        150, "sweeps", "whole sweeps in each way to share the GPU, and by ASHA: seconds, and whether results agree"
    ),
    "by_hand": Stage(
        100, "packing", "1 to 16 processes without Fluid, in time slices and under MPS: iterations per second"
    ),
    "alpha": Stage(85, "packing", "what Fluid measures and makes of the same loops"),
    "fusion": Stage(
        100, "fusing", "packs of 1 to 256 trials against one alone, a loop by hand, and a CUDA graph of one"
    ),
    "fusible": Stage(40, "fusing", "which kinds of nets fuse, and whether as CUDA graphs"),
    "tests": Stage(120, "correctness", "the tests marked gpu"),
    "safety": Stage(
        100, "correctness", "random packings that need more memory than there is, and a fault among trials"
    ),
    "elastic": Stage(
        60, "elastic", "resizes of an elastic trial: over NCCL with two GPUs, else two ranks on one; a group of one"
    ),
    "mps": Stage(70, "mps", "the daemon: start, words, the ends of clients, a fault, a restart"),
    "lanes": Stage(60, "lanes", "the start of a lane, an iteration in it, pause and resume of a resident trial"),
    "out_of_memory": Stage(40, "costs", "what is left of a process once memory ran out"),
    "costs": Stage(60, "costs", "the context, library handles, memory statistics, the emptied cache, copies"),
    "lanes_memory": Stage(60, "lanes", "bytes of 64 trials that take turns in one lane, and of a process each"),
}


class Run:
    """One run of the program.

    Args:
        place: the device under test.
        out: folder of the results.
        budget: most seconds.
    """

    def __init__(self, place: Place, out: Path, budget: float) -> None:
        from gpu_day_stages.machine import identify

        self._place, self._out = place, out
        self._end = time.monotonic() + budget
        out.mkdir(parents=True, exist_ok=True)
        machine = {"kind": "gpu" if place.gpus else "cpu", **identify(place)}
        append(self.file, {"machine": machine, "date": time.strftime("%Y-%m-%d")})

    @property
    def file(self) -> Path:
        """The results."""
        return self._out / FILE

    def left(self) -> list[str]:
        """Returns the stages without a result: first those that were never begun, then those that came to no end."""
        day = Day.of(self.file)
        return sorted((name for name in STAGES if day.status(name) != DONE), key=lambda name: name in day.stages)

    def measure(self, names: Sequence[str]) -> list[str]:
        """Runs stages, as far as there is time; returns those that did not fit."""
        for place, name in enumerate(names):
            left = self._end - time.monotonic()
            if left < LEAST_S:
                return list(names[place:])
            limit = STAGES[name].limit * (1.0 if self._place.gpus else PATIENCE_ON_CPU)
            status, seconds = self._run(name, min(limit, left))
            self._write_page()
            print(f"{name:14} {status:10} {seconds:6.1f} s", flush=True)
        return []

    def _write_page(self) -> None:
        about = {name: stage.what for name, stage in STAGES.items()}
        new = self._out / "gpu_day.md.new"
        new.write_text(markdown(Day.of(self.file), about), encoding="utf-8")
        new.replace(self._out / "gpu_day.md")

    def _run(self, name: str, limit: float) -> tuple[str, float]:
        today = time.strftime("%Y-%m-%d")
        append(self.file, {"stage": name, "status": BEGUN, "date": today})
        begun = time.monotonic()
        log = self._out / "gpu_day.log"
        with tempfile.TemporaryDirectory(prefix="gpu-day-") as home, log.open("ab") as output:
            output.write(f"\n===== {name}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            output.flush()
            start = output.tell()
            environment = self._environment(home)
            status, left_behind = run_limited(self.command(name, limit), environment, limit, output)
        seconds = round(time.monotonic() - begun, 1)
        record: dict[str, Any] = {"stage": name, "status": status, "seconds": seconds, "date": today}
        if status != DONE:
            with log.open("rb") as written:
                written.seek(start)
                record["output"] = written.read().decode(errors="replace")[-TAIL:]
        if left_behind:
            append(self.file, {"stage": name, "figure": "left behind", "value": left_behind, "at_s": seconds})
        append(self.file, record)
        return status, seconds

    def command(self, name: str, limit: float) -> list[str]:
        """Returns the command line of a stage."""
        options = [] if self._place.gpus else ["--cpu"]
        options += ["--mps-program", self._place.mps_program] if self._place.mps_program else []
        until = time.time() + limit - END_S
        program = str(Path(__file__).resolve())
        return [sys.executable, program, "--stage", name, "--out", str(self._out), "--until", str(until), *options]

    def _environment(self, home: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "FLUID_RUNS": home, "PYTHONUNBUFFERED": "1"}
        environment[MARK] = uuid.uuid4().hex
        if not self._place.gpus:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # A machine without byte code of PyTorch compiles it in each process: that took 6 s, and torch._dynamo 6 s more.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "gpu-day-byte-code")), **environment}


def gpu_tests() -> tuple[str, ...]:
    """Returns the arguments of Python for the tests marked ``gpu``, but for those that need Ray.

    pytest finds the same tests without the files' names, but imports all others for that, which takes each of its
    processes half a minute.
    """
    paths = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "ray_tune" not in path.parts)
    files = (str(path) for path in paths if "pytest.mark.gpu" in path.read_text(encoding="utf-8"))
    return ("-m", "pytest", "-q", "-m", "gpu", *files)


def run_limited(command: list[str], environment: dict[str, str], limit: float, output: Any) -> tuple[str, list[str]]:
    """Runs a command in a process group; returns how it ended, and which of its processes had to be killed after it.

    Near the limit the group is interrupted, so that it can end what it has started, and killed at the limit. The
    command's standard input ends with this process.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = DONE if process.wait(max(1.0, limit - END_S)) == 0 else f"status {process.returncode}"
    except subprocess.TimeoutExpired:
        status = TIMED_OUT
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(END_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        left_behind = end_marked(environment[MARK])
    return status, left_behind


def end_marked(mark: str) -> list[str]:
    """Waits for the processes whose environment has the mark, then kills those that are left; returns their names."""
    end = time.monotonic() + LEFT_S
    while (found := dict(_marked(mark))) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(found.values())


def _marked(mark: str) -> Iterable[tuple[int, str]]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # It has ended meanwhile, or belongs to another user.
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name), (folder / "comm").read_text(encoding="utf-8").strip()


def _end_with_the_program() -> None:
    """Kills the process group of this stage as soon as the program has ended, of whatever it died."""
    os.read(sys.stdin.fileno(), 1)  # Nobody writes: it returns at the end of the pipe.
    os.killpg(0, signal.SIGKILL)


def run_stage(name: str, place: Place, out: Path) -> None:
    """Runs a stage in this process, which the program has started."""
    threading.Thread(target=_end_with_the_program, daemon=True).start()
    module = importlib.import_module(f"gpu_day_stages.{STAGES[name].module}")
    getattr(module, name)(place, Figures(out / FILE, name))


def unpack_wheels(folder: Path, to: str) -> None:
    """Lets this process and those that it starts find the packages of a folder's wheels."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)
    sys.path.insert(0, to)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (to, os.environ.get("PYTHONPATH"))))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=560.0, help="most seconds of this run (default: %(default)g)")
    parser.add_argument("--stages", help="which, comma-separated (default: all that have no result yet)")
    out = ROOT / "benchmarks" / "results" / "gpu_day"
    parser.add_argument("--out", type=Path, default=out, help="folder of the results (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages that are missing")
    parser.add_argument("--cpu", action="store_true", help="try the code on a CPU")
    parser.add_argument("--list", action="store_true", help="show the stages")
    parser.add_argument("--mps-program", help="control program of MPS (default: the installed one)")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        for name, stage in STAGES.items():
            print(f"{name:14} {stage.limit:4.0f} s  {stage.what}")
        return
    names = options.stages.split(",") if options.stages else None
    if unknown := sorted(set(names or ()) - set(STAGES)):
        parser.error(f"--stages: {', '.join(unknown)} is not among {', '.join(STAGES)}")
    with contextlib.ExitStack() as stack:
        if options.wheels:
            unpack_wheels(options.wheels, stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-day-wheels-")))
        if missing := [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]:
            parser.error(f"install {', '.join(missing)}, or put their wheels into a folder and give it as --wheels")
        from gpu_day_stages.place import Place

        from fluid.gpu.nvml import find_gpus, no_gpu_reason

        gpus = () if options.cpu else tuple(gpu.token for gpu in find_gpus())
        if not gpus and not options.cpu:
            parser.error(f"{no_gpu_reason()}; --cpu tries the code without a GPU")
        out = options.out.resolve()
        place = Place(gpus=gpus, mps_program=options.mps_program, end=options.until)
        if options.stage:
            run_stage(options.stage, place, out)
            return
        run = Run(place, out, options.budget)
        left = run.measure(run.left() if names is None else names)
    print(f"written to {out / 'gpu_day.md'}{'; left for the next run: ' + ', '.join(left) if left else ''}")


if __name__ == "__main__":
    main()

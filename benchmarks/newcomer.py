"""What somebody waits for who follows README.md in an empty environment; and what optional packages cost who has them.

    python benchmarks/newcomer.py              # makes an environment in a temporary folder: pip install .
    python benchmarks/newcomer.py --bare DIR   # keeps it there, and uses it if it is there

* **The first best model**: README's first example, in that environment. Fluid's own time is the wall time of the
  program less that of the same training without Fluid, a loop over as many iterations as the sweep ran.
* **Optional packages**: a small sweep in that environment, and in the one that runs this program, which should have as
  many of them as there are (``make integrations``); both with the checkout's Fluid. CPU seconds of the processes, and
  resident memory, the least of some runs that take turns; the ratio should be at most 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: README's training, without Fluid: argument 1 is the number of iterations.
_LOOP = """
iterations = train({"lr": 0.1, "decay": 0.01}, None)
for _ in range(int(sys.argv[1])):
    next(iterations)
"""
_COUNT = "\nprint('iterations', sum(trial.iteration for trial in result.trials))\n"
_SWEEP = """
import json, resource, sys
import fluid


def train(config):
    for step in range(1, 10):
        yield {"loss": config["lr"] / step}


if __name__ == "__main__":
    space = {"lr": fluid.search.uniform(0, 1)}
    fluid.run(train, space, metric="loss", mode="min", algorithm="asha", samples=16, budget=9)
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    modules = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps({
        "cpu_s": sum(one.ru_utime + one.ru_stime for one in used),
        "driver_cpu_s": used[0].ru_utime + used[0].ru_stime,
        "driver_mb": used[0].ru_maxrss / 1024,
        "child_mb": used[1].ru_maxrss / 1024,
        "modules": len(sys.modules),
        "third_party": sorted(modules - set(sys.stdlib_module_names) - {"__main__", "__mp_main__", "fluid"}),
    }))
"""


def example() -> str:
    """The first block of Python of README.md."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def run(python: Path, script: str, *arguments: str, path: str = "") -> tuple[float, str]:
    """Runs a script in an environment, with a new home; returns its wall time and what it prints.

    Args:
        python: the environment's.
        script: Python.
        arguments: the script's.
        path: where modules are looked for besides.
    """
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "script.py").write_text(script, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "FLUID_RUNS"}
        begun = time.perf_counter()
        done = subprocess.run(
            [python, "script.py", *arguments],
            cwd=home,
            env={**environment, "HOME": home, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return time.perf_counter() - begun, done.stdout


@contextmanager
def environment(kept: Path | None) -> Iterator[Path]:
    """The Python of an environment with Fluid's core alone; tells how long pip took to make it."""
    with tempfile.TemporaryDirectory(prefix="fluid-newcomer-") as name:
        folder = kept or Path(name)
        python = folder / "bin" / "python"
        if not python.exists():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(ROOT)]
            subprocess.run(pip, check=True)
            print(f"python -m venv, pip install .: {time.perf_counter() - begun:.1f} s")
        yield python


def first_model(python: Path, runs: int) -> dict[str, Any]:
    """Measures README's example."""
    script, split = example(), example().index("space = ")
    loop = "import sys\n" + script[:split].replace("import fluid\n", "") + _LOOP
    walls, bare = [], []
    for _ in range(runs):
        wall, printed = run(python, script + _COUNT)
        iterations = printed.rpartition("iterations ")[2].strip()
        walls.append(wall)
        bare.append(run(python, loop, iterations)[0])
    own = [wall - alone for wall, alone in zip(walls, bare, strict=True)]
    return {"wall_s": walls, "loop_s": bare, "own_s": own, "iterations": int(iterations)}


def optional_packages(bare: Path, runs: int) -> dict[str, Any]:
    """Measures a small sweep with and without optional packages."""
    places = {"bare": bare, "full": Path(sys.executable)}
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in places}
    for _ in range(runs):
        for name, python in places.items():
            told[name].append(json.loads(run(python, _SWEEP, path=str(ROOT))[1].splitlines()[-1]))
    figures = ("cpu_s", "driver_cpu_s", "driver_mb", "child_mb", "modules")
    least = {name: {figure: min(one[figure] for one in each) for figure in figures} for name, each in told.items()}
    return {
        **least,
        "ratio": {figure: least["full"][figure] / least["bare"][figure] for figure in figures},
        "third_party": {name: each[0]["third_party"] for name, each in told.items()},
    }


def main() -> None:
    """Measures both, and prints them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bare", type=Path, metavar="DIR", help="the environment, which is kept")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    with environment(arguments.bare) as python:
        first = first_model(python, arguments.runs)
        optional = optional_packages(python, arguments.runs)
    own = first["own_s"]
    print(f"README's example: {first['iterations']} iterations, {statistics.median(first['wall_s']):.2f} s, of which")
    print(f"Fluid's own {statistics.median(own):.2f} s (median of {len(own)}; {min(own):.2f} to {max(own):.2f} s)")
    for figure, ratio in optional["ratio"].items():
        bare, full = (optional[name][figure] for name in ("bare", "full"))
        print(f"{figure:13} {bare:8.2f} bare {full:8.2f} full, ratio {ratio:.3f}")
    print("modules of others:", *optional["third_party"]["full"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"first_model": first, "optional_packages": optional}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Runs official example scripts of Optuna and Ray Tune, stock and with one line changed, and compares what they find.

    python benchmarks/official_examples.py --optuna DIR [--only NAME ...] [--json FILE]
    python benchmarks/official_examples.py --table FILE

DIR is a checkout of https://github.com/optuna/optuna-examples; Ray Tune's examples are those of the installed package.
Nothing is downloaded: the examples that need a data set from elsewhere are left out, as are those that fail without
Fluid with the installed packages (Ray Tune's of Ax and MLflow), and population based training, in which what trials
compute depends on when each of them ends. The changed line is that of the
documentation: ``study.optimize(objective, ...)`` becomes ``optimize(study, objective, ...)``, and ``tune.Tuner(...)``
becomes ``fluid.tune.Tuner(..., executor=fluid.FluidExecutor())``. The second command prints the table of the results.

The script runs as it is but for that line, in a process and a folder of its own. So that two runs of one script can be
compared at all, it runs under these conditions with and without Fluid: samplers that have no seed get one; a trial
finds the generators of ``random`` and NumPy seeded, by its number or its config; studies run one trial at a time; and
libraries use one thread and no further processes, as some, XGBoost's linear booster among them, compute other values
each time with more. For Optuna, each trial's parameters, values and state are compared, as far as both runs have it:
some studies end after a second or two. For Ray Tune, what each config reported in each iteration that both runs have:
when a scheduler stops a trial depends on time. What is not equal runs without Fluid once more, to be compared with
itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import random
import re
import runpy
import subprocess
import sys
import tempfile
import time
import zlib
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
#: Metrics of Ray Tune's results that tell of a run, not of a model.
_OF_A_RUN = {"timestamp", "pid", "date", "hostname", "node_ip", "trial_id", "experiment_tag", "config", "done"}
_OF_A_RUN |= {"should_checkpoint", "checkpoint_dir_name"}
_TIME = ("time_", "iterations_since", "timesteps_since")
#: Seconds that one run of an example may take.
_LIMIT_S = 900


class Example(NamedTuple):
    """An example script.

    Attributes:
        peer: whose it is: ``"optuna"`` or ``"ray"``.
        path: of the script, in the peer's examples.
        arguments: of its command line.
    """

    peer: str
    path: str
    arguments: tuple[str, ...] = ()


_SMOKE = ("--smoke-test",)
EXAMPLES = (
    Example("optuna", "basic/quadratic.py"),
    Example("optuna", "basic/pruning.py"),
    Example("optuna", "basic/quadratic_constraint.py"),
    Example("optuna", "basic/quadratic_multi_objective.py"),
    Example("optuna", "basic/artifact_store.py"),
    Example("optuna", "faq/enqueue_trial.py"),
    Example("optuna", "faq/max_trials_callback.py"),
    Example("optuna", "multi_objective/quadratic_simple.py"),
    Example("optuna", "pruners/wilcoxon_pruner_tsp_sa.py"),
    Example("optuna", "terminator/terminator_simple.py"),
    Example("optuna", "sklearn/sklearn_additional_args.py"),
    Example("optuna", "sklearn/sklearn_simple.py"),
    Example("optuna", "lightgbm/lightgbm_simple.py"),
    Example("optuna", "lightgbm/lightgbm_terminator.py"),
    Example("optuna", "xgboost/xgboost_simple.py"),
    Example("optuna", "xgboost/xgboost_cv.py"),
    Example("ray", "tune_basic_example.py", _SMOKE),
    Example("ray", "async_hyperband_example.py"),
    Example("ray", "custom_func_checkpointing.py"),
    Example("ray", "custom_checkpointing_with_callback.py"),
    Example("ray", "hyperband_example.py", _SMOKE),
    Example("ray", "hyperband_function_example.py", _SMOKE),
    Example("ray", "logging_example.py", _SMOKE),
    Example("ray", "optuna_example.py", _SMOKE),
    Example("ray", "optuna_multiobjective_example.py", _SMOKE),
    Example("ray", "optuna_define_by_run_example.py", _SMOKE),
    Example("ray", "lightgbm_example.py"),
    Example("ray", "xgboost_example.py"),
    Example("ray", "bohb_example.py"),
)


#: By peer: the call that starts a study or a sweep, and what it becomes.
_CHANGES = {
    "optuna": (
        r"^( *)(\w+)\.optimize\(",
        r"\1from fluid.integrations.optuna import optimize; optimize(\2, ",
    ),
    "ray": (
        r"^( *\w+ = )tune\.Tuner\(",
        r"\1__import__('fluid').tune.Tuner(executor=__import__('fluid').FluidExecutor(), trainable=",
    ),
}


def with_fluid(source: str, peer: str) -> str:
    """Returns an example's source with each call that starts a study or a sweep changed to Fluid's.

    Raises:
        ValueError: there is none.
    """
    changed, calls = re.subn(*_CHANGES[peer], source, flags=re.MULTILINE)
    if not calls:
        raise ValueError("the example has no call that could be changed")
    return changed


# -- one run, in a process of its own ----------------------------------------------------------------------


class Seeded:
    """An objective that finds the global generators seeded by its trial's number.

    Args:
        objective: of the example.
    """

    def __init__(self, objective: Any) -> None:
        self._objective = objective

    def __call__(self, trial: Any) -> Any:
        _seed(trial.number)
        return self._objective(trial)


def _seed(number: int) -> None:
    import numpy as np

    random.seed(number)
    np.random.seed(number)


def _seed_by(config: dict[str, Any]) -> None:
    _seed(zlib.crc32(json.dumps(config, sort_keys=True, default=str).encode()))


def _seeded_trainable(trainable: Any) -> Any:
    """A trainable of Ray Tune's that finds the global generators seeded by its config."""
    if isinstance(trainable, type):

        class SeededTrainable(trainable):  # type: ignore[misc]
            def setup(self, config: dict[str, Any]) -> None:
                _seed_by(config)
                super().setup(config)

        return SeededTrainable

    @functools.wraps(trainable)  # Also the resources that it asks for.
    def seeded(config: dict[str, Any]) -> Any:
        _seed_by(config)
        return trainable(config)

    return seeded


def _record_optuna() -> list[Any]:
    """Seeds the objectives of all studies to come, and returns the list that gets them."""
    import optuna

    import fluid.integrations.optuna as fluid_optuna

    studies: list[Any] = []
    create, stock, ours = optuna.create_study, optuna.Study.optimize, fluid_optuna.optimize

    def create_study(*arguments: Any, **options: Any) -> Any:
        studies.append(create(*arguments, **options))
        return studies[-1]

    optuna.create_study = optuna.study.create_study = create_study
    optuna.Study.optimize = lambda self, func, *a, **o: stock(self, Seeded(func), *a, **o)
    # One trial at a time, as in stock: else the sampler knows less of the trials before, and suggests other values.
    fluid_optuna.optimize = lambda study, func, *a, **o: ours(study, Seeded(func), *a, **{"n_jobs": 1, **o})
    return studies


def _record_tune() -> list[Any]:
    """Returns the list that gets the results of all tuners to come."""
    import ray.tune

    grids: list[Any] = []
    init, fit = ray.tune.Tuner.__init__, ray.tune.Tuner.fit

    def seeded(tuner: Any, trainable: Any = None, **options: Any) -> None:
        init(tuner, _seeded_trainable(trainable), **options)

    def recorded(tuner: Any) -> Any:
        grid = fit(tuner)
        grids.append(grid)
        return grid

    ray.tune.Tuner.__init__, ray.tune.Tuner.fit = seeded, recorded
    return grids


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return json.loads(json.dumps(value, default=lambda other: other.item() if hasattr(other, "item") else str(other)))


def _studies(studies: list[Any]) -> list[Any]:
    return [
        [[trial.number, trial.state.name, _plain(trial.params), trial.values] for trial in study.trials]
        for study in studies
    ]


def _grids(grids: list[Any]) -> list[Any]:
    found = []
    for grid in grids:
        trials = []
        for result in grid:
            frame = result.metrics_dataframe
            rows = [] if frame is None else frame.to_dict("records")
            reported = {
                int(row["training_iteration"]): {
                    name: value
                    for name, value in row.items()
                    if name not in _OF_A_RUN and not name.startswith((*_TIME, "config/"))
                }
                for row in rows
            }
            trials.append([_plain(result.config), _plain(reported), str(result.error or "")])
        found.append(trials)
    return found


def _seeded(init: Any) -> Any:
    """Gives a sampler the seed 0 where it is made without one, or with ``None``, as Ray Tune makes them."""

    @functools.wraps(init)
    def seeded(sampler: Any, *arguments: Any, seed: int | None = None, **options: Any) -> None:
        init(sampler, *arguments, seed=0 if seed is None else seed, **options)

    return seeded


def run_one(script: str, arguments: list[str], peer: str, output: str) -> None:
    """Runs a script in this process and writes what it found to a file."""
    import numpy as np
    import optuna

    random.seed(0)
    np.random.seed(0)
    samplers = [optuna.samplers.TPESampler, optuna.samplers.NSGAIISampler, optuna.samplers.RandomSampler]
    if peer == "ray":
        from ray.tune.search.bohb import TuneBOHB

        samplers.append(TuneBOHB)
    for sampler in samplers:
        sampler.__init__ = _seeded(sampler.__init__)
    recorded = _record_optuna() if peer == "optuna" else _record_tune()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    ended = ""
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:  # Also SystemExit: the table says how the script ended.
        ended = "" if isinstance(error, SystemExit) and not error.code else f"{type(error).__name__}: {error}"
        raise
    finally:
        found = _studies(recorded) if peer == "optuna" else _grids(recorded)
        Path(output).write_text(json.dumps({"ended": ended, "found": found}))


# -- stock and Fluid ---------------------------------------------------------------------------------------


def measured(example: Example, source: str, fluid: bool, folder: Path) -> dict[str, Any]:
    """Runs an example in a folder of its own; returns what it found, how it ended, and its seconds."""
    folder.mkdir(parents=True)
    script = folder / Path(example.path).name
    script.write_text(with_fluid(source, example.peer) if fluid else source)
    output = folder / "found.json"
    environment = {**os.environ, "HOME": str(folder), "RAY_DEDUP_LOGS": "0", "MPLBACKEND": "agg"}
    environment |= {"OMP_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1"}
    begun = time.perf_counter()
    with (folder / "log").open("w") as log:
        command = [sys.executable, __file__, "--run", str(script), example.peer, str(output), *example.arguments]
        try:
            code = subprocess.run(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=_LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.perf_counter() - begun
    read = json.loads(output.read_text()) if output.exists() else {"ended": f"exit {code}", "found": []}
    return {**read, "code": code, "seconds": round(seconds, 1)}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def compared(peer: str, stock: list[Any], ours: list[Any]) -> tuple[int, int]:
    """Returns how many values both runs have, and how many of them are equal."""
    both = equal = 0
    for one, other in zip(stock, ours, strict=False):
        if peer == "optuna":
            pairs = list(zip(one, other, strict=False))
        else:
            left = {json.dumps(config, sort_keys=True): reported for config, reported, _ in other}
            pairs = [
                (metrics, left[key][iteration])
                for config, reported, _ in one
                if (key := json.dumps(config, sort_keys=True)) in left
                for iteration, metrics in reported.items()
                if iteration in left[key]
            ]
        both += len(pairs)
        equal += sum(_same(a, b) for a, b in pairs)
    return both, equal


def table(rows: list[dict[str, Any]]) -> str:
    """Returns what was found as a table in Markdown."""
    lines = ["| example | trials of stock, of Fluid | compared | equal |", "|---|---|---|---|"]
    for row in rows:
        ended = "" if row["fluid_exit"] == row["stock_exit"] else f", exits {row['stock_exit']}, {row['fluid_exit']}"
        trials = f"{row['stock_trials']}, {row['fluid_trials']}{ended}"
        equal = str(row["equal"])
        if "stock_equal" in row:
            equal += f" (stock with itself: {row['stock_equal']} of {row['stock_compared']})"
        lines.append(f"| {row['peer']} `{row['example']}` | {trials} | {row['compared']} | {equal} |")
    return "\n".join(lines)


def circumstances() -> dict[str, Any]:
    """Returns the day, the machine's cores and the versions of what runs."""
    versions = {name: metadata.version(name) for name in ("optuna", "ray")}
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), **versions}
    return {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "machine": machine}


def main() -> None:
    """Runs the examples that are asked for, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optuna", type=Path, help="checkout of optuna-examples; left out, Optuna's are not run")
    parser.add_argument("--only", nargs="+", default=[], help="names of examples, or parts of them")
    parser.add_argument("--logs", type=Path, help="folder for the runs' files and logs; a temporary one by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="prints the table of such a JSON file, and runs nothing")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    if sys.argv[1:2] == ["--run"]:
        script, peer, output, *arguments = sys.argv[2:]
        run_one(script, arguments, peer, output)
        return
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text())["examples"]))
        return
    import ray.tune.examples

    folders = {"optuna": options.optuna, "ray": Path(ray.tune.examples.__file__).parent}
    base = options.logs or Path(tempfile.mkdtemp(prefix="examples-"))
    rows = []
    for example in EXAMPLES:
        if folders[example.peer] is None or (options.only and not any(part in example.path for part in options.only)):
            continue
        source = (folders[example.peer] / example.path).read_text()
        name = f"{example.peer}-{example.path.replace('/', '-').removesuffix('.py')}"
        stock = measured(example, source, False, base / name / "stock")
        ours = measured(example, source, True, base / name / "fluid")
        both, equal = compared(example.peer, stock["found"], ours["found"])
        row = {
            "peer": example.peer,
            "example": " ".join((example.path, *example.arguments)),
            "stock_exit": stock["code"],
            "fluid_exit": ours["code"],
            "stock_trials": sum(map(len, stock["found"])),
            "fluid_trials": sum(map(len, ours["found"])),
            "compared": both,
            "equal": equal,
            "stock_s": stock["seconds"],
            "fluid_s": ours["seconds"],
        }
        if equal < both:
            again = measured(example, source, False, base / name / "stock-again")
            row["stock_compared"], row["stock_equal"] = compared(example.peer, stock["found"], again["found"])
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps({**circumstances(), "examples": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

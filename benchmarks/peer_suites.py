"""Runs the tests of other projects with Fluid in place of their own machinery, and compares with the tests as they are.

    python benchmarks/peer_suites.py all --sources FOLDER --python ray=INTERPRETER
    python benchmarks/peer_suites.py SUITE ... [--side stock|fluid] [--file NAME ...] [--again]
    python benchmarks/peer_suites.py table

The suites are joblib, sklearn, optuna, hydra and ray. Nothing is downloaded: the tests of joblib, scikit-learn and
Hydra are in the installed packages, and FOLDER has those of the other two from copies of their repositories:

    git archive v5.0.0-rc1 tests                                              in FOLDER/optuna, for Optuna 5.0.0
    git archive ray-2.38.0 python/ray/tune/tests python/ray/train/tests       in FOLDER/ray, for Ray 2.38.0

INTERPRETER is one with Fluid's dependencies, pytest, pytest-timeout and what the tests need: for Ray's, that Ray, GPy,
hyperopt, numpy<2 and scikit-learn<1.6 (``--python ray=...``); for Optuna's, fakeredis (``--python optuna=...``). Each
side runs in processes of its own, a file of tests at a time; how each test ended is written to
``build/peer_suites/SUITE-SIDE-FILE.jsonl``. Files that both sides have run are compared: the counts, and each test that
stock passes and Fluid does not, go to ``benchmarks/results/peer_suites.json``. ``table`` prints the tables: the counts,
and why tests differ. The exit status is 1 if ``peer_suites_differences.py`` has no reason for such a test.

What differs for no known reason runs once more first, as a test may exceed its time on a busy machine; ``--again`` runs
that alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from peer_suites_differences import DIFFERENCES, Difference

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUTCOMES = ROOT / "build" / "peer_suites"
RESULTS = HERE / "results" / "peer_suites.json"
SIDES = ("stock", "fluid")
#: Most seconds of a file of tests.
FILE_S = 5400.0


@dataclass(frozen=True)
class Suite:
    """Tests of another project.

    Attributes:
        title: the project's name.
        package: its package, whose version the table gives.
        files: of the tests, in the folder that ``stage`` returns.
        stage: makes the folder with the tests, given where the sources are and an empty folder, and the interpreter.
        place: what Fluid takes the place of.
        options: of pytest.
        environment: further variables.
        test_s: most seconds of a test.
    """

    title: str
    package: str
    files: tuple[str, ...]
    stage: Callable[[Path | None, Path, str], Path]
    place: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    test_s: float = 300.0


def _installed(package: str) -> Callable[[Path | None, Path, str], Path]:
    def stage(sources: Path | None, folder: Path, python: str) -> Path:
        asked = subprocess.run(
            [python, "-c", f"import {package}; print({package}.__path__[0])"],
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(asked.stdout.strip())

    return stage


def _of_optuna(sources: Path | None, folder: Path, python: str) -> Path:
    """Copies the tests alone: beside the sources, they would test these and not what is installed."""
    shutil.copytree(_given(sources, "optuna") / "tests", folder / "tests")
    return folder


def _of_ray(sources: Path | None, folder: Path, python: str) -> Path:
    """Copies the tests, which import each other by names within Ray that its wheels lack."""
    given = _given(sources, "ray") / "python" / "ray"
    shutil.copytree(given / "tune" / "tests", folder / "tests")
    shutil.copy(given / "train" / "tests" / "util.py", folder / "tests" / "train_util.py")
    for path in (folder / "tests").rglob("*.py"):
        text = path.read_text()
        text = text.replace("ray.train.tests.util", "tests.train_util").replace("ray.tune.tests.", "tests.")
        path.write_text(text)
    return folder


def _of_hydra(sources: Path | None, folder: Path, python: str) -> Path:
    return HERE


def _given(sources: Path | None, suite: str) -> Path:
    if sources is None or not (sources / suite).is_dir():
        raise SystemExit(f"--sources: no folder {suite} in {sources}; see --help for what it has to hold")
    return sources / suite


SUITES: dict[str, Suite] = {
    "joblib": Suite(
        title="joblib",
        package="joblib",
        files=("test/test_parallel.py",),
        stage=_installed("joblib"),
        place='the backend `"loky"`',
    ),
    "sklearn": Suite(
        title="scikit-learn",
        package="scikit-learn",
        files=("model_selection/tests/test_search.py",),
        stage=_installed("sklearn"),
        place="`GridSearchCV` and `RandomizedSearchCV`, by subclasses of `FluidSearchCV` that have their arguments",
    ),
    "optuna": Suite(
        title="Optuna",
        package="optuna",
        files=(
            "tests/study_tests/test_study.py",
            "tests/study_tests/test_dataframe.py",
            "tests/study_tests/test_multi_objective.py",
            "tests/test_callbacks.py",
            "tests/samplers_tests/test_grid.py",
            "tests/samplers_tests/test_brute_force.py",
            "tests/terminator_tests/test_callback.py",
        ),
        stage=_of_optuna,
        place="`Study.optimize`",
        options=("-k", "not sqlite and not redis and not journal and not grpc"),
    ),
    "hydra": Suite(
        title="Hydra",
        package="hydra-core",
        files=("peer_suites_hydra.py",),
        stage=_of_hydra,
        place="the basic launcher, by `hydra/launcher=fluid`",
    ),
    "ray": Suite(
        title="Ray Tune",
        package="ray",
        files=tuple(
            f"tests/test_{name}.py"
            for name in (
                "actor_reuse",
                "tuner",
                "api",
                "trial_scheduler_pbt",
                "trial_scheduler_resource_changing",
                "trial_scheduler",
            )
        ),
        stage=_of_ray,
        place="`tune.run`, `run_experiments` and `Tuner`, with an executor of two devices for each test",
        # Their conftest needs that of Ray's own tests.
        options=("--noconftest",),
        # Ray starts its workers as they are needed: with so many tests that start Ray, that saves an hour.
        environment={"RAY_prestart_worker_first_driver": "0", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"},
    ),
}


def outcomes_of(folder: Path, name: str, side: str, file: str) -> Path:
    """Returns where the outcomes of a file of tests are."""
    return folder / f"{name}-{side}-{Path(file).stem}.jsonl"


def run_side(
    name: str,
    side: str,
    python: str,
    sources: Path | None,
    outcomes: Path,
    files: Sequence[str],
    only: Sequence[str] = (),
) -> None:
    """Runs files of a suite, each in a process of its own, and writes how their tests ended.

    Args:
        name: of the suite.
        side: ``"stock"`` or ``"fluid"``.
        python: the interpreter.
        sources: the folder of the projects' sources.
        outcomes: the folder of outcomes.
        files: of the tests.
        only: ids of the tests to run again, as in the outcomes; empty for all.
    """
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as folder:
        place = suite.stage(sources, Path(folder), python)
        for file in files:
            tests = [test.removeprefix(file) for test in only if test.startswith(f"{file}::")]
            path = outcomes_of(outcomes, name, side, file)
            if only and not tests:
                continue
            # The outcomes of a file count once all of it has run; those of what runs again are added to them.
            written = path if only else path.with_suffix(".part")
            if not only:
                written.unlink(missing_ok=True)
            print(f"{datetime.now():%H:%M:%S} {name} {side} {file}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as home:
                environment = {
                    **os.environ,
                    "HOME": home,
                    "FLUID_RUNS": f"{home}/runs",
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")))
                    ),
                    "FLUID_PEER_SUITE": name,
                    "FLUID_PEER_SIDE": side,
                    "FLUID_PEER_PACKAGE": suite.package,
                    "FLUID_PEER_FILE": file,
                    "FLUID_PEER_OUTCOMES": str(written),
                    **suite.environment,
                }
                command = [python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
                command += ["-p", "peer_suites_plugin", "--rootdir", str(place), "--timeout", str(suite.test_s)]
                command += [*suite.options, *([f"{place / file}{test}" for test in tests] or [str(place / file)])]
                # Tests write to the current folder.
                _run(command, folder if place == Path(folder) else home, environment, path.with_suffix(".log"))
            if not written.exists():
                raise SystemExit(f"{name}: pytest has not begun:\n{path.with_suffix('.log').read_text()[-2000:]}")
            written.replace(path)


def _run(command: Sequence[str], cwd: str, environment: Mapping[str, str], log: Path) -> None:
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(FILE_S)
        except subprocess.TimeoutExpired:
            print(f"did not end within {FILE_S:.0f} s: {' '.join(command)}", file=sys.stderr)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(frozen=True)
class Outcome:
    """How a test ended: ``outcome`` is pytest's word, or ``"lost"`` if its process ended before the test had."""

    outcome: str
    on_fluid: bool = False
    text: str = ""


def files_of_both(outcomes: Path, name: str) -> list[str]:
    """Returns the files of a suite that both sides have run; says which of them could not be collected."""
    found = []
    for file in SUITES[name].files:
        paths = [outcomes_of(outcomes, name, side, file) for side in SIDES]
        if all(path.exists() for path in paths):
            broken = [path for path in paths if any("broken" in record for record in _records(path))]
            if not broken:
                found.append(file)
            for path in broken:
                print(f"cannot be collected, and is left out: {path.with_suffix('.log')} says why", file=sys.stderr)
    return found


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(outcomes: Path, name: str, side: str, files: Sequence[str]) -> dict[str, Outcome]:
    """Returns how each test of a side ended; of one that was run again, how it ended the last time."""
    found: dict[str, Outcome] = {}
    for file in files:
        for record in _records(outcomes_of(outcomes, name, side, file)):
            for test in record.get("collected", ()):
                found.setdefault(test, Outcome("lost"))
            if "test" in record:
                found[record["test"]] = Outcome(record["outcome"], record["on_fluid"], record["text"])
    return found


def _circumstances(path: Path) -> dict[str, Any]:
    """Returns the version of the package, that of Python, the machine's cores and the date of a file's run."""
    return _records(path)[0]


def differing(stock: Mapping[str, Outcome], fluid: Mapping[str, Outcome]) -> list[str]:
    """Returns the tests that stock passes and Fluid does not."""
    return [
        test
        for test, outcome in stock.items()
        if outcome.outcome == "passed" and fluid.get(test, Outcome("lost")).outcome != "passed"
    ]


def compared(name: str, outcomes: Path, files: Sequence[str]) -> dict[str, Any]:
    """Returns the counts of both sides of files of a suite, and the tests that differ."""
    stock, fluid = (read(outcomes, name, side, files) for side in SIDES)
    return {
        "files": list(files),
        **_circumstances(outcomes_of(outcomes, name, "fluid", files[0])),
        "stock": dict(sorted(Counter(each.outcome for each in stock.values()).items())),
        "fluid": dict(sorted(Counter(each.outcome for each in fluid.values()).items())),
        "both_passed": sum(
            each.outcome == "passed" and fluid.get(test, Outcome("lost")).outcome == "passed"
            for test, each in stock.items()
        ),
        "on_fluid": sum(each.on_fluid for each in fluid.values()),
        "only_fluid_passed": sorted(
            test
            for test, each in fluid.items()
            if each.outcome == "passed" and stock.get(test, Outcome("lost")).outcome != "passed"
        ),
        "differences": {
            test: fluid.get(test, Outcome("lost")).text.strip().splitlines()[-1:] for test in differing(stock, fluid)
        },
    }


def reason_of(suite: str, test: str) -> Difference | None:
    """Returns why a test differs; ``None`` if nobody has said."""
    return next(
        (each for each in DIFFERENCES if each.suite == suite and any(fnmatchcase(test, p) for p in each.tests)), None
    )


def unexplained(results: Mapping[str, Any]) -> list[str]:
    """Returns the tests that stock passes and Fluid does not, for no known reason."""
    return [
        f"{suite}: {test}: {' '.join(error)}"
        for suite, found in results.items()
        for test, error in found["differences"].items()
        if reason_of(suite, test) is None
    ]


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the tables."""
    yield "| tests of | Fluid is in the place of | stock passes | of these, with Fluid | Fluid ran in | date |"
    yield "|---|---|---|---|---|---|"
    for name, suite in SUITES.items():
        if name in results:
            found = results[name]
            passed = found["stock"].get("passed", 0)
            yield (
                f"| {suite.title} {found['version']}: {_files(found['files'])} | {suite.place} | {passed} | "
                f"**{found['both_passed']}** | {found['on_fluid']} | {found['date']} |"
            )
    for name, suite in SUITES.items():
        if name in results and results[name]["differences"]:
            yield ""
            yield f"**{suite.title}**"
            yield ""
            yield "| tests | kind | why they differ |"
            yield "|---|---|---|"
            counts = Counter(reason_of(name, test) for test in results[name]["differences"])
            for difference, number in counts.most_common():
                if difference is not None:
                    yield f"| {number} | {difference.kind} | {difference.why} |"
            if counts[None]:
                yield f"| {counts[None]} | not looked into | |"


def _files(files: Sequence[str]) -> str:
    return ", ".join(f"`{Path(file).stem.removeprefix('peer_suites_')}`" for file in files)


def main(given: Sequence[str] | None = None) -> int:
    """Runs suites, compares and prints the tables; returns 1 if a test differs for no known reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=(*SUITES, "all", "table"))
    parser.add_argument("--sources", type=Path, help="the folder with optuna/ and ray/")
    parser.add_argument("--python", action="append", default=[], metavar="SUITE=INTERPRETER")
    parser.add_argument("--side", choices=SIDES, help="run this side alone, and compare with what the other one wrote")
    parser.add_argument("--file", action="append", metavar="NAME", help="run these alone, such as test_api")
    parser.add_argument("--again", action="store_true", help="run what differs for no known reason, with Fluid")
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES, help="the folder of how tests ended")
    arguments = parser.parse_args(given)
    pythons = {suite: python for suite, _, python in (each.partition("=") for each in arguments.python)}
    if wrong := [suite for suite, python in pythons.items() if suite not in SUITES or not python]:
        parser.error(f"--python {wrong[0]}: must be SUITE=INTERPRETER, with one of the suites {', '.join(SUITES)}")
    names = list(SUITES) if "all" in arguments.what else [name for name in arguments.what if name in SUITES]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    arguments.outcomes.mkdir(parents=True, exist_ok=True)
    for name in names:
        python = pythons.get(name, sys.executable)
        files = [file for file in SUITES[name].files if not arguments.file or Path(file).stem in arguments.file]
        for side in () if arguments.again else SIDES if arguments.side is None else (arguments.side,):
            run_side(name, side, python, arguments.sources, arguments.outcomes, files)
        both = files_of_both(arguments.outcomes, name)
        differences = differing(*(read(arguments.outcomes, name, side, both) for side in SIDES))
        if unknown := [test for test in differences if reason_of(name, test) is None]:
            run_side(name, "fluid", python, arguments.sources, arguments.outcomes, both, unknown)
    for name in SUITES:
        if both := files_of_both(arguments.outcomes, name):
            results[name] = compared(name, arguments.outcomes, both)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(tables(results)))
    missing = unexplained(results)
    print("".join(f"no reason known: {each}\n" for each in missing), file=sys.stderr, end="")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tests Fluid with the oldest and the newest release of what it works with: Python, NumPy, Optuna, Ray and PyTorch.

    python scripts/tested_versions.py                   # all: about an hour, and 8 GB of downloads for PyTorch
    python scripts/tested_versions.py --only ray optuna # these
    make test-versions ARGS='--only numpy'


Each release gets a virtual environment of its own in a temporary folder, which is removed afterwards: Fluid's wheel,
the release, and what pip chooses besides. The oldest release is the least that pyproject.toml allows; the newest is
the one that pip finds. Versions of Python are looked for as ``python3.10`` and so on. The last lines are rows of the
table in docs/approval.md. The exit status is 1 if a test failed or a release could not be installed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
#: The newest Python of the table.
NEWEST_PYTHON = "3.13"
_CORE = ("tests/sweeping/test_sweep.py", "tests/search", "tests/test_trialgroup.py")
_AGES = ("oldest", "newest")
#: What the tests need themselves.
_TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


class Subject(NamedTuple):
    """What is tested in two releases.

    Attributes:
        name: as the table has it.
        distribution: its name in the package index; empty for Python.
        tests: files and folders of tests.
        brings: the extra that asks for it; empty if it is the core.
        beside_oldest: what the oldest release needs, and does not ask for itself: later ones of these break it.
    """

    name: str
    distribution: str
    tests: tuple[str, ...]
    brings: str = ""
    beside_oldest: tuple[str, ...] = ()


SUBJECTS = {
    "python": Subject("Python", "", _CORE),
    "numpy": Subject("NumPy", "numpy", (*_CORE, "tests/planners/test_portfolio.py")),
    # Without the tests of what Optuna has had only since 4.0.
    "optuna": Subject(
        "Optuna",
        "optuna",
        (
            *(f"tests/integrations/optuna/test_{name}.py" for name in ("objectives", "optimize", "seeds", "shapes")),
            "tests/search",
        ),
        "optuna",
    ),
    "ray": Subject(
        "Ray",
        "ray",
        (
            "tests/integrations/ray_tune/test_private_api.py",
            "tests/integrations/ray_tune/test_side_by_side.py",
            "tests/integrations/ray_tune/test_decisions.py",
        ),
        "ray",
        ("numpy<2", "pandas<2.2", "pyarrow<15"),
    ),
    "torch": Subject("PyTorch", "torch", ("tests/fused/test_pack.py", "tests/elastic/test_training.py"), "elastic"),
}


def project() -> dict[str, object]:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(content, dict)
    return content


def oldest(subject: Subject) -> str:
    """The least release that pyproject.toml allows."""
    if not subject.distribution:
        return str(project()["requires-python"]).removeprefix(">=")
    extras = project()["optional-dependencies"]
    listed = [project()["dependencies"], *(extras.values() if isinstance(extras, dict) else ())]
    found = {
        least[1]
        for group in listed
        if isinstance(group, list)
        for one in group
        if (least := re.fullmatch(rf"{subject.distribution}(?:\[\w+\])?>=([\d.]+)", one))
    }
    (version,) = found
    return version


def run(*command: object, log: Path) -> bool:
    """Runs a command with its output in a log; whether it succeeded."""
    with log.open("a", encoding="utf-8") as file:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=file, stderr=file, env=environment, check=False)
    return done.returncode == 0


def tested(subject: Subject, version: str | None, folder: Path, wheel: Path) -> tuple[str, str, bool]:
    """Installs and tests one release.

    Args:
        subject: what is tested.
        version: its release; ``None`` for the newest.
        folder: for the environment and the log.
        wheel: Fluid's.

    Returns:
        The release, what came of its tests, and whether all passed.
    """
    python = f"python{version or NEWEST_PYTHON}" if not subject.distribution else sys.executable
    log, environment = folder / "log", folder / "environment"
    if not run(python, "-m", "venv", environment, log=log):
        return version or NEWEST_PYTHON, f"there is no {python}", False
    pinned = f"{subject.distribution}=={version}" if subject.distribution and version else subject.distribution
    wanted = f"{wheel}[{subject.brings}]" if subject.brings else str(wheel)
    pip = (environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    beside = subject.beside_oldest if version else ()
    if not run(*pip, wanted, *filter(None, [pinned]), *beside, *_TOOLS, log=log):
        return version or "newest", f"cannot be installed: {_last_line(log)}", False
    # By its own name, and not by -m: Fluid must be the one that is installed. Warnings of old releases are no errors.
    pytest = (environment / "bin" / "pytest", "-q", "-n", "2", "-W", "default", "-p", "no:cacheprovider")
    passed = run(*pytest, "-m", "not slow and not long and not frameworks", *subject.tests, log=log)
    code = "import platform as p; print(p.python_version())"
    if subject.distribution:
        code = f"from importlib.metadata import version; print(version({subject.distribution!r}))"
    shown = subprocess.check_output([environment / "bin" / "python", "-c", code], text=True).strip()
    return shown, _last_line(log), passed


def _last_line(log: Path) -> str:
    return log.read_text(encoding="utf-8").strip().splitlines()[-1].strip("= ")


def main() -> int:
    """Tests what is asked for; prints the rows of the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(SUBJECTS), default=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--ages", nargs="+", choices=_AGES, default=_AGES, metavar="AGE", help="oldest, newest or both")
    parser.add_argument("--logs", type=Path, help="keep pip's and pytest's output in this folder")
    arguments = parser.parse_args()
    rows, all_passed = [], True
    with tempfile.TemporaryDirectory(prefix="fluid-versions-") as name:
        build = Path(name) / "wheel"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
        if not run(*pip, "--wheel-dir", build, ".", log=Path(name) / "log"):
            print(_last_line(Path(name) / "log"))
            return 1
        (wheel,) = build.glob("*.whl")
        for key in arguments.only:
            subject, cells = SUBJECTS[key], []
            for age in arguments.ages:
                version = oldest(subject) if age == "oldest" else None
                folder = Path(name) / f"{key}-{age}"
                folder.mkdir()
                shown, outcome, passed = tested(subject, version, folder, wheel)
                all_passed &= passed
                print(f"{subject.name} {shown}: {outcome}", flush=True)
                cells.append(f"{shown}: {'passed' if passed else outcome}")
                if arguments.logs is not None:
                    arguments.logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / "log", arguments.logs / f"{folder.name}.log")
                shutil.rmtree(folder)  # PyTorch takes gigabytes.
            rows.append(f"| {subject.name} | {' | '.join(cells)} | {datetime.date.today()} |")
    print(*rows, sep="\n")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())

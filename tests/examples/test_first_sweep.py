"""Plain training scripts become sweeps with few changed lines, as docs/first_sweep.md says.

``examples/first_sweep`` has each script before and after. A page that shows a pair shows the diff of these files.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fluid

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "first_sweep"


@dataclass(frozen=True)
class Pair:
    """A script before and after, and what is promised of it."""

    name: str
    #: Lines that change, at most.
    changes: int
    #: Modules that the script needs.
    needs: tuple[str, ...]
    #: The page that shows the diff.
    page: str
    #: Whether only ``make test-integrations`` installs all that it needs.
    framework: bool = False

    @property
    def before(self) -> Path:
        return SCRIPTS / f"{self.name}_before.py"

    @property
    def after(self) -> Path:
        return SCRIPTS / f"{self.name}_after.py"


PAIRS = [
    Pair("pytorch", 6, ("torch", "sklearn"), "first_sweep.md"),
    Pair("xgboost", 3, ("xgboost", "sklearn"), "boosting.md"),
    Pair("lightgbm", 3, ("lightgbm", "sklearn"), "boosting.md"),
    Pair("lightning", 4, ("lightning", "torch", "sklearn"), "deep_learning.md", framework=True),
]


def param_of(pair: Pair) -> object:
    marks = [pytest.mark.frameworks(*pair.needs)] if pair.framework else []
    if pair.name == "lightning":
        marks.append(pytest.mark.long)  # CI runs the example of Lightning instead.
    return pytest.param(pair, id=pair.name, marks=[pytest.mark.slow, *marks])


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def changes(before: str, after: str) -> list[tuple[list[str], list[str]]]:
    """Returns the lines that each change removes and adds. Neither empty lines nor indentation count."""
    old, new = ([line.strip() for line in lines_of(text)] for text in (before, after))
    found = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(old[first:last], new[start:end]) for kind, first, last, start, end in found if kind != "equal"]


def changed_lines(before: str, after: str) -> int:
    """Returns the number of lines that were added or altered, or removed without another in their place."""
    return sum(max(len(removed), len(added)) for removed, added in changes(before, after))


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n((?s:.*?))^```$", text, re.MULTILINE)


def run(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_few_lines_change(pair: Pair) -> None:
    assert (
        changed_lines(pair.before.read_text(encoding="utf-8"), pair.after.read_text(encoding="utf-8")) <= pair.changes
    )


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_page_shows_the_changes(pair: Pair) -> None:
    before, after = (path.read_text(encoding="utf-8") for path in (pair.before, pair.after))
    removed = [line for lines, _ in changes(before, after) for line in lines]
    added = [line for _, lines in changes(before, after) for line in lines]
    (shown,) = (block for block in blocks(pair.page, "diff") if f"+{added[-1]}" in block)
    by_sign = {sign: [line[1:].strip() for line in lines_of(shown) if line[0] == sign] for sign in " -+"}
    assert (by_sign["-"], by_sign["+"]) == (removed, added)
    # A line of three dots stands for unchanged ones.
    assert set(by_sign[" "]) - {"..."} <= {line.strip() for line in after.splitlines()}


def test_every_script_is_tested() -> None:
    assert {path.stem.rpartition("_")[0] for path in SCRIPTS.glob("*.py")} == {pair.name for pair in PAIRS}


@pytest.mark.parametrize("pair", [param_of(pair) for pair in PAIRS])
def test_before_and_after_run(pair: Pair, tmp_path: Path) -> None:
    for module in pair.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    run(pair.before.read_text(encoding="utf-8"), tmp_path / "before")
    # The blocks of Python of the first page go on where the script ends.
    further = blocks(pair.page, "python") if pair.page == "first_sweep.md" else []
    run("\n".join([pair.after.read_text(encoding="utf-8"), *further]), tmp_path / "after")
    result = fluid.load(min((tmp_path / "after" / "fluid_runs").iterdir()))
    assert len(result.trials) > 1
    assert not result.failures
    assert result.best.checkpoint is not None


def test_changed_lines() -> None:
    before = "a\nfor x in y:\n    f(x)\nprint(1)\n"
    assert changed_lines(before, before) == 0
    assert changed_lines(before, "a\n\ndef t():\n    for x in y:\n        f(x)\n    print(1)\n") == 1
    assert changed_lines(before, "a\nfor x in y:\n    g(x)\n    h(x)\nprint(1)\n") == 2
    assert changed_lines(before, "for x in y:\n    f(x)\nprint(1)\nz\n") == 2

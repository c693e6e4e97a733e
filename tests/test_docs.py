"""What the pages of docs/ and README.md show runs, and their links lead somewhere.

A block after the comment ``<!-- run -->``, which readers do not see, is run as it is written: Python as a script of
its own, indented commands by bash in the root of the checkout. ``<!-- run: torch -->`` names packages without which
it is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import fluid
from fluid.engine.transitions import state_diagram

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

#: Seconds after which a block is given up. Far more than any takes, as the machine may be busy.
PATIENCE = 300.0
_BLOCK = re.compile(
    r"^<!-- run(?:: (?P<packages>[\w ]+))? -->\n+(?:```python\n(?P<python>(?s:.*?))^```$|(?P<commands>(?:    .*\n)+))",
    re.MULTILINE,
)
_LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    """Something that a page says can be run."""

    page: str
    line: int
    packages: tuple[str, ...]
    python: str | None
    commands: str | None


def blocks_of(page: str, text: str) -> list[Block]:
    return [
        Block(
            page,
            text[: found.start()].count("\n") + 1,
            tuple((found["packages"] or "").split()),
            found["python"],
            None if found["commands"] is None else textwrap.dedent(found["commands"]).strip(),
        )
        for found in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page.name, page.read_text(encoding="utf-8"))]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the programs that commands name: this interpreter, and fluid as this checkout has it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = shlex.quote(sys.executable)
    for name, command in {"python": python, "fluid": f"{python} -m fluid.cli"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(block, id=f"{block.page}:{block.line}") for block in BLOCKS])
def test_what_a_page_shows_runs(block: Block, programs: Path, tmp_path: Path) -> None:
    for package in block.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),  # Run folders and what Ray Tune leaves go there.
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    if block.python is not None:
        script = tmp_path / "block.py"
        script.write_text(block.python, encoding="utf-8")
        command, folder = [sys.executable, str(script)], tmp_path
    else:
        assert block.commands is not None
        command, folder = ["bash", "-euc", block.commands], ROOT
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_mark_is_followed_by_a_block() -> None:
    marks = [mark for page in PAGES for mark in re.findall("^<!-- run", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(marks) == len(BLOCKS)


@pytest.mark.parametrize("page", ["running.md", "ray_tune.md", "optuna.md", "custom_searchers.md"])
def test_every_way_to_fluid_has_something_that_runs(page: str) -> None:
    assert [block for block in BLOCKS if block.page == page]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [found["target"] for found in _LINK.finditer(page.read_text(encoding="utf-8"))]
    files = [target for target in targets if "://" not in target]
    assert [target for target in files if not (page.parent / target).exists()] == []


def test_every_file_that_contributors_are_sent_to_exists() -> None:
    pages = [(ROOT / "CONTRIBUTING.md"), DOCS / "architecture.md"]
    named = [
        name for page in pages for name in re.findall(r"[`(]([\w/]+/[\w/.]*)[`)]", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 30
    roots = (ROOT, ROOT / "fluid", DOCS)
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_the_architecture_page_draws_the_table_of_transitions() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    drawn = page.partition("<!-- states:begin -->\n")[2].partition("<!-- states:end -->")[0]
    assert drawn == f"```mermaid\n{state_diagram()}```\n"


def test_the_site_has_every_page() -> None:
    # Whether its links and anchors hold, make docs finds out.
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    elsewhere = {"index.md", "contributing.md", "changelog.md"}
    assert sorted(listed) == sorted({page.name for page in DOCS.glob("*.md")} | elsewhere)


def test_the_api_has_every_public_name() -> None:
    entries = re.findall(r"^::: \S+\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fluid.__all__) - {"__version__"} <= set(entries)


def test_reading_blocks() -> None:
    python = "a\n\n<!-- run: torch ray -->\n```python\nx = 1\n\ny = 2\n```\n\n"
    commands = "<!-- run -->\n\n    fluid plan x\n    echo y\n\ntext\n\n    no\n"
    assert blocks_of("page", python + commands) == [
        Block("page", 3, ("torch", "ray"), "x = 1\n\ny = 2\n", None),
        Block("page", 10, (), None, "fluid plan x\necho y"),
    ]
    assert blocks_of("page", "```python\nx\n```\n\n<!-- run -->\n\nSaid, not shown.\n") == []

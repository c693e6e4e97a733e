"""What the pages of docs/ and README.md show runs, and their links lead somewhere.

A block after the comment ``<!-- run -->``, which readers do not see, is run as it is written: Python as a script of
its own, indented commands by bash in the root of the checkout. ``<!-- run: torch -->`` names packages without which
it is skipped; ``make test-integrations`` runs those that need a package of the extras loggers and frameworks.

A block of Python that is not run begins with a line for the reader, ``# Fragment: study and objective are yours.``,
which has each name that the block uses without defining it. What it takes from Fluid has to be there.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.engine.records import state_diagram

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
]

#: Seconds after which a block is given up. Far more than any takes, as the machine may be busy.
PATIENCE = 300.0
_BLOCK = re.compile(
    r"^<!-- run(?:: (?P<packages>[\w ]+))? -->\n+(?:```python\n(?P<python>(?s:.*?))^```$|(?P<commands>(?:    .*\n)+))",
    re.MULTILINE,
)
_PYTHON = re.compile(r"^(?P<mark><!-- run.*-->\n+)?```py.*\n(?P<python>(?s:.*?))^```$", re.MULTILINE)
_FRAGMENT = re.compile(r"# Fragment: (?P<said>.+\.)\n")
#: Packages that only make integrations installs, by their modules.
_FRAMEWORKS = frozenset(
    "ax hydra joblib keras lightning mlflow prometheus_client pyarrow smac tensorboard transformers wandb".split()  # noqa: SIM905
)
#: Those that take many seconds to load. CI runs the examples of each, and leaves out the blocks.
_LOAD_FOR_LONG = frozenset("ax keras lightning smac transformers".split())  # noqa: SIM905
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


def fragments_of(text: str) -> list[tuple[int, str]]:
    """Returns line and content of each block of Python that is not run."""
    return [
        (text[: found.start()].count("\n") + 1, found["python"])
        for found in _PYTHON.finditer(text)
        if found["mark"] is None
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


def param_of(block: Block) -> Any:
    needed = _FRAMEWORKS.intersection(block.packages)
    marks = [pytest.mark.frameworks(*block.packages)] if needed else []
    starts_a_cluster = block.python is not None and "TorchTrainer" in block.python
    if starts_a_cluster or _LOAD_FOR_LONG.intersection(block.packages):
        marks.append(pytest.mark.long)
    return pytest.param(block, id=f"{block.page}:{block.line}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("block", [param_of(block) for block in BLOCKS])
def test_what_a_page_shows_runs(block: Block, programs: Path, ray_folder: str, tmp_path: Path) -> None:
    for package in block.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),  # Run folders and what Ray Tune leaves go there.
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": ray_folder,
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


def faults_of(fragment: str) -> list[str]:
    """Returns what is wrong with a block of Python that is not run."""
    said = _FRAGMENT.match(fragment)
    if said is None:
        return ["neither runs (<!-- run -->) nor begins with '# Fragment: ... are yours.'"]
    tree = ast.parse(fragment)
    faults = [
        f"uses {name}, which the line Fragment does not name"
        for name in sorted(undefined_in(tree))
        if not re.search(rf"\b{name}\b", said["said"])
    ]
    return faults + list(misuses_of_fluid(tree))


def undefined_in(tree: ast.Module) -> set[str]:
    """Returns the names that are used, and that nothing in the block defines."""
    used: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                defined.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
    return used - defined


def misuses_of_fluid(tree: ast.Module) -> Iterator[str]:
    """Yields names that Fluid does not have, and calls with arguments that its functions do not take."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.partition(".")[0] == "fluid" for module in modules):
            try:
                exec(ast.unparse(node), known)
            except ImportError as error:
                if (error.name or "fluid").partition(".")[0] == "fluid":
                    yield error.msg  # Else it is an optional package that is missing here.
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := value_of(node.value, known)) is not None:
            if inspect.ismodule(owner) and not hasattr(owner, node.attr):
                yield f"{owner.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call) and callable(called := value_of(node.func, known)):
            named = {word.arg: None for word in node.keywords if word.arg is not None}
            try:
                inspect.signature(called).bind_partial(*(None for _ in node.args), **named)
            except TypeError as error:
                yield f"{ast.unparse(node.func)}: {error}"


def value_of(node: ast.expr, known: dict[str, Any]) -> Any:
    """Returns what an expression such as ``tune.run`` stands for; ``None`` if it is not Fluid's."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and inspect.ismodule(owner := value_of(node.value, known)):
        return getattr(owner, node.attr, None)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_runs_or_says_that_it_is_a_fragment(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    faults = [f"{page.name}:{line}: {fault}" for line, block in fragments_of(text) for fault in faults_of(block)]
    assert faults == []


def test_faults_of_fragments() -> None:
    assert faults_of("x = 1\n") == ["neither runs (<!-- run -->) nor begins with '# Fragment: ... are yours.'"]
    said = "# Fragment: train is yours.\n"
    assert faults_of(f"{said}import fluid\n\nfluid.run(train, {{}}, metric='loss')\n") == []
    assert faults_of(f"{said}print(train, space)\n") == ["uses space, which the line Fragment does not name"]
    (fault,) = faults_of(f"{said}from fluid import Nothing\n")
    assert fault.startswith("cannot import name 'Nothing' from 'fluid'")
    assert faults_of(f"{said}from fluid.nothing import x\n") == ["No module named 'fluid.nothing'"]
    assert faults_of(f"{said}from fluid import search\nsearch.nothing\n") == ["fluid.search has no nothing"]
    (fault,) = faults_of(f"{said}from fluid import Trial\nTrial(train, {{}}, bugdet=3)\n")
    assert "bugdet" in fault


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
    elsewhere = {"index.md", "contributing.md", "security.md", "changelog.md"}
    assert sorted(listed) == sorted({page.name for page in DOCS.glob("*.md")} | elsewhere)


def test_pages_that_tell_of_gpus_say_what_has_run_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu_note import NOTE, with_note

    pages = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    assert [name for name, text in pages.items() if with_note(name, text) != text] == [], "python scripts/gpu_note.py"
    assert {name for name, text in pages.items() if NOTE in text} >= {
        *(
            "install.md",
            "first_sweep.md",
            "devices.md",
            "gpu_sharing.md",
            "fused.md",
            "lanes.md",
            "elastic.md",
            "running.md",
        ),
        *("cluster.md", "ray_tune.md", "cli.md"),
    }
    # A page that has an older note, or that says much of GPUs without one, differs.
    assert with_note("devices.md", pages["devices.md"].replace("2026", "2025")) == pages["devices.md"]
    assert with_note("devices.md", pages["devices.md"].replace(f"{NOTE}\n", "")) == pages["devices.md"]
    assert with_note("words.md", f"# Words\n\nNothing.\n\n{NOTE}\nMore.\n") == "# Words\n\nNothing.\n\nMore.\n"


def test_the_api_has_every_public_name() -> None:
    entries = re.findall(r"^::: \S+\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fluid.__all__) - {"__version__"} <= set(entries)


def test_the_install_page_lists_the_extras() -> None:
    tomllib = pytest.importorskip("tomllib")  # Of Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `(\w+)` \| ", (DOCS / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*listed, "dev"]) == sorted(extras)


def test_the_install_page_lists_what_the_core_needs() -> None:
    tomllib = pytest.importorskip("tomllib")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (said,) = re.findall(r"^The core needs (.+?), and takes", (DOCS / "install.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(re.findall(r"`(.+?)`", said)) == sorted(re.split("[>=]", one)[0] for one in needed)


def test_the_page_for_approval_has_what_was_tested_in_the_oldest_release(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tomllib")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from tested_versions import SUBJECTS, oldest

    section = (
        (DOCS / "approval.md").read_text(encoding="utf-8").partition("## Tested versions\n")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (\w+) \| ([\d.]+): [^|]+ \| [\d.+a-z]+: [^|]+ \| [\d-]{10} \|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == [subject.name for subject in SUBJECTS.values()]
    least = {subject.name: oldest(subject).split(".") for subject in SUBJECTS.values()}
    assert [name for name, version in rows if version.split(".")[: len(least[name])] != least[name]] == []


def test_every_page_names_extras_that_exist() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = [
        (page.name, name)
        for page in PAGES
        for found in re.findall(r"(?:[./]|src|\.whl)\[([a-z,]+)\]'", page.read_text(encoding="utf-8"))
        for name in found.split(",")
    ]
    assert len(named) > 5
    assert [(page, name) for page, name in named if name not in extras] == []


def test_the_first_sweep_explains_twenty_words() -> None:
    section = (DOCS / "first_sweep.md").read_text(encoding="utf-8").partition("\n## Twenty words\n")[2]
    words = re.findall(r"^\*\*([A-Z][a-z ]+)\*\*: .+\.$", section, re.MULTILINE)
    assert len(words) == len(set(words)) == section.count("**: ") == 20
    # What pages may call things by that users of other libraries do not know.
    assert set(words) >= {
        *("Trial group", "Run folder", "Packing", "Fused trials", "Elastic trial", "Turns"),
        *("Fork", "Shared run", "Rehearsal", "Worker process"),
    }
    assert "*lane*" in section


def test_reading_blocks() -> None:
    python = "a\n\n<!-- run: torch ray -->\n```python\nx = 1\n\ny = 2\n```\n\n"
    commands = "<!-- run -->\n\n    fluid plan x\n    echo y\n\ntext\n\n    no\n"
    assert blocks_of("page", python + commands) == [
        Block("page", 3, ("torch", "ray"), "x = 1\n\ny = 2\n", None),
        Block("page", 10, (), None, "fluid plan x\necho y"),
    ]
    assert blocks_of("page", "```python\nx\n```\n\n<!-- run -->\n\nSaid, not shown.\n") == []
    assert fragments_of(python + commands) == []
    assert fragments_of("```py\nx\n```\n\n<!-- run -->\n```python\ny\n```\n") == [(1, "x\n")]

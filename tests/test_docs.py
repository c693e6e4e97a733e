"""What the pages of docs/ and README.md show runs, and their links lead somewhere.

A block after the comment ``<!-- run -->``, which readers do not see, is run as it is written: Python as a script of
its own, indented commands by bash in the root of the checkout. ``<!-- run: torch -->`` names packages without which
it is skipped; ``make test-integrations`` runs those that need a package of the extras loggers and frameworks.

Any other block of Python is a fragment. It begins with a line for the reader, ``# Fragment: study and objective are
yours.``, which has each name that the block uses without defining it; ``page_standins/PAGE.py`` defines small ones, and
both run as one script. ``<!-- fragment: lightning -->`` before it names packages.

Any other block of commands runs in an empty folder, with a finished run for ``RUN`` and stand-ins for programs that are
not Fluid's, unless ``<!-- not run: it opens a server -->`` says why it cannot.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.cli import _parser
from fluid.engine.records import state_diagram

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
]

STANDINS = ROOT / "tests" / "page_standins"

#: Seconds after which a block is given up. Far more than any takes, as the machine may be busy.
PATIENCE = 300.0
_COMMANDS = r"(?P<commands>(?:    .*\n)+)"
_BLOCK = re.compile(
    rf"^<!-- run(?:: (?P<packages>[\w ]+))? -->\n+(?:```python\n(?P<python>(?s:.*?))^```$|{_COMMANDS})",
    re.MULTILINE,
)
_PYTHON = re.compile(
    r"^(?P<mark><!-- run.*-->\n+)?(?:<!-- fragment: (?P<packages>[\w ]+) -->\n+)?```py.*\n(?P<python>(?s:.*?))^```$",
    re.MULTILINE,
)
_FRAGMENT = re.compile(r"# Fragment: (?P<said>.+\.)\n")
#: Programs that blocks of commands name. Those of Fluid and Python are real.
_REAL = frozenset({"fluid", "python"})
_PROGRAMS = _REAL | frozenset(
    "cd conda docker export git kubectl make pip pip3 python3 ray sbatch scancel scontrol squeue srun ssh uv".split()  # noqa: SIM905
)
_COMMANDS_LEFT = re.compile(rf"^(?P<mark><!-- (?:run|not run: .+) -->\n+)?(?<=\n\n){_COMMANDS}", re.MULTILINE)
#: Packages that only make integrations installs, by their modules.
_FRAMEWORKS = frozenset(
    {
        *("ax", "hydra", "joblib", "keras", "lightning", "mlflow", "prometheus_client", "pyarrow"),
        *("safetensors", "smac", "tensorboard", "transformers", "wandb"),
    }
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


def fragments_of(page: str, text: str) -> list[Block]:
    """Returns the blocks of Python that need stand-ins for what is the reader's."""
    return [
        Block(
            page,
            text[: found.start()].count("\n") + 1,
            tuple((found["packages"] or needs_of(page)).split()),
            found["python"],
            None,
        )
        for found in _PYTHON.finditer(text)
        if found["mark"] is None
    ]


def needs_of(page: str) -> str:
    """Returns the packages that a page's stand-ins need, as their first line says."""
    standins = (STANDINS / page).with_suffix(".py")
    first = standins.read_text(encoding="utf-8").partition("\n")[0] if standins.exists() else ""
    return first.removeprefix("# needs: ") if first.startswith("# needs: ") else ""


def commands_of(page: str, text: str) -> list[Block]:
    """Returns the blocks of commands that need stand-ins, or a run."""
    bare = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return [
        Block(page, bare[: found.start()].count("\n") + 1, (), None, textwrap.dedent(found["commands"]).strip())
        for found in _COMMANDS_LEFT.finditer(bare)
        if found["mark"] is None and program_of(found["commands"]) in _PROGRAMS
    ]


def program_of(command: str) -> str:
    """Returns the program that a command calls, without the variables that are set for it."""
    words = command.split()
    return next((word for word in words if not re.match(r"[A-Z_]+=", word)), "").removeprefix("$ ")


def all_of(find: Callable[[str, str], list[Block]]) -> list[Block]:
    return [block for page in PAGES for block in find(page.name, page.read_text(encoding="utf-8"))]


BLOCKS = all_of(blocks_of)
FRAGMENTS = all_of(fragments_of)
COMMANDS = all_of(commands_of)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the programs that commands name: this interpreter, and fluid as this checkout has it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = shlex.quote(sys.executable)
    for name, command in {"python": python, "fluid": f"{python} -m fluid.cli"}.items():
        (folder / name).write_text(f'#!/bin/sh\n{VIEW if name == "fluid" else ""}exec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def param_of(block: Block) -> Any:
    needed = _FRAMEWORKS.intersection(block.packages)
    marks = [pytest.mark.frameworks(*block.packages)] if needed else []
    starts_a_cluster = block.python is not None and "TorchTrainer" in block.python
    if starts_a_cluster or _LOAD_FOR_LONG.intersection(block.packages):
        marks.append(pytest.mark.long)
    return pytest.param(block, id=f"{block.page}:{block.line}", marks=marks)


def run_block(block: Block, programs: Path, folder: Path, **variables: str) -> None:
    """Runs a block with its page's stand-ins; commands in the checkout if a page says that they run as they are."""
    for package in block.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    environment = {
        **os.environ,
        "HOME": str(folder),  # Run folders and what Ray Tune leaves go there.
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    if block.python is not None:
        script = folder / "block.py"
        script.write_text(block.python, encoding="utf-8")
        command = [sys.executable, str(script)]
    else:
        assert block.commands is not None
        command = ["bash", "-euc", block.commands]
    where = ROOT if block.commands is not None and block in BLOCKS else folder
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("block", [param_of(block) for block in BLOCKS])
def test_what_a_page_shows_runs(block: Block, programs: Path, ray_folder: str, tmp_path: Path) -> None:
    run_block(block, programs, tmp_path, RAY_TMPDIR=ray_folder)


@pytest.mark.slow
@pytest.mark.parametrize("block", [param_of(block) for block in FRAGMENTS])
def test_a_fragment_runs_with_stand_ins(block: Block, programs: Path, ray_folder: str, tmp_path: Path) -> None:
    standins = (STANDINS / block.page).with_suffix(".py").read_text(encoding="utf-8")
    run_block(replace(block, python=f"{standins}\n\n{block.python}"), programs, tmp_path, RAY_TMPDIR=ray_folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, ``a`` and ``b``, of a function that ``sweep.py`` has."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "sweep.py").write_text(SWEEP)
    for name in ("a", "b"):
        subprocess.run(
            [sys.executable, "sweep.py", name], cwd=folder, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    return folder


#: What ends a page that is served until Ctrl-C: its status is 124 if it was served until then.
VIEW = """if [ "$1" = view ] && [ -z "$VIEWED" ]; then
    VIEWED=1 BROWSER=true timeout --signal=INT 4 "$0" "$@"
    [ $? = 124 ]
    exit
fi
"""
#: What stands for a new virtual environment.
VENV = 'if [ "$2" = venv ]; then mkdir -p "$3/bin" && touch "$3/bin/activate"; fi\n'
#: What stands for the reader's own sweep.py.
SWEEP = """
import sys

import fluid


def train(config, state):
    loss = 1.0 if state is None else state
    while True:
        loss *= 1 - config["lr"]
        yield {"loss": loss}, loss


if __name__ == "__main__":
    name = sys.argv[1] if sys.argv[1:] in (["a"], ["b"]) else "sweep"
    fluid.run(train, {"lr": [0.1, 0.2, 0.3, 0.4]}, metric="loss", algorithm="grid", budget=3, run_dir=name, resume=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("block", [param_of(block) for block in COMMANDS])
def test_commands_run_with_stand_ins(block: Block, programs: Path, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "fluid_runs")
    shutil.copy(runs / "sweep.py", tmp_path)
    shutil.copy(ROOT / "examples" / "script" / "train.py", tmp_path)
    for name in _PROGRAMS - _REAL - {"cd", "export"}:
        (programs / name).write_text(f"#!/bin/sh\n{VENV if name == 'python3' else ''}exit 0\n")
        (programs / name).chmod(0o755)
    (tmp_path / "fluid").mkdir()  # The checkout
    (tmp_path / "empty").mkdir()
    a, b = (str(tmp_path / "fluid_runs" / name) for name in "ab")
    (trial,) = sorted(path.name for path in (Path(a) / "trials").iterdir())[:1]
    values = {"RUN": a, "RUN_A": a, "RUN_B": b, "RUNS": str(tmp_path / "fluid_runs"), "TRIAL": trial}
    values |= {"DIR": str(tmp_path / "empty"), "FILE": str(tmp_path / "file")}
    filled = re.sub(r"\b[A-Z_]+\b(?!=)", lambda word: values.get(word[0], word[0]), block.commands or "")
    run_block(replace(block, commands=filled), programs, tmp_path, FLUID_RUNS=values["RUNS"])


def commands_named_in(text: str) -> list[str]:
    """Returns all calls of ``fluid`` and of the checkout's programs, in blocks and in sentences."""
    joined = re.sub(r" \\\n *", " ", text)
    written = re.findall(r"`((?:fluid|python3?) [^`]+)`", joined)
    return [
        *(" ".join(command.split()) for command in written),
        *re.findall(r"^ +(?:\$ )?((?:fluid|python3?) .+)$", joined, re.MULTILINE),
    ]


def faults_of_command(command: str) -> list[str]:
    """Returns the options and programs of a command that do not exist."""
    words = command.split(" -- ")[0].split("#")[0].split()
    options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    if words[0] == "fluid":
        subcommands = next(iter(_parser()._subparsers._group_actions)).choices  # type: ignore[union-attr]
        if words[1] not in subcommands:
            return [] if words[1].startswith("-") or words[1].isupper() else [f"fluid has no {words[1]}"]
        known = set(subcommands[words[1]]._option_string_actions)
        return [f"{command}: no {option}" for option in sorted(options - known)]
    program = ROOT / words[1]
    if words[1].split("/")[0] not in {"benchmarks", "examples", "scripts"}:
        return []
    if not program.exists():
        return [f"{command}: no {words[1]}"]
    source = "".join(path.read_text(encoding="utf-8") for path in program.parent.glob(f"{program.stem}*.py"))
    # Some programs make several options in a loop over their names.
    known = {
        option for option in options if f'"{option}"' in source or ('f"--{' in source and f'"{option[2:]}"' in source)
    }
    return [f"{command}: no {option}" for option in sorted(options - known)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_named_exists(page: Path) -> None:
    commands = commands_named_in(page.read_text(encoding="utf-8"))
    assert [fault for command in commands for fault in faults_of_command(command)] == []


def test_faults_of_commands() -> None:
    text = "Run `fluid report\nRUN --json` or:\n\n    fluid repot RUN\n    python benchmarks/planner.py \\\n"
    text += "        --never\n"
    commands = commands_named_in(text)
    assert commands == ["fluid report RUN --json", "fluid repot RUN", "python benchmarks/planner.py --never"]
    assert [fault for command in commands for fault in faults_of_command(command)] == [
        "fluid has no repot",
        "python benchmarks/planner.py --never: no --never",
    ]


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
    faults = [
        f"{page.name}:{block.line}: {fault}"
        for block in fragments_of(page.name, text)
        for fault in faults_of(block.python or "")
    ]
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


@pytest.mark.parametrize("page", ["trainables.md", "ray_tune.md", "optuna.md", "searchers.md"])
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
    assert sorted(listed) == sorted({page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | elsewhere)


def test_pages_that_tell_of_gpus_say_what_has_run_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu_note import NOTE, with_note

    pages = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    assert [name for name, text in pages.items() if with_note(text) != text] == [], "python scripts/gpu_note.py"
    assert {name for name, text in pages.items() if NOTE in text} >= {"first_sweep.md", "devices.md"}
    # A page that has an older note, or that says much of GPUs without one, differs.
    assert with_note(pages["devices.md"].replace(NOTE, NOTE.replace("2026", "2025"))) == pages["devices.md"]
    assert with_note(pages["devices.md"].replace(f"{NOTE}\n", "")) == pages["devices.md"]
    assert with_note(f"# Words\n\nNothing.\n\n{NOTE}\nMore.\n") == "# Words\n\nNothing.\n\nMore.\n"


def test_the_api_has_every_public_name() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    entries = re.findall(r"^::: \S+\.(\w+)$", pages, re.MULTILINE)
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


#: Who develops Fluid reads these; all other pages are for its users.
FOR_DEVELOPERS = {"architecture.md", "benchmarks.md", "extending.md", "theory.md"}
BOOK = sorted(DOCS.glob("*.md"))
FOR_USERS = [ROOT / "README.md", *(page for page in BOOK if page.name not in FOR_DEVELOPERS)]
#: Words that only Fluid's developers know. As an option's name, in code, they may stand anywhere.
PRIVATE = re.compile(
    r"\b(cohorts?|gangs?|residents?|knees?|stalls?|stalled|quant(?:um|a)|spare lanes?|profile keys?"
    r"|follow-up iterations?|alpha|beta|epsilon|makespans?|lanes? of|fused packs?|retire[sd]?|retiring|guardians?"
    r"|fork servers?|slots?|fusion keys?|dead rows?|widen(?:s|ed|ing)?|refiners?|rollouts?)\b",
    re.IGNORECASE,
)
#: What readers had to read twice.
READ_TWICE = (
    "makes the sweep you have finish sooner",
    "makes one of a PyTorch script by changing six",
    "in times of Fluid's",
    "Fluid without one of its means",
    "and all that takes `n_jobs`, on lanes",
    "is warned of, with the metrics that there are",
    "To use both logs everything twice",
    "for which there is no room yet",
    "What pays for the whole key is taken to pay for it",
    "one that may be the only one for a trial stays",
    "threads of OpenMP that wait for work sleep",
    "trials are planned as ever",
    "What it leaves is what Hydra's basic launcher leaves",
    "earlier and better iterations of other trials are lost",
    "the refiner's rollout is of continuous work",
    "see the other pages on frameworks",
    "It never guesses",
)


def prose_of(text: str) -> str:
    """Returns a page without code, comments, links' targets and line breaks."""
    bare = re.sub(
        r"^```(?s:.*?)^```$|^    .*$|^> \*\*What has run.*\n(?:>.*\n)*|<!--(?s:.*?)-->", "", text, flags=re.MULTILINE
    )
    return " ".join(re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", bare).split())


def test_prose_goes_on_behind_notes_code_and_comments() -> None:
    text = "a\n\n> **What has run on a GPU:** x\n> b\n\nc\n\n    cd\n\n```py\n\ny\n```\n\n<!-- z\nz -->\nd `e` [f](g)\n"
    assert prose_of(text) == "a c d [f"


def test_the_book_is_short() -> None:
    assert len(BOOK) <= 26
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in BOOK}
    assert sum(words.values()) <= 45_000, words
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: page.name)
def test_pages_for_users_have_no_private_words(page: Path) -> None:
    prose = prose_of(page.read_text(encoding="utf-8"))
    assert [prose[max(0, found.start() - 40) : found.end() + 20] for found in PRIVATE.finditer(prose)] == []
    # A lane is told as what it is before it is called so.
    lane, explained = prose.find("lane"), prose.lower().find("worker process")
    assert lane == -1 or 0 <= explained < lane, prose[max(0, lane - 60) : lane + 40]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_has_to_be_read_twice(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert [sentence for sentence in READ_TWICE if sentence in text] == []


@pytest.mark.parametrize("page", FOR_USERS[1:], ids=lambda page: page.name)
def test_figures_stand_on_the_page_of_benchmarks(page: Path) -> None:
    text = re.sub(r"^> \*\*What has run.*\n(?:>.*\n)*", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.findall(r"python benchmarks/\S+|shared CPU cores|\b\d+(?:\.\d+)? times as (?:long|fast|many)", text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_state_is_taken_for_none(page: Path) -> None:
    # An array has no truth value, and 0 is a state like any other.
    assert re.findall(r"\bstate or\b.*", "\n".join(code_of(page.read_text(encoding="utf-8")))) == []


def test_no_program_takes_a_state_for_none() -> None:
    programs = [
        path for room in ("benchmarks", "examples", "fluid", "integrations") for path in ROOT.glob(f"{room}/**/*.py")
    ]
    found = re.compile(r"= state or\b|\(state or\b")
    assert [str(path.relative_to(ROOT)) for path in programs if found.search(path.read_text(encoding="utf-8"))] == []


def code_of(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_reading_blocks() -> None:
    python = "a\n\n<!-- run: torch ray -->\n```python\nx = 1\n\ny = 2\n```\n\n"
    commands = "<!-- run -->\n\n    fluid plan x\n    echo y\n\ntext\n\n    no\n"
    assert blocks_of("page", python + commands) == [
        Block("page", 3, ("torch", "ray"), "x = 1\n\ny = 2\n", None),
        Block("page", 10, (), None, "fluid plan x\necho y"),
    ]
    assert blocks_of("page", "```python\nx\n```\n\n<!-- run -->\n\nSaid, not shown.\n") == []
    assert fragments_of("page", python + commands) == []
    two = "```py\nx\n```\n\n<!-- run -->\n```python\ny\n```\n\n<!-- fragment: ray -->\n```python\nz\n```\n"
    assert fragments_of("page", two) == [
        Block("page", 1, (), "x\n", None),
        Block("page", 10, ("ray",), "z\n", None),
    ]
    more = "a\n\n<!-- run -->\n\n    fluid x\n\na\n\n    N=1 fluid y RUN\n    cd z\n\n    h(w) = 1\n\n"
    more += "<!-- not run: it opens a server -->\n\n    fluid view\n\n```text\n\n    fluid z\n```\n"
    assert commands_of("page", more) == [Block("page", 9, (), None, "N=1 fluid y RUN\ncd z")]

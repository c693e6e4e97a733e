"""Checks who imports whom, from the source of every module in fluid/ and integrations/.

The checks are plain functions over a mapping of module name to imports, so that the second half of this file
can show on small bad examples that each of them fails when it should.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Layer:
    """One row of the table: the modules matched by the patterns, and what they may import.

    A pattern is a module name, or that of a package, which matches everything in it.
    """

    level: int
    patterns: tuple[str, ...]
    #: Third-party packages allowed, by top-level name.
    packages: frozenset[str] = frozenset()

    def matches(self, module: str) -> bool:
        return any(is_in(module, pattern) for pattern in self.patterns)


def layer(level: int, modules: str, packages: str = "") -> Layer:
    return Layer(level, tuple(f"fluid.{name}" for name in modules.split()), frozenset(packages.split()))


# A package imports itself and packages of lower levels. A new package is added here, in the lowest level it can have.
# The package fluid itself has no level: see check_facade.
LAYERS = (
    layer(0, "errors checksums few_items _version _experimental _logs _private_files _late_imports _given_executor"),
    layer(0, "random_state user_values given_fields"),
    layer(1, "_clock _imports directions keeping resources search_shape user_calls"),
    layer(1, "trial_fields wire", "msgspec"),
    layer(2, "waiting trialgroup"),
    layer(2, "trainables", "cloudpickle ray msgspec"),
    layer(2, "processes"),
    layer(2, "search", "numpy optuna"),
    layer(3, "joint", "msgspec"),
    layer(3, "gpu", "pynvml"),
    layer(3, "elastic", "numpy cloudpickle torch horovod ray"),
    layer(3, "measure", "numpy msgspec"),
    layer(4, "mps"),
    layer(4, "fused", "numpy torch cloudpickle safetensors triton"),
    layer(4, "devices", "numpy"),
    layer(5, "planners", "numpy msgspec"),
    layer(5, "static_fluid dynamic_fluid", "numpy"),
    layer(6, "sizing", "numpy"),
    layer(6, "shared_data", "cloudpickle torch"),
    layer(7, "engine", "numpy msgspec"),
    layer(7, "scripts", "tensorboard yaml sitecustomize"),
    layer(8, "policies", "numpy msgspec"),
    layer(8, "lane", "numpy torch msgspec"),
    layer(9, "forecasting", "numpy"),
    layer(9, "packing"),
    layer(10, "backends.base"),
    layer(9, "results", "pandas msgspec"),
    layer(11, "backends.simulated"),
    layer(11, "backends.hosts", "msgspec"),
    layer(12, "simulation", "numpy"),
    layer(12, "testing", "numpy msgspec"),
    layer(12, "backends.lanes", "msgspec"),
    layer(13, "rehearsal", "numpy onnxruntime pyarrow sklearn ConfigSpace ray"),
    layer(13, "backends.local"),
    layer(13, "backends.ray", "ray msgspec"),
    layer(14, "session", "msgspec"),
    layer(15, "display", "rich IPython"),
    layer(15, "loggers", "tensorboard mlflow wandb pyarrow prometheus_client"),
    layer(16, "reports", "numpy rich matplotlib plotly optuna sklearn"),
    layer(16, "executor"),
    layer(19, "commands", "rich"),
    layer(20, "cli"),
    layer(17, "tune"),
    layer(17, "sweeping"),
    layer(18, "sweep"),
    layer(18, "integrations.ray_tune", "numpy ray pyarrow"),
    layer(18, "integrations.hpbandster", "numpy hpbandster ConfigSpace"),
    layer(18, "integrations.optuna", "numpy cloudpickle optuna"),
    layer(19, "integrations.lightning", "lightning pytorch_lightning torch"),
    layer(19, "integrations.transformers", "transformers cloudpickle optuna"),
    layer(19, "integrations.keras", "keras numpy"),
    layer(19, "integrations.boosting", "numpy"),
    layer(20, "integrations.xgboost", "xgboost numpy"),
    layer(20, "integrations.lightgbm", "lightgbm numpy sklearn"),
    layer(19, "integrations.sklearn", "sklearn joblib numpy"),
    layer(19, "integrations.joblib", "joblib"),
    layer(19, "integrations.hydra", "hydra omegaconf"),
    layer(19, "integrations.comparing"),
    layer(3, "integrations.ax", "ax"),
    layer(3, "integrations.smac", "smac"),
    layer(18, "integrations backends"),
)
#: A record whose methods draw it: it reaches up to what draws, in functions only. See check_drawing.
DRAWN, DRAWS = "fluid.results.sweep", "fluid.reports"
#: The paper's planners have names of their own in fluid/, and are of the package planners all the same.
OF_PACKAGE = {"fluid.static_fluid": "fluid.planners", "fluid.dynamic_fluid": "fluid.planners"}
#: Modules that are in no package: the doors, the paper's names, and what everything stands on.
LOOSE = {
    *("__init__", "_version", "_clock", "_imports", "_logs", "_private_files", "_late_imports"),
    *("_given_executor", "_experimental", "checksums", "directions", "errors", "few_items", "given_fields", "keeping"),
    *("packing", "random_state", "resources", "search_shape", "trial_fields", "trialgroup", "user_values"),
    "user_calls",
    *("static_fluid", "dynamic_fluid", "mps", "executor", "sweep", "tune", "cli", "wire"),
}
#: Modules that may import less than their package: they are loaded where nothing heavy must be.
LIGHT = (
    layer(0, "elastic.members.controller elastic.messages elastic.groups.make lane.policy"),
    layer(0, "wire lane.protocol", "msgspec"),
    layer(0, "elastic.run trainables.trainable trainables.pickling", "cloudpickle"),
    layer(0, "trainables.resident display.format display.palette"),
    layer(0, "backends.simulated tune"),
    layer(0, "executor", "typing_extensions"),
)


@dataclass(frozen=True)
class Import:
    """One import of a module.

    Attributes:
        target: dotted name of what is imported; starts with a dot if the import is relative.
        when: "load" (runs when the module is imported), "lazy" (inside a function) or "typing" (under
            ``if TYPE_CHECKING``, never runs).
        line: line number.
    """

    target: str
    when: str = "load"
    line: int = 0


Imports = Mapping[str, Sequence[Import]]
Check = Callable[[Imports], list[str]]


# --- Reading the source


def source_files(root: Path) -> dict[str, Path]:
    """Module name to file, for fluid/ and integrations/ (under the name it is shipped as)."""
    files = {}
    for folder, package in (("fluid", "fluid"), ("integrations", "fluid.integrations")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if folder == "fluid" and parts[0] == "integrations":
                continue  # The link: the files are found under their real folder.
            names = parts[:-1] if parts[-1] == "__init__" else parts
            files[".".join((package, *names))] = path
    return files


def read_imports(tree: ast.Module, modules: set[str]) -> list[Import]:
    """Every import in the tree; ``from a import b`` is an import of ``a.b`` if that is one of ``modules``."""
    found = []
    for node, when in _walk(tree, "load"):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = sorted({name if name in modules else base for name in names})
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                targets = [argument.value]
        found += [Import(target, when, node.lineno) for target in targets]
    return found


def read_calendar_clocks(tree: ast.Module) -> list[int]:
    """Lines that read the clock through datetime: ``datetime.now``, ``datetime.utcnow``, ``date.today``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("now", "utcnow", "today")
        and _last_name(node.value) in ("datetime", "date")
    ]


def _walk(node: ast.AST, when: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        inner = when
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and when == "load":
            inner = "lazy"
        elif isinstance(child, ast.If) and _last_name(child.test) == "TYPE_CHECKING":
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), "typing")
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), when)
            continue
        if isinstance(child, (ast.stmt, ast.expr)):
            yield child, inner
        yield from _walk(child, inner)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _called_name(node: ast.Call) -> str:
    return _last_name(node.func)


# --- The checks
# Each takes the mapping and returns what is wrong, one line per offence.


def layer_of(module: str) -> Layer | None:
    return next((row for row in LAYERS if row.matches(module)), None)


def package_of(module: str) -> str:
    """The package of a module as the table has it; a module that is loose in fluid/ is one by itself."""
    if module in OF_PACKAGE:
        return OF_PACKAGE[module]
    names = module.split(".")
    return ".".join(names[: 3 if names[1:2] in (["backends"], ["integrations"]) else 2])


def is_ours(target: str) -> bool:
    return target == "fluid" or target.startswith("fluid.")


def is_in(target: str, package: str) -> bool:
    return f"{target}.".startswith(f"{package}.")


def check_known(imports: Imports) -> list[str]:
    return [
        f"{module} is in no layer: add it to LAYERS in tests/test_layering.py"
        for module in imports
        if module != "fluid" and layer_of(module) is None
    ]


def check_downward(imports: Imports) -> list[str]:
    """A module imports its own package and those of lower levels, whenever the import runs."""
    wrong = []
    for module, found in imports.items():
        mine = layer_of(module)
        for imported in found:
            if is_in(imported.target, "fluid.integrations") or package_of(imported.target) == package_of(module):
                continue  # One module may reach up to the integrations: see check_integrations.
            if module == DRAWN and is_in(imported.target, DRAWS):
                continue
            theirs = layer_of(imported.target)
            if mine and theirs and theirs.level >= mine.level:
                where = f"{module}:{imported.line} (level {mine.level})"
                wrong.append(f"{where} imports {imported.target} (level {theirs.level})")
    return wrong


def check_packages(imports: Imports) -> list[str]:
    """Besides the standard library, a module imports only what its row of the table names."""
    wrong = []
    for module, found in imports.items():
        mine = next((row for row in LIGHT if row.matches(module)), layer_of(module))
        allowed = mine.packages if mine else frozenset()
        for imported in found:
            package = imported.target.split(".")[0]
            if package and package != "fluid" and package not in sys.stdlib_module_names | allowed:
                wrong.append(f"{module}:{imported.line} may not import {package}")
    return wrong


def check_loose(imports: Imports) -> list[str]:
    """Modules are in packages; only the doors, the paper's names and the lowest ones are loose in fluid/."""
    packages = {module.rpartition(".")[0] for module in imports}
    return [
        f"{module} is loose in fluid/: it belongs in a package"
        for module in imports
        if module.count(".") == 1 and module not in packages and module.removeprefix("fluid.") not in LOOSE
    ]


def check_facade(imports: Imports) -> list[str]:
    """The package fluid loads its names on first use, and only those outside fluid/ get them from there."""
    wrong = [
        f"fluid:{imported.line} imports {imported.target} at once; it may do so in a function only"
        for imported in imports.get("fluid", ())
        if is_ours(imported.target) and imported.when == "load" and imported.target != "fluid._version"
    ]
    for module, found in imports.items():
        if not is_in(module, "fluid.integrations"):
            wrong += [
                f"{module}:{imported.line} imports from fluid; name the module that defines it"
                for imported in found
                if imported.target == "fluid"
            ]
    return wrong


def check_backends(imports: Imports) -> list[str]:
    """Backends know what they share, never each other."""
    backends = [f"fluid.backends.{name}" for name in ("simulated", "local", "ray")]
    return [
        f"{module}:{imported.line} imports its sibling {imported.target}"
        for module, found in imports.items()
        if package_of(module) in (*backends, "fluid.backends.lanes")
        for imported in found
        if package_of(imported.target) in backends and package_of(imported.target) != package_of(module)
    ]


def check_integrations(imports: Imports) -> list[str]:
    """Only fluid.tune and fluid.commands.comparing reach up to the integrations, and only inside a function."""
    return [
        f"{module}:{imported.line} imports {imported.target}; only fluid.tune may, in a function"
        for module, found in imports.items()
        if not is_in(module, "fluid.integrations")
        for imported in found
        if is_in(imported.target, "fluid.integrations")
        and (module not in ("fluid.tune", "fluid.commands.comparing") or imported.when == "load")
    ]


def check_drawing(imports: Imports) -> list[str]:
    """What a sweep is drawn by is loaded when it is drawn."""
    return [
        f"{module}:{imported.line} imports {imported.target} at once; it may do so in a function only"
        for module, found in imports.items()
        for imported in found
        if module == DRAWN and is_in(imported.target, DRAWS) and imported.when == "load"
    ]


def check_clock(imports: Imports) -> list[str]:
    """Time is read in one module; chance comes from seeded numpy generators. Suites for others draw and wait freely."""
    allowed = {"time": "fluid._clock", "random": None}
    return [
        f"{module}:{imported.line} imports {imported.target}"
        for module, found in imports.items()
        for imported in found
        if imported.target in allowed and module != allowed[imported.target] and not is_in(module, "fluid.testing")
    ]


def check_absolute(imports: Imports) -> list[str]:
    return [
        f"{module}:{imported.line} has a relative import"
        for module, found in imports.items()
        for imported in found
        if imported.target.startswith(".")
    ]


def check_cycles(imports: Imports) -> list[str]:
    """No module needs itself, whether an import runs at once, later or never."""
    needs = {
        module: sorted({imported.target for imported in found} & imports.keys()) for module, found in imports.items()
    }
    wrong = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            wrong.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for needed in needs[module]:
                visit(needed, [*path, module])
            done.add(module)

    for module in needs:
        visit(module, [])
    return wrong


CHECKS = [
    check_known,
    check_downward,
    check_packages,
    check_loose,
    check_facade,
    check_backends,
    check_integrations,
    check_drawing,
    check_clock,
    check_absolute,
    check_cycles,
]


# --- The real source

FILES = source_files(ROOT)
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}
IMPORTS = {module: read_imports(tree, set(FILES)) for module, tree in TREES.items()}


@pytest.mark.parametrize("check", CHECKS)
def test_source(check: Check) -> None:
    assert check(IMPORTS) == []


def test_no_calendar_clock() -> None:
    assert {module: lines for module, tree in TREES.items() if (lines := read_calendar_clocks(tree))} == {}


def test_the_source_was_found() -> None:
    assert {"fluid", "fluid._clock", "fluid.backends", "fluid.integrations"} <= FILES.keys()
    assert Import("fluid.errors") in [Import(i.target, i.when) for i in IMPORTS["fluid._clock"]]
    assert not any("integrations" in path.parts[-2:] and path.is_symlink() for path in FILES.values())


def test_the_architecture_page_has_the_same_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = {
        (int(level), f"fluid.{name}", frozenset(re.findall(r"\w+", packages)))
        for level, row in re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
        for name, packages in re.findall(r"`([\w.]+)`(?: \(([\w, ]+)\))?", row)
    }
    namespaces = {"fluid.integrations", "fluid.backends"}
    table = {(row.level, name, row.packages) for row in LAYERS for name in row.patterns if name not in namespaces}
    assert listed == table


def test_the_files_of_the_core_have_what_the_architecture_page_names() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The core in an hour\n")[2].partition("\n## ")[0]
    items = re.findall(r"^\d+\. `(fluid/[\w/]+\.py)`(.*(?:\n   .*)*)", section, re.MULTILINE)
    assert len(items) > 15
    missing = []
    for path, text in items:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        missing += [(path, name) for name in re.findall(r"`(\w+)`", text) if name not in defined]
    assert missing == []


# --- The checks can fail

LAZY_TORCH = Import("torch", "lazy")
BAD = [
    (check_known, {"fluid.surprise": []}),
    (check_known, {"fluid.backend.local": []}),
    (check_downward, {"fluid.errors": [Import("fluid.planners.instance")]}),
    (check_downward, {"fluid.planners.portfolio": [Import("fluid.engine.engine", "lazy")]}),
    (check_downward, {"fluid.engine.engine": [Import("fluid.backends.base", "typing")]}),
    (check_downward, {"fluid.policies.waits": [Import("fluid.backends.base")]}),
    (check_downward, {"fluid.engine.core": [Import("fluid.policies.waits", "typing")]}),
    (check_downward, {"fluid.backends.local": [Import("fluid.executor")]}),
    (check_downward, {"fluid.executor": [Import("fluid.cli")]}),
    (check_downward, {"fluid.errors": [Import("fluid.planners.portfolio", "typing")]}),
    (check_packages, {"fluid.trialgroup": [Import("numpy")]}),
    (check_packages, {"fluid.planners.portfolio": [Import("scipy.optimize")]}),
    (check_packages, {"fluid.engine.engine": [LAZY_TORCH]}),
    (check_packages, {"fluid": [LAZY_TORCH]}),
    (check_packages, {"fluid.lane.protocol": [LAZY_TORCH]}),
    (check_loose, {"fluid.surprise": []}),
    (check_loose, {"fluid.lane_messages": [], "fluid.lane.serve": []}),
    (check_packages, {"fluid.backends.local": [Import("ray")]}),
    (check_packages, {"fluid.tune": [Import("ray.tune", "lazy")]}),
    (check_packages, {"fluid.integrations.optuna": [Import("ray")]}),
    (check_packages, {"fluid.cli": [Import("matplotlib.pyplot", "typing")]}),
    (check_facade, {"fluid": [Import("fluid.planners.portfolio")]}),
    (check_facade, {"fluid.cli": [Import("fluid", "lazy")]}),
    (check_downward, {"fluid.backends.base": [Import("fluid.backends.local")]}),
    (check_downward, {"fluid.backends.lanes.pool": [Import("fluid.backends.local", "typing")]}),
    (check_downward, {"fluid.backends.local": [Import("fluid.backends.ray", "lazy")]}),
    (check_backends, {"fluid.backends.local": [Import("fluid.backends.ray.launcher", "lazy")]}),
    (check_backends, {"fluid.backends.ray.backend": [Import("fluid.backends.simulated")]}),
    (check_integrations, {"fluid.tune": [Import("fluid.integrations.ray_tune")]}),
    (check_integrations, {"fluid.executor": [Import("fluid.integrations", "lazy")]}),
    (check_integrations, {"fluid": [Import("fluid.integrations", "lazy")]}),
    (check_integrations, {"fluid.cli": [Import("fluid.integrations.optuna.sampler", "lazy")]}),
    (check_drawing, {"fluid.results.sweep": [Import("fluid.reports.plots.drawing")]}),
    (check_downward, {"fluid.results.tables": [Import("fluid.reports.plots.drawing", "lazy")]}),
    (check_clock, {"fluid.executor": [Import("time")]}),
    (check_clock, {"fluid._clock": [Import("random", "lazy")]}),
    (check_absolute, {"fluid.cli": [Import(".portfolio")]}),
    (check_cycles, {"fluid.a": [Import("fluid.a")]}),
    (check_cycles, {"fluid.a": [Import("fluid.b", "lazy")], "fluid.b": [Import("fluid.a", "typing")]}),
    (check_cycles, {"fluid.a": [Import("fluid.b")], "fluid.b": [Import("fluid.a")]}),
]
GOOD = {
    "fluid": [Import("importlib"), Import("fluid._version"), Import("fluid.planners.portfolio", "typing")],
    "fluid._version": [],
    "fluid._clock": [Import("time"), Import("fluid.errors")],
    "fluid.errors": [Import("sys")],
    "fluid.planners.portfolio": [Import("numpy.typing"), Import("fluid.planners.bounds"), Import("fluid.trialgroup")],
    "fluid.elastic.groups.group": [Import("torch.distributed"), Import("horovod.torch", "lazy")],
    "fluid.backends.ray": [Import("ray"), Import("fluid.backends.base"), Import("fluid.lane.serve")],
    "fluid.backends.local": [Import("fluid.backends.hosts.host"), Import("fluid.backends.base")],
    "fluid.executor": [Import("fluid.backends.local", "lazy")],
    "fluid.results.sweep": [Import("fluid.reports.plots.drawing", "lazy"), Import("fluid.results.best")],
    "fluid.tune": [Import("fluid.integrations.ray_tune", "lazy")],
    "fluid.integrations.ray_tune.runner": [Import("fluid"), Import("ray.tune"), Import("fluid.executor")],
}


@pytest.mark.parametrize(("check", "imports"), BAD)
def test_a_bad_example_is_refused(check: Check, imports: Imports) -> None:
    assert len(check(imports)) == 1


@pytest.mark.parametrize("check", CHECKS)
def test_a_good_example_passes(check: Check) -> None:
    assert check(GOOD) == []


def test_every_check_has_a_bad_example() -> None:
    assert {check for check, _ in BAD} == set(CHECKS)


def test_a_cycle_is_spelled_out() -> None:
    imports = {"fluid.a": [Import("fluid.b")], "fluid.b": [Import("fluid.c")], "fluid.c": [Import("fluid.b")]}
    assert check_cycles(imports) == ["fluid.b -> fluid.c -> fluid.b"]


SAMPLE = """
import os.path, time
from typing import TYPE_CHECKING
from fluid.backends import base, local_helper
from . import sibling
try:
    import json
except ImportError:
    json = None
if TYPE_CHECKING:
    from fluid.planners.instance import Instance
else:
    import numpy
class A:
    import math
    def f(self):
        import torch
        if TYPE_CHECKING:
            import typing
        return importlib.import_module("ray.tune"), importlib.import_module(name)
with try_import("x", extra="y"):
    import matplotlib
late = lambda: __import__("random")
"""


def test_reading_imports() -> None:
    found = {(i.target, i.when) for i in read_imports(ast.parse(SAMPLE), {"fluid.backends.base"})}
    assert found == {
        ("os.path", "load"),
        ("time", "load"),
        ("typing", "load"),
        ("fluid.backends.base", "load"),
        ("fluid.backends", "load"),
        (".", "load"),
        ("json", "load"),
        ("fluid.planners.instance", "typing"),
        ("numpy", "load"),
        ("math", "load"),
        ("torch", "lazy"),
        ("typing", "typing"),
        ("ray.tune", "lazy"),
        ("matplotlib", "load"),
        ("random", "lazy"),
    }


def test_reading_calendar_clocks() -> None:
    sample = "datetime.datetime.now()\ndate.today()\nclock.now()\nself.clock.now()\ndatetime.max\n"
    assert read_calendar_clocks(ast.parse(sample)) == [1, 2]


def test_source_files_names_modules_as_shipped(tmp_path: Path) -> None:
    for name in ("fluid/__init__", "fluid/reports/table", "integrations/__init__", "integrations/x/y"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "fluid/integrations").symlink_to("../integrations")
    files = source_files(tmp_path)
    assert set(files) == {"fluid", "fluid.reports.table", "fluid.integrations", "fluid.integrations.x.y"}
    assert files["fluid.integrations.x.y"] == tmp_path / "integrations/x/y.py"

"""Every public name has an example in its docstring, and it runs.

Public names are those that docs/api lists, and those in the ``__all__`` of a package.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Packages that a name's module needs, by the start of its name.
NEEDS = {
    "fluid.backends.ray": "ray",
    "fluid.elastic": "torch",
    "fluid.fused": "torch",
    "fluid.fused.lora_files": "safetensors",
    "fluid.integrations.hpbandster": "ConfigSpace",
    "fluid.integrations.optuna": "optuna",
    "fluid.integrations.ray_tune": "ray",
}
#: The same for frameworks, whose examples make test-integrations runs.
FRAMEWORKS = {
    "fluid.integrations.ax": "ax",
    "fluid.integrations.joblib": "joblib",
    "fluid.integrations.keras": "keras",
    "fluid.integrations.lightgbm": "lightgbm",
    "fluid.integrations.lightning": "lightning",
    "fluid.integrations.sklearn": "sklearn",
    "fluid.integrations.smac": "smac",
    "fluid.integrations.transformers": "transformers",
    "fluid.integrations.xgboost": "xgboost",
    "fluid.loggers.mlflow": "mlflow",
    "fluid.loggers.parquet.Parquet": "pyarrow",
    "fluid.loggers.tensorboard": "tensorboard",
    "fluid.loggers.wandb": "wandb",
}


def listed_in_docs() -> list[str]:
    # files.md tells of functions whose JSON is public; they themselves are not.
    names = sorted(page for page in (ROOT / "docs" / "api").glob("*.md") if page.name != "files.md")
    pages = "".join(page.read_text(encoding="utf-8") for page in names)
    return re.findall(r"^::: (\S+)$", pages, re.MULTILINE)


def listed_in_packages() -> Iterator[str]:
    for folder, package in (("fluid", "fluid"), ("integrations", "fluid.integrations")):
        for path in sorted((ROOT / folder).rglob("__init__.py")):
            if "integrations" in path.relative_to(ROOT / folder).parts:
                continue  # A link to integrations/, which has its own turn.
            inner = ".".join((package, *path.relative_to(ROOT / folder).parent.parts))
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
                    yield from (f"{inner}.{name}" for name in ast.literal_eval(node.value) if name != "__version__")


def _without_twins(names: list[str]) -> list[str]:
    """Leaves out names of packages that the docs list by the module that defines them."""
    found: dict[tuple[str, str], str] = {}
    for name in names:
        found.setdefault((name.split(".")[-1], _shared_part(name)), name)
    return sorted(found.values())


def _shared_part(name: str) -> str:
    return ".".join(name.split(".")[:3]) if name.startswith("fluid.integrations.") else "fluid"


PUBLIC = _without_twins([*listed_in_docs(), *listed_in_packages()])


def examples_of(name: str, what: Any) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(recurse=False).find(what, name, globs={"__name__": "__main__"})
    return [test for test in found if test.examples]


def look_up(name: str) -> Any:
    for start, package in {**NEEDS, **FRAMEWORKS}.items():
        if name.startswith(start):
            pytest.importorskip(package)
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


#: Its example starts a Ray cluster.
ON_RAY = "fluid.backends.ray.RayBackend"


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name == ON_RAY:
        return [pytest.mark.ray, pytest.mark.slow]
    return [pytest.mark.frameworks(package) for start, package in FRAMEWORKS.items() if name.startswith(start)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # What frameworks warn of among themselves is no fault of an example.
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in PUBLIC])
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.chdir(tmp_path)
    # Lanes need not load what other tests have imported here, such as PyTorch.
    monkeypatch.setattr("fluid.backends.local._LIKELY", ())
    tests = examples_of(name, look_up(name))
    assert tests, "every public name has an example"
    for test in tests:
        printed: list[str] = []
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
        assert not failed, "".join(printed)


def test_an_example_that_fails_is_found() -> None:
    def wrong() -> None:
        """Says one thing.

        Example:
            >>> 1 + 1
            3
        """

    (test,) = examples_of("wrong", wrong)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1
    assert not examples_of("none", lambda: None)

"""What a trainable imports."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy import linalg

from fluid.trainables.import_scan import ImportScan, imports_of


class Uses:
    size = numpy.float64(3)

    def setup(self, config: dict[str, Any]) -> None:
        import cloudpickle

        self.pickle = cloudpickle
        helper()

    @staticmethod
    def fixed() -> float:
        return math.pi

    @property
    def norm(self) -> Any:
        return linalg.norm

    def step(self) -> dict[str, Any]:
        return {"x": json.dumps(1)}


def helper() -> None:
    def nested() -> None:
        import rich.table  # noqa: F401

    nested()


def test_imports_are_found_in_code_that_is_not_run() -> None:
    found = imports_of(Uses)
    assert {"cloudpickle", "rich.table", "numpy.linalg"} <= set(found)
    assert not {"json", "math", "fluid", "__main__", "builtins"} & set(found)
    assert found == sorted(found)


def test_imports_of_functions_and_partials() -> None:
    assert "rich.table" in imports_of(helper)
    assert "rich.table" in imports_of(functools.partial(helper))
    assert imports_of(len) == []


def test_imports_of_a_package_are_also_what_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package := tmp_path / "written_package").mkdir()
    for name in ("__init__", "part", "other"):
        (package / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def uses() -> Any:
        import written_package

        return written_package.part.anything

    found = [name for name in imports_of(uses) if name.startswith("written")]
    assert found == ["written_package", "written_package.part"]
    assert "written_package" not in sys.modules


def test_what_ray_puts_around_a_trainable_is_looked_through_and_not_read() -> None:
    def wrapped(self: Any) -> Any:
        import rich.panel  # noqa: F401

        return helper

    wrapped.__module__ = "ray.tune.trainable.util"
    around = type("Around", (Uses,), {"__module__": "ray.tune.trainable.util", "run": wrapped})
    found = imports_of(around)
    assert {"cloudpickle", "rich.table", "numpy.linalg"} <= set(found)
    assert "rich.panel" not in found


def test_a_function_that_ray_made_a_class_of_is_found() -> None:
    def users() -> None:
        import rich.table  # noqa: F401

    def runs(self: Any) -> Any:
        return users()

    users.__module__, runs.__module__ = "__main__", "ray.tune.trainable.function_trainable"
    assert "rich.table" in imports_of(type("Runs", (), {"__module__": runs.__module__, "step": runs}))


def test_a_trainable_made_of_an_elastic_one_is_looked_through() -> None:
    module = "fluid.elastic.tune"
    assert "rich.table" in imports_of(type("Made", (), {"__module__": module, "fluid_elastic_class": Uses}))


def test_nothing_below_a_module_of_the_interpreter_is_taken_for_a_module() -> None:
    def uses() -> Any:
        import sys

        import rich.table

        return sys.stdout, rich.table

    assert ImportScan(uses).imported == {"sys", "rich.table"}

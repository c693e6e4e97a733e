"""Tests of fluid.measure.json_input: what it accepts as which type, and how its errors name places and values."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from fluid.errors import InvalidFieldError
from fluid.measure import json_input
from fluid.measure.json_input import Count, Range, read_record


@dataclass(frozen=True)
class Part:
    size: Annotated[float, Range(0.0, 1.0)]
    colour: Literal["red", "blue"] = "red"


@dataclass(frozen=True)
class Whole:
    name: str
    parts: tuple[Part, ...] = ()
    sizes: list[Count] = field(default_factory=list)
    by_name: dict[str, Part] = field(default_factory=dict)
    best: Part | None = None
    done: bool = False
    weight: float = 1.0
    count: int = 0

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise InvalidFieldError("name", self.name, "must not be bad")


def test_a_record_is_read_with_all_that_is_in_it() -> None:
    data = {
        "name": "a",
        "parts": [{"size": 0}, {"size": 0.5, "colour": "blue"}],
        "sizes": [1, 2.0],
        "by_name": {"x": {"size": 1}},
        "best": {"size": 1},
        "done": True,
        "weight": 3,
        "count": 2**60 + 1,
    }
    read = read_record(json.loads(json.dumps(data)), Whole, "whole")
    assert read == Whole("a", (Part(0.0), Part(0.5, "blue")), [1, 2], {"x": Part(1.0)}, Part(1.0), True, 3.0, 2**60 + 1)
    assert type(read.weight) is float and type(read.sizes[1]) is int
    assert read_record({"name": "a", "best": None}, Whole, "whole") == Whole("a")


@pytest.mark.parametrize(
    ("data", "place", "value", "reason"),
    [
        (5, "whole", 5, "must be a JSON object"),
        ({}, "name", None, "is missing"),
        ({"name": 3}, "name", 3, "must be a string"),
        ({"name": "bad"}, "name", "bad", "must not be bad"),
        ({"name": "a", "size": 3}, "size", 3, "is no field here; known: best, by_name, .*weight"),
        ({"name": "a", "done": 1}, "done", 1, "must be true or false"),
        ({"name": "a", "weight": "3"}, "weight", "3", "must be a number"),
        ({"name": "a", "weight": True}, "weight", True, "must be a number"),
        ({"name": "a", "count": 1.5}, "count", 1.5, "must be a whole number"),
        ({"name": "a", "parts": {}}, "parts", {}, "must be a list"),
        ({"name": "a", "sizes": "12"}, "sizes", "12", "must be a list"),
        ({"name": "a", "sizes": [1, 0]}, "sizes[1]", 0, "must be at least 1"),
        ({"name": "a", "parts": [{"size": 1}, 7]}, "parts[1]", 7, "must be a JSON object"),
        ({"name": "a", "parts": [{"size": 1.5}]}, "parts[0].size", 1.5, "must be at most 1"),
        (
            {"name": "a", "parts": [{"size": 1, "colour": "red "}]},
            "parts[0].colour",
            "red ",
            "must be one of blue, red",
        ),
        ({"name": "a", "by_name": {"x": {}}}, "by_name['x'].size", None, "is missing"),
        ({"name": "a", "by_name": []}, "by_name", [], "must be a JSON object"),
        ({"name": "a", "best": {"size": 1, "hue": 2}}, "best.hue", 2, "is no field here"),
    ],
)
def test_an_error_names_place_value_and_reason(data: Any, place: str, value: object, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        read_record(data, Whole, "whole")
    assert (caught.value.field, caught.value.value) == (place, value)


def test_numbers_are_finite() -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidFieldError, match=r"^weight="):
            read_record({"name": "a", "weight": wrong}, Whole, "whole")


def test_a_part_of_a_file_is_named_by_its_place() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_record([{"size": 1}, {"size": 2}], list[Part], "parts", place="all.parts")
    assert caught.value.field == "all.parts[1].size"
    with pytest.raises(InvalidFieldError) as caught:
        read_record({}, list[Part], "parts", place="all.parts")
    assert caught.value.field == "all.parts"


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(json_input).attempted > 1
    assert not doctest.testmod(json_input).failed


WITHOUT_CATTRS = """
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.errors import MissingDependencyError
from fluid.planners.instance import Instance

def train(config):
    for step in range(9):
        yield {"loss": config["x"] + step}

if __name__ == "__main__":
    with FluidExecutor(backend="local", devices=1, run_dir="run") as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"x": 1}, budget=2, trial_id="a")]))
        print([result.metrics["loss"] for result in handle.results()])
    try:
        Instance.from_json({"devices": 1, "trials": [{"runtime_s": 1}]})
    except MissingDependencyError as error:
        print(error)
"""


def test_a_session_runs_without_cattrs_and_reading_names_it(tmp_path: Path) -> None:
    (tmp_path / "cattrs.py").write_text("raise ModuleNotFoundError('blocked', name='cattrs')")
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_CATTRS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses, error = done.stdout.splitlines()
    assert losses == "[1, 2]"
    assert "cattrs" in error and "pip install cattrs" in error
    assert (tmp_path / "run/journal.jsonl").stat().st_size and (tmp_path / "run/profile.json").is_file()

"""Tests of fluid.measure.json_input: what it accepts as which type, and how its errors name places and values."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from fluid.errors import InvalidFieldError
from fluid.measure import json_input
from fluid.measure.json_input import Count, read_record


@dataclass(frozen=True)
class Part:
    size: Annotated[float, Meta(ge=0.0, le=1.0)]
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
        ({"name": "a", "weight": "\udcff"}, "weight", "\\udcff", "must be a number"),
        (
            {"name": "a", "by_name": {"\ud800": {"size": "\ud800"}}},
            "by_name['\\\\ud800'].size",
            "\\ud800",
            "must be a n",
        ),
        ({"name": "a", "\ud800": 1, "weight": "\ud800"}, "weight", "\\ud800", "must be a number"),
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


def test_a_number_is_read_where_a_whole_one_is_wanted_if_it_is_one() -> None:
    data = {"name": "a", "sizes": [1.0, 2], "count": 3.0, "by_name": {"x": {"size": 1}, "y": {"size": 0}}}
    read = read_record(data, Whole, "whole")
    assert [type(each) for each in (*read.sizes, read.count)] == [int] * 3
    assert data["sizes"] == [1.0, 2], "what was given is left as it is"
    many = read_record({"name": "a", "sizes": [3.0] * 5000}, Whole, "whole")
    assert many.sizes == [3] * 5000


def test_the_key_of_a_mapping_is_named_though_others_are_right() -> None:
    data = {"name": "a", "by_name": {"x": {"size": 1}, "y z": {"size": "big"}, "w": {"size": 0}}}
    with pytest.raises(InvalidFieldError, match=r"^by_name\['y z'\]\.size='big': must be a number"):
        read_record(data, Whole, "whole")


def test_a_name_that_is_misspelt_is_named_rather_than_the_one_that_is_missing() -> None:
    with pytest.raises(InvalidFieldError, match=r"^parts\[0\]\.seize=1: is no field here; known: colour, size"):
        read_record({"name": "a", "parts": [{"seize": 1}]}, Whole, "whole")


@pytest.mark.parametrize("wrong", [math.inf, 10**400, math.nan])
def test_a_number_that_cannot_be_used_is_found_wherever_it_is(wrong: float) -> None:
    given: dict[str, dict[str, Any]] = {
        "weight": {"weight": wrong},
        "best.size": {"best": {"size": wrong}},
        "count": {"count": wrong},
    }
    for place, data in given.items():
        with pytest.raises(InvalidFieldError) as caught:
            read_record({"name": "a", **data}, Whole, "whole")
        assert caught.value.field == place

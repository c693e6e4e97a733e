"""The JSON form of values of any kind."""

from __future__ import annotations

import json
from typing import Any

from fluid.trainables.json_form import is_json, json_form


def test_what_holds_itself_becomes_text() -> None:
    alone: list[Any] = [1]
    alone.append(alone)
    assert json_form(alone) == [1, "[1, [...]]"]
    config: dict[str, Any] = {"a": 1}
    config["me"] = (config, {"deep": config})
    form = json_form(config)
    assert form["a"] == 1 and isinstance(form["me"][0], str) and isinstance(form["me"][1]["deep"], str)
    assert not is_json(alone) and not is_json(config)


def test_a_list_that_holds_itself_many_times_is_looked_at_once_for_each() -> None:
    """A visit for each path of 20 levels would be one for 100**20."""
    wide: list[Any] = []
    wide.extend([wide] * 100)
    assert json_form(wide) == [repr(wide)] * 100
    assert json.loads(json.dumps(json_form({"loss": 1.0, "x": wide})))["loss"] == 1.0


def test_what_is_there_twice_holds_not_itself() -> None:
    part = [1, 2]
    assert is_json([part, part, {"a": part}])
    assert json_form([part, (part, {1: part})]) == [part, [part, {"1": part}]]


def test_deep_nesting_ends_as_text() -> None:
    deep: Any = 1
    for _ in range(25):
        deep = [deep]
    form = json_form(deep)
    for _ in range(20):
        (form,) = form
    assert form == "[[[[[1]]]]]"

"""Comparisons of values whose own ``==`` gives an array, raises, or has no truth value."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fluid
from fluid.rehearsal.spaces import active
from fluid.search import choice, make_sampler, make_space, uniform
from fluid.search.conditions import Condition
from fluid.search.domains import Domain
from fluid.user_values import is_equal_value, is_same_value, text_of


class Guarded:
    """Refuses to be compared, to be true or false, and to be hashed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _refuse(self, *_: object) -> Any:
        raise ValueError("the truth value is ambiguous")

    __eq__ = __ne__ = __bool__ = __len__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Anything(Guarded):
    """Cannot be pickled either."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Kind(Enum):
    ONE = 1


SAMES = [1, "text", None, math.nan, [1, (2, {"a": 3})], np.arange(1_000_000), np.float32(0.5), Kind.ONE]
SAMES += [pd.DataFrame({"a": [1.0, math.nan]}), Guarded(1), {"weights": np.array([1.0, 2.0]), "n": {"g": Guarded(2)}}]


@pytest.mark.parametrize("value", SAMES, ids=lambda value: type(value).__name__)
def test_a_copy_is_the_same(value: Any) -> None:
    assert is_same_value(value, copy.deepcopy(value))


DIFFERENT: list[tuple[Any, Any]] = [(1, True), (1, 1.0), (1, 2), ([1], (1,)), ({"a": 1}, {"b": 1}), ([1], [1, 2])]
DIFFERENT += [(np.array([1, 2]), np.array([1, 3])), (np.array([1]), 1), (np.array([1]), np.array([1.0]))]
DIFFERENT += [({"g": Guarded(1)}, {"g": Guarded(2)}), (Anything(1), Anything(1))]
DIFFERENT += [(pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]}))]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=lambda value: type(value).__name__)
def test_others_are_not(one: Any, other: Any) -> None:
    assert not is_same_value(one, other)


def test_the_order_of_a_dict_does_not_count_and_a_circle_has_no_answer() -> None:
    assert is_same_value({"a": 1, "b": 2}, {"b": 2, "a": 1})
    one: list[Any] = []
    one.append(one)
    other: list[Any] = []
    other.append(other)
    assert not is_same_value(one, other)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    for one in (torch.ones(3), torch.tensor(2.0, dtype=torch.bfloat16), torch.ones(2, 4).T, torch.nn.Linear(2, 1)):
        assert is_same_value({"tensor": one}, {"tensor": copy.deepcopy(one)})
    assert not is_same_value(torch.ones(3), torch.zeros(3))
    assert not is_same_value(torch.ones(2, 3), torch.ones(3, 2))
    assert not is_same_value(torch.zeros(3), torch.zeros(3, dtype=torch.int32))


def test_equal_values_have_one_truth_value() -> None:
    assert is_equal_value(1, 1.0) and is_equal_value(np.float64(0.5), 0.5)
    assert not is_equal_value(np.array([1]), 1) and not is_equal_value(Guarded(1), Guarded(1))


ODD = [np.array([1.0, 2.0]), pd.DataFrame({"a": [1, 2]}), Guarded(1)]


@pytest.mark.parametrize("odd", ODD, ids=lambda value: type(value).__name__)
def test_a_point_of_a_sweep_names_a_choice_by_an_equal_one(odd: Any) -> None:
    space = make_space({"x": choice([Guarded(0), odd])})
    suggestion = make_sampler("random", space, seed=0, points=[{"x": copy.deepcopy(odd)}]).ask()
    assert suggestion is not None and suggestion.config["x"] is odd


def test_a_condition_of_a_benchmark_does_not_hold_for_an_array() -> None:
    conditions = [Condition("momentum", "optimizer", ("sgd",))]
    space: dict[str, Domain] = {"optimizer": choice(["sgd", "adam"]), "momentum": uniform(0.0, 1.0)}
    config = {"optimizer": np.array(["sgd", "sgd"]), "momentum": 0.5}
    assert list(active(config, space, conditions)) == ["optimizer"]


@dataclass
class Net:
    layers: int
    act: Any = max
    inner: Any = None


class Raises:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_texts_are_those_of_other_processes() -> None:
    value = {"b": [1, 2.5, None, "é"], "a": (True, np.float32(0.5), np.int64(3)), "net": Net(2, inner=Net(1))}
    text = text_of({**value, "data": np.zeros(3), "set": {"x"}, "cls": Net})
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}
import numpy as np
from test_user_values import *
value = {{"net": Net(2, inner=Net(1)), "a": (True, np.float32(0.5), np.int64(3)), "b": [1, 2.5, None, "é"]}}
print(text_of({{"set": {{"x"}}, "cls": Net, "data": np.zeros(3), **value}}))
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == text
    inner = '{"Net": {"act": "max", "inner": null, "layers": 1}}'
    assert f'"net": {{"Net": {{"act": "max", "inner": {inner}, "layers": 2}}}}' in text
    assert '"cls": "Net", "data": "ndarray"' in text and '"set": "set"' in text


def test_texts_of_odd_values_are_names() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert text_of(cyclic) == "list"
    assert text_of({(1, 2): 3, "a": 1}) == "dict"
    assert text_of(Raises()) == "Raises"
    assert text_of({"a": float("nan")}) == '{"a": NaN}'


def curve(config: dict[str, Any]) -> Any:
    for step in range(1, 4):
        yield {"loss": config["x"] / step, "odd": config["constant"]}


@pytest.mark.slow
@pytest.mark.parametrize("odd", [np.array(3.0), ODD[1], ODD[2]], ids=lambda value: type(value).__name__)
def test_a_sweep_has_such_constants_and_is_resumed(tmp_path: Path, odd: Any) -> None:
    space = {"x": uniform(0.0, 1.0), "constant": odd, "nested": {"constant": odd, "empty": {}}}
    for _ in range(2):
        done = fluid.run(
            curve, space, metric="loss", mode="min", samples=2, budget=3, seed=1, run_dir=tmp_path / "run", resume=True
        )
        assert [trial.iteration for trial in done.trials if trial.state == "DONE"], done
        assert all(is_same_value(trial.config["constant"], odd) for trial in done.trials)

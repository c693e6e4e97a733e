"""What a trainable's code is: the same in every process, and what has changed is named."""

from __future__ import annotations

import copy
import enum
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import fluid
from fluid.trainables.trainable_code import TrainableCode, code_of, objects_of

SOURCE = """
import dataclasses
import enum
import functools
import math

import helpers

RATE = 0.1
WORDS = {"a", "b", "ccc", "zz"}
CONFIG = {"x": [1, 2.5], "y": {"q", "r"}}
ANYTHING = object()


class Kind(enum.Enum):
    A = 1


def logged(function):
    @functools.wraps(function)
    def inner(*args, **options):
        return function(*args, **options)

    return inner


@dataclasses.dataclass
class Point:
    a: int = 3
    b: str = "x"


class Model:
    lock = object()
    size = 3

    class Layer:
        width = 8

        class Unit:
            def depth(self):
                return self.width

    def __init__(self):
        self.point = Point()

    @property
    def weight(self):
        return 3

    @staticmethod
    def has(x):
        return x in {"a", "b", "c"}

    @classmethod
    def name(cls):
        return "model"


@logged
def loss(x, y=3, *, z=(1, 2)):
    "docstring"
    try:
        return math.sin(x) * RATE + CONFIG["x"][0] + len(WORDS) + helpers.shift(x) * helpers.FACTOR
    except ValueError:
        return Kind.A, ANYTHING


def make(n):
    def train(config, state):
        model = Model()
        for i in range(n):
            yield {"loss": loss(i) + model.weight}, None

    return train


train = make(5)
"""
HELPERS = """
FACTOR = 2

def shift(x):
    return x + 1

def unused(x):
    return x
"""
PROGRAM = """
import json
import subprocess
import sys

import cloudpickle

import __main__
from fluid.trainables.trainable_code import code_of

exec(compile(open(sys.argv[1]).read(), sys.argv[2], "exec"), vars(__main__))
print(json.dumps(code_of(train).entry()), flush=True)
# In this process cloudpickle would give the same classes.
subprocess.run([sys.executable, "-c", sys.argv[3]], input=cloudpickle.dumps(train), check=True)
"""
UNPICKLING = """
import json
import pickle
import sys

from fluid.trainables.trainable_code import code_of

print(json.dumps(code_of(pickle.load(sys.stdin.buffer)).entry()))
"""


def codes_of(folder: Path, source: str = SOURCE, helpers: str = HELPERS, seed: str = "0") -> list[TrainableCode]:
    """The code of ``train`` in another process: as it is there, and as its pickle gives it."""
    folder.mkdir(exist_ok=True)
    (folder / "helpers.py").write_text(helpers)
    (folder / "source.py").write_text(source)
    places = [str(folder), str(Path(fluid.__file__).parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONHASHSEED": seed,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", PROGRAM, str(folder / "source.py"), f"{folder.name}.py", UNPICKLING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = [TrainableCode.read(entry) for entry in map(json.loads, done.stdout.splitlines())]
    return [code for code in found if code is not None]


def test_the_same_text_has_the_same_code_in_every_process(tmp_path: Path) -> None:
    first = codes_of(tmp_path / "first")
    broken = "return (\n            math.sin(x)\n            * RATE\n            + CONFIG"
    moved = "# A comment.\n\n\n" + SOURCE.replace("docstring", "other words")
    moved = moved.replace("return math.sin(x) * RATE + CONFIG", broken)
    moved = moved.replace("helpers.FACTOR\n", "helpers.FACTOR)\n")
    assert moved.count("\n") > SOURCE.count("\n")
    again = codes_of(tmp_path / "again", moved, HELPERS.replace("return x\n", "return -x\n"), seed="7")
    assert len(first) == len(again) == 2 and "loss" in first[0].parts
    for code in (*first, *again):
        assert code.changed_since(first[0]) == ()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("RATE = 0.1", "RATE = 0.2", "RATE"),
        ("make(5)", "make(6)", "n of train"),
        ("return 3", "return 4", "Model.weight"),
        ("except ValueError", "except TypeError", "loss"),
        ('"y": {"q"', '"y": {"s"', "CONFIG"),
        ("y=3", "y=4", "default 0 of loss"),
        ("size = 3", "size = 4", "Model.size"),
        ('in {"a"', 'in {"d"', "Model.has"),
        ("range(n)", "range(n + 1)", "train"),
        ("helpers.FACTOR", "2", "helpers.FACTOR"),
    ],
)
def test_what_has_changed_is_named(old: str, new: str, named: str, tmp_path: Path) -> None:
    assert SOURCE.count(old) == 1
    first, edited = codes_of(tmp_path / "first"), codes_of(tmp_path / "edited", SOURCE.replace(old, new))
    for code in edited:
        assert named in code.changed_since(first[0])
        assert len(code.changed_since(first[0])) <= 2


def test_what_has_changed_in_a_module_is_named_too(tmp_path: Path) -> None:
    first = codes_of(tmp_path / "first")
    edited = codes_of(
        tmp_path / "edited", helpers=HELPERS.replace("x + 1", "x + 2").replace("FACTOR = 2", "FACTOR = 3")
    )
    assert edited[0].changed_since(first[0]) == ("helpers.FACTOR", "helpers.shift")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's with a class."""
    text = """
class Net:
    def __init__(self, depth=2):
        self.depth = depth

    def step(self):
        return {}
"""
    (tmp_path / "net_of_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("net_of_this_test")


def code(trainable: Any) -> TrainableCode:
    found = code_of(trainable)
    assert found is not None
    return found


def test_objects_and_partials_have_the_code_of_what_they_are_made_of(module: ModuleType) -> None:
    assert sorted(code(module.Net).parts) == ["Net", "Net.__init__", "Net.step", "default 0 of Net.__init__"]
    assert code(module.Net(3)).changed_since(code(module.Net(2))) == ("attribute depth",)
    one, other = (functools.partial(module.Net, depth=depth) for depth in (1, 2))
    assert code(other).changed_since(code(one)) == ("argument depth",)
    assert code(cloudpickle.loads(cloudpickle.dumps(module.Net))).changed_since(code(module.Net)) == ()


def test_codes_of_other_interpreters_are_not_compared() -> None:
    one, other = TrainableCode("cpython-311", {"train": "a"}), TrainableCode("cpython-312", {"train": "b"})
    assert other.changed_since(one) == ()
    assert TrainableCode("cpython-311", {"train": "b"}).changed_since(one) == ("train",)
    cut = TrainableCode("cpython-311", {"train": "a", "more": "b"}, is_whole=False)
    assert cut.changed_since(one) == (), "what was not visited is not said to have changed"


def test_an_object_that_cannot_be_looked_at_has_no_code() -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("do not look")

        def step(self) -> dict[str, float]:
            return {}

    assert code_of(Odd()) is None


def test_entries_of_a_file_that_are_no_code_are_none() -> None:
    assert TrainableCode.read(None) is None and TrainableCode.read({"parts": 3}) is None
    known = TrainableCode("cpython-311", {"train": "a"})
    assert TrainableCode.read(json.loads(json.dumps(known.entry()))) == known


READS = """
import dataclasses
import functools
import threading
import types

import reads_helpers

@dataclasses.dataclass
class Settings:
    rate: float

SETTINGS, MIXED, PART, LOCK = Settings(0.1), [0.5, Settings(1)], functools.partial(pow, 2), threading.Lock()

def plain(config):
    return reads_helpers.rate + config["lr"]

def settings(config):
    return SETTINGS.rate

def mixed(config):
    return MIXED[0]

def part(config):
    return PART(3)

def lock(config):
    with LOCK:
        return 1

def imports(config):
    import reads_helpers
    return reads_helpers.rate

def imports_what_is_not_loaded(config):
    import reads_later
    return reads_later.rate

def imports_from(config):
    from reads_helpers import rate
    return rate

def passes_a_module_on(config):
    return vars(reads_helpers)["rate"]

def imports_packages(config):
    import json
    import yaml
    return json, yaml
"""


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reads.py").write_text(READS)
    (tmp_path / "reads_helpers.py").write_text("rate = 0.1")
    (tmp_path / "reads_later.py").write_text("rate = 0.1")
    yield importlib.import_module("reads")
    for name in ("reads", "reads_helpers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["settings", "mixed", "part"])
def test_objects_that_change_are_other_objects(reads: ModuleType, name: str) -> None:
    before = objects_of(vars(reads)[name])
    assert before and objects_of(vars(reads)[name]) == before
    reads.SETTINGS.rate, reads.MIXED[0], reads.PART = 0.2, 0.6, functools.partial(pow, 3)
    assert objects_of(vars(reads)[name]) not in (before, None)


@pytest.mark.parametrize(
    ("name", "is_seen"),
    [
        ("plain", True),
        ("imports_from", True),
        ("imports_packages", True),
        ("lock", False),
        ("imports", False),
        ("imports_what_is_not_loaded", False),
        ("passes_a_module_on", False),
    ],
)
def test_what_escapes_is_known(reads: ModuleType, name: str, is_seen: bool) -> None:
    assert (objects_of(vars(reads)[name]) is not None) == is_seen


def test_a_changed_value_of_an_enum_is_a_change(module: ModuleType) -> None:
    class Kind(enum.Enum):
        A = 1

    def train(config: dict[str, Any]) -> int:
        return kind.value

    kind: Any = Kind.A
    before = code(train)

    class Kind(enum.Enum):  # type: ignore[no-redef]
        A = 2

    kind = Kind.A
    assert code(train).changed_since(before) == ("kind of train",)


def test_tensors_are_compared_by_content() -> None:
    torch = pytest.importorskip("torch")

    def train(config: dict[str, Any]) -> Any:
        return data, model

    data, model = torch.arange(6.0), torch.nn.Linear(2, 3)
    before = objects_of(train)
    data, model = data.clone(), copy.deepcopy(model)
    assert before and objects_of(train) == before
    data[3] = -1.0
    changed = objects_of(train)
    assert changed not in (before, None)
    with torch.no_grad():
        model.bias[0] += 1.0
    assert objects_of(train) not in (changed, None)

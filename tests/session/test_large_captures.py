"""A trainable or a config that takes a lot along is told by the names of its variables, once."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.resources import Device
from fluid.session.specs import SessionPickler
from fluid.trainables.pickling import dump_config, dump_trainable
from fluid.trial_fields import ANY_PROCESS
from fluid.trialgroup import Submission, Trial


class Real(SimulatedBackend):
    """Trials of it are run, as far as the session knows."""

    replays = False


def pickled(*trials: Trial) -> list[bytes]:
    pickler = SessionPickler(Real(lambda trial_id, config: Truth(1.0), [Device(0)]))
    with_two_calls = [pickler.payloads_of(trials, Submission(), lambda trial: ANY_PROCESS) for _ in range(2)]
    return [payload.trainable.pickled for payload in with_two_calls[0].values()]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "fluid")
    return lambda: [record.getMessage() for record in caplog.records]


def script(code: str) -> dict[str, Any]:
    """What a script defines, which lanes cannot import."""
    module = ModuleType("captures_script")
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
        cloudpickle.register_pickle_by_value(module)
        return vars(module)
    finally:
        del sys.modules[module.__name__]


LIMIT = 1_600_000
LARGE = LIMIT + 1000


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fluid.session.specs", "fluid.trainables.captures"):
        monkeypatch.setattr(f"{module}.LARGE_CAPTURE", LIMIT)


CLOSURE = """
def make(data):
    def train(config):
        yield {'n': len(data)}
    return train
train = make(bytes(N))
"""
OBJECT = """
class Data:
    def __init__(self):
        self.images = bytes(N)
    def train(self, config):
        yield {'n': 1}
train = Data().train
"""
CLASS = """
class train:
    data = bytes(N)
    def __init__(self, config): pass
    def step(self): return {'n': 1}
"""
HELPER = """
DATA = bytes(N)
def load():
    return DATA
def train(config):
    yield {'n': len(load())}
"""
SETS = """
SETS = {'train': bytes(N), 'test': bytes(10)}
def train(config):
    yield {'n': len(SETS)}
"""
SEVERAL = """
A, B = bytes(N // 2), bytearray(N // 4)
def train(config):
    yield {'n': len(A) + len(B) + len(C)}
C = bytes(N // 3)
"""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("DATA = bytes(N)\ndef train(config):\n    yield {'n': len(DATA)}", "DATA (1.6 MB)"),
        ("def train(config, data=bytes(N)):\n    yield {'n': len(data)}", "data (1.6 MB)"),
        (HELPER, "load.DATA (1.6 MB)"),
        (CLOSURE, "data (1.6 MB)"),
        (OBJECT, "self.images (1.6 MB)"),
        (CLASS, "data (1.6 MB)"),
        (SETS, "SETS.train (1.6 MB)"),
        (SEVERAL, "A (801 KB), C (534 KB), B (400 KB)"),
    ],
)
def test_the_variables_are_named(code: str, name: str, told: Callable[[], list[str]]) -> None:
    train = script(f"N = {LARGE}\n{code}")["train"]
    pickled(Trial(train, {"lr": 0.1}), Trial(train, {"lr": 0.2}))
    (line,) = told()
    assert re.search(r"train takes along 1\.\d+ MB, which is written to the run folder", line)
    assert f"sent to each process: {name};" in line
    assert "fluid.shared" in line


def test_a_large_config_is_told_by_its_field(told: Callable[[], list[str]]) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {}

    pickled(*(Trial(train, {"lr": rate, "data": bytes(LARGE)}) for rate in (0.1, 0.2)))
    (line,) = told()
    assert line.startswith("each config takes along 1.6 MB") and "data (1.6 MB)" in line


def test_what_is_small_or_cannot_be_named_is_not_told(told: Callable[[], list[str]]) -> None:
    data = bytes(LIMIT // 2)

    def train(config: dict[str, Any], data: Any = data) -> Iterator[dict[str, Any]]:
        yield {}

    pickled(Trial(train), Trial(partial(train, data=b"")))
    assert told() == []


def test_tensors_that_share_memory_are_pickled_once_and_share_it_afterwards(told: Callable[[], list[str]]) -> None:
    torch = pytest.importorskip("torch")
    images = torch.arange(LARGE // 4, dtype=torch.float32)
    half = len(images) // 2
    first, last = images[:half], images[half:]

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"n": len(first) + len(last)}

    (data,) = pickled(Trial(train))
    assert LARGE < len(data) < 1.01 * LARGE
    assert "first (1.6 MB)" in told()[0] or "last (1.6 MB)" in told()[0]
    data = dump_config({"a": first, "b": last, "all": images})
    config = pickle.loads(data)
    assert len(data) < 1.01 * LARGE and torch.equal(config["b"], last)
    config["a"][0] = 7.0
    assert config["all"][0] == 7.0, "they share memory, as before"
    grown = torch.nn.Parameter(torch.ones(3))
    again = pickle.loads(
        dump_config({"p": grown, "g": (grown * 2).detach(), "e": torch.empty(0), "b": first[:3].bool()})
    )
    assert again["p"].requires_grad and again["g"].tolist() == [2.0] * 3 and again["b"].tolist() == [False, True, True]


def test_a_small_view_of_a_large_tensor_is_told_as_one(told: Callable[[], list[str]]) -> None:
    torch = pytest.importorskip("torch")
    view = torch.zeros(LARGE // 4)[:10]

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"n": len(view)}

    dump_trainable(train)
    pickled(Trial(train))
    assert "view (1.6 MB, of which it shows 40 B: take view.clone())" in told()[0]

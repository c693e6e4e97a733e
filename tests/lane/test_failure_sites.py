"""Which failures of trials are alike, and what is said of them."""

from __future__ import annotations

import json
import pickle
import sqlite3
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from fluid.engine.events import Failure
from fluid.errors import WrongCallError
from fluid.lane.errors import describe
from fluid.trainables.hints import add_hint
from fluid.trainables.resident import TrainableFormError


class ServiceUnavailable(Exception):
    pass


def failure(error: BaseException, iteration: int | None = 0) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return describe(raised, iteration)


def test_numbers_and_addresses_in_a_message_do_not_count() -> None:
    one = failure(ValueError("lr=0.1 of <object at 0x7f00ab>, try 1e-3"))
    assert one.site == failure(ValueError("lr=27 of <object at 0x91>, try 2")).site
    assert "test_failure_sites.py" in one.site


@pytest.mark.parametrize(
    "other",
    [ValueError("another text 1"), KeyError("text 1"), ValueError("text 1")],
    ids=["text", "class", "iteration"],
)
def test_type_text_and_iteration_count(other: Exception) -> None:
    assert failure(ValueError("text 1")).site != failure(other, 1 if str(other) == "text 1" else 0).site


@pytest.mark.parametrize(
    "error",
    [
        OSError("no space"),
        FileNotFoundError("x"),
        ConnectionResetError(),
        TimeoutError(),
        MemoryError(),
        subprocess.TimeoutExpired("x", 1),
        ServiceUnavailable(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("NCCL communicator was aborted"),
        RuntimeError("Read timed out"),
        json.JSONDecodeError("Expecting value", "", 0),
        sqlite3.OperationalError("database is locked"),
        EOFError("Ran out of input"),
        pickle.UnpicklingError("pickle data was truncated"),
        zipfile.BadZipFile("File is not a zip file"),
        BrokenProcessPool("a child was killed"),
        subprocess.CalledProcessError(1, "nvidia-smi"),
        RuntimeError("DataLoader worker (pid 7) exited unexpectedly"),
        Exception("429: Too Many Requests"),
    ],
    ids=repr,
)
def test_what_may_pass_has_no_site(error: Exception) -> None:
    assert failure(error).site == ""
    wrapped = RuntimeError("no data")
    wrapped.__cause__ = error
    assert failure(wrapped).site == ""


def test_without_an_iteration_there_is_no_site() -> None:
    assert failure(ValueError("x"), None).site == ""


@pytest.mark.parametrize("kind", [TrainableFormError, WrongCallError])
def test_a_form_that_cannot_be_run(kind: Callable[..., Exception]) -> None:
    assert failure(kind("no")).is_form and not failure(TypeError("no")).is_form


# -- hints


def asks(config: dict[str, Any], what: str) -> Any:
    return config[what]


class Holder:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def get(self) -> Any:
        return self.config["learning_rate"]


def hinted(call: Callable[[], Any], config: dict[str, Any]) -> str:
    try:
        call()
    except Exception as error:
        add_hint(error, config)
        add_hint(error, config)
        return describe(error, 0).message
    raise AssertionError("nothing was raised")


def test_a_missing_key_says_what_the_config_has() -> None:
    config = {"lr": 0.1, "momentum": 0.9}
    text = "KeyError: 'learning_rate': config has lr, momentum"
    assert hinted(lambda: asks(config, "learning_rate"), config) == text
    assert hinted(lambda: asks({**config}, "learning_rate"), config) == text
    assert hinted(Holder(config).get, config) == text
    assert hinted(lambda: asks({}, "x"), {}) == "KeyError: 'x': config is empty"
    many = {f"p{number}": 1 for number in range(20)}
    assert hinted(lambda: asks(many, "x"), many).endswith("p10, p11 and 8 more")


def test_a_key_of_something_else_gets_no_hint() -> None:
    config = {"lr": 0.1}
    assert hinted(lambda: asks({"other": 1}, "column"), config) == "KeyError: 'column'"
    assert hinted(lambda: asks({"other": 1}, "lr"), config) == "KeyError: 'lr'"


def test_a_config_is_a_dict() -> None:
    config: Any = {"lr": 0.1}
    assert hinted(lambda: config.lr, config).endswith("no attribute 'lr': a config is a dict: config['lr']")
    assert hinted(lambda: config.Float("lr", 0, 1), config).endswith("and read config['lr']")
    assert hinted(lambda: config.other, config).endswith("no attribute 'other'")


def test_hints_never_raise() -> None:
    class Rude(dict):  # type: ignore[type-arg]
        def keys(self) -> Any:
            raise RuntimeError("no")

    rude = Rude(lr=1)
    assert hinted(lambda: asks(rude, "x"), rude) == "KeyError: 'x'"


def test_pruning_is_fluids() -> None:
    class TrialPruned(Exception):
        pass

    def prune() -> None:
        raise TrialPruned

    assert "Fluid stops trials itself" in hinted(prune, {"lr": 1})

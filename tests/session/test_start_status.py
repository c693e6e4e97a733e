"""What a status says of the first iterations: what they wait for, and how many trials have begun."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid import FluidExecutor, Search, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.session.status import Start

_LIBRARY = """
import os
if "HELD_BY" in os.environ:
    open(os.environ["HELD_BY"]).close()

def wait(pipe):
    open(pipe).close()
"""
_TRAINING = """
import held_library

def train(config):
    held_library.wait(config["pipe"])
    while True:
        yield {"loss": 1.0}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has a trainable that uses a library whose import elsewhere waits for a writer of the pipe that HELD_BY names."""
    for name, source in (("held_library", _LIBRARY), ("held_training", _TRAINING)):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield importlib.import_module("held_training")
    for name in ("held_library", "held_training"):
        del sys.modules[name]


def release(pipe: Path) -> None:
    os.close(os.open(pipe, os.O_WRONLY))


def test_a_status_says_what_the_first_iterations_wait_for(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = [tmp_path / name for name in ("importing", "iterating")]
    for pipe in pipes:
        os.mkfifo(pipe)
    monkeypatch.setenv("HELD_BY", str(pipes[0]))

    trials = [Trial(module.train, {"pipe": str(pipes[1])}, budget=2)]
    backend = LocalBackend(1, preload=["held_library"], run_dir=tmp_path / "run")
    with FluidExecutor(backend, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials, name="sweep", search=Search("loss", "min", trials=3)))
        eventually(lambda: executor.status().start == Start("importing", 1, "held_library"))
        assert executor.status().groups[0].begun == 0
        release(pipes[0])
        eventually(lambda: executor.status().start == Start("iteration", 1))
        assert executor.status().groups[0].begun == 1
        release(pipes[1])
        handle.wait()
        assert executor.status().start is None
        assert executor.status().groups[0].begun == 1

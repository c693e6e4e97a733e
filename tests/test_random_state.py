"""The seeds of trials: what they follow from, and how a process takes them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fluid.random_state import SeedOrigin, Seeds, read_random_state


@pytest.fixture(autouse=True)
def generators() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_seeds_follow_from_the_states_the_salt_and_the_order() -> None:
    origin = SeedOrigin.now(0)
    assert origin == SeedOrigin.now(0)
    seeds = [origin.seeds(number) for number in range(100)]
    assert len({seed for each in seeds for seed in each}) == 300
    assert all(0 <= seed < 2**32 for each in seeds for seed in each)
    assert SeedOrigin.now(1).seeds(0) != origin.seeds(0)
    assert SeedOrigin.now(None).seeds(0) != SeedOrigin.now(None).seeds(0)


def test_they_are_read_and_not_advanced() -> None:
    before = read_random_state()
    SeedOrigin.now(0).seeds(0)
    after = read_random_state()
    assert before["random"] == after["random"]
    assert all(np.array_equal(*pair) for pair in zip(before["numpy.random"], after["numpy.random"], strict=True))
    assert torch.equal(before["torch"], after["torch"])


@pytest.mark.parametrize(("draw", "changed"), [(random.random, 0), (np.random.rand, 1), (lambda: torch.rand(1), 2)])
def test_each_generator_follows_from_its_like(draw: object, changed: int) -> None:
    before = SeedOrigin.now(0).seeds(0)
    draw()  # type: ignore[operator]
    after = SeedOrigin.now(0).seeds(0)
    assert [one != other for one, other in zip(before, after, strict=True)] == [place == changed for place in range(3)]


@pytest.mark.parametrize("entry", [None, 3, {}, {"random": 1, "numpy": "2", "torch": 3}, {"random": 1, "numpy": 2}])
def test_other_things_are_no_seeds(entry: object) -> None:
    assert Seeds.read(entry) is None


def test_none_is_imported_and_late_ones_start_from_the_seeds() -> None:
    program = """
import random, sys
from fluid.lane.process.state import seed_late_modules
from fluid.random_state import SeedOrigin, Seeds, put_in_force, write_random_state
SeedOrigin.now(0)
assert "numpy" not in sys.modules and "torch" not in sys.modules
put_in_force(Seeds(1, 2, 3))
seed_late_modules()
write_random_state({})
import numpy, torch
import numpy.random
found = [random.random(), numpy.random.rand(), torch.rand(1).item()]
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
assert found == [random.random(), numpy.random.rand(), torch.rand(1).item()], found
assert type(numpy.random.__loader__) is type(numpy.random.__spec__.loader) is type(numpy.__loader__)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_that_another_thread_is_loading_is_waited_for(tmp_path: Path) -> None:
    """Its module is there from the start of the loading, and has no generator until the end."""
    (tmp_path / "torch.py").write_text(
        """
import __main__, time
__main__.begun.set()
time.sleep(0.3)
class cuda:
    is_initialized = staticmethod(bool)
default_generator = object()
def get_rng_state(): return "its state"
"""
    )
    program = """
import importlib, threading
from fluid.random_state import read_random_state
begun = threading.Event()
threading.Thread(target=importlib.import_module, args=["torch"]).start()
assert begun.wait(60.0)
assert read_random_state()["torch"] == "its state"
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )

"""Calls have one key if, and only if, the loader, its code and the arguments are the same."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.shared_data.key import shared_key


def load(count: int = 1) -> int:
    return count


@functools.cache
def cached(count: int) -> int:
    return count


def script(source: str) -> Any:
    """The function ``load`` of a module that lanes cannot import."""
    module = types.ModuleType("__main__")
    exec(compile(source, "script.py", "exec"), module.__dict__)
    return module.load  # type: ignore[attr-defined]


ARGUMENTS: list[tuple[Any, ...]] = [
    *((), (1,), (2,), (1.0,), ("1",), (None,), (1, 2), ((1, 2),), ([1, 2],), ({"a": 1},), ({"a": 2},)),
    *((Path("/a"),), (np.arange(3),), (np.arange(4),), (np.arange(3.0),), (("a", "b"),), (("a", "a"),), (b"a",)),
]


def test_arguments() -> None:
    keys = [shared_key(load, args) for args in ARGUMENTS]
    assert len(set(keys)) == len(keys)
    assert keys == [shared_key(load, args) for args in ARGUMENTS]


def test_equal_strings_need_not_be_one_object() -> None:
    one, other = "".join(["da", "ta"]), "".join(["da", "ta"])
    assert one is not other
    assert shared_key(load, ({one: one},)) == shared_key(load, ({one: other},))


def test_loaders() -> None:
    loaders = [load, cached, functools.partial(load, 1), functools.partial(load, 2), Path.exists, lambda: 1, lambda: 2]
    keys = [shared_key(loader, ()) for loader in loaders]
    assert len(set(keys)) == len(keys)


def test_closures_and_globals_count() -> None:
    def closing(over: Any) -> Any:
        return lambda: over

    assert shared_key(closing(1), ()) == shared_key(closing(1), ())
    assert shared_key(closing(1), ()) != shared_key(closing(2), ())
    with_global = [script(f"N = {number}\ndef load(): return N") for number in (1, 1, 2)]
    keys = [shared_key(loader, ()) for loader in with_global]
    assert keys[0] == keys[1] != keys[2]


def test_other_code_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = []
    for number in (1, 2, 1):
        monkeypatch.delitem(sys.modules, "loader_module", raising=False)
        module = types.ModuleType("loader_module")
        exec(f"def load():\n    return [part for part in range({number})]", module.__dict__)
        sys.modules["loader_module"] = module
        keys.append(shared_key(module.load, ()))
    assert keys[0] == keys[2] != keys[1]


SCRIPT = """
import functools
from typing import NamedTuple
import numpy as np

class Rows(NamedTuple):
    rows: object
    rest: dict = {}

class Maker:
    __slots__ = ("rows",)
    def __init__(self, rows):
        super().__init__()
        self.rows = rows
    def make(self):
        return Rows(self.rows)

def helper(count):
    return Maker(np.arange(count)).make()

def load(count=5):
    return helper(count)
"""
#: Runs in another process: unpickles the loader, and prints its key before and after it was used.
OTHER = """
import json, pickle, sys
import cloudpickle
from fluid.shared_data.key import shared_key
load = pickle.load(sys.stdin.buffer)
keys = [shared_key(load, (5,))]
value = cloudpickle.loads(cloudpickle.dumps(load(5)))
print(json.dumps([*keys, shared_key(load, (5,))]))
"""


def test_the_key_is_the_same_in_every_process_also_after_use() -> None:
    pickled = cloudpickle.dumps(script(SCRIPT))
    found = {
        key
        for _ in range(2)
        for key in json.loads(
            subprocess.run(
                [sys.executable, "-c", OTHER], input=pickled, stdout=subprocess.PIPE, check=True, timeout=90
            ).stdout
        )
    }
    assert len(found) == 1


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidFieldError, match="cannot be pickled") as raised:
        shared_key(lambda: lock, ())
    assert raised.value.field == "loader"
    with pytest.raises(InvalidFieldError, match="cannot be pickled") as raised:
        shared_key(load, (1, lock))
    assert raised.value.field == "args[1]"

"""What is sent to lanes."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.trainables.import_scan import imports_of
from fluid.trainables.pickling import dump_arguments, dump_config, dump_result, dump_trainable


def test_a_module_that_only_this_process_has_is_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("conjured_module")
    exec("BASE = 4\ndef double(x): return 2 * x\nclass T:\n    def step(self): return double(BASE)", module.__dict__)
    monkeypatch.setitem(sys.modules, "conjured_module", module)
    payload = dump_trainable(module.T)
    monkeypatch.delitem(sys.modules, "conjured_module")
    assert pickle.loads(payload)().step() == 8
    assert "conjured_module" not in imports_of(module.T)


def test_what_lanes_can_import_is_sent_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "written_module.py").write_text("class T:\n    def step(self): return {}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    written = __import__("written_module")
    try:
        assert pickle.loads(dump_trainable(written.T)) is written.T
        assert imports_of(written.T) == ["written_module"]
    finally:
        del sys.modules["written_module"]


def test_refusals_name_the_field() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidFieldError, match=r"^config\['b'\]=.*cannot be pickled"):
        dump_config({"a": 1, "b": [lock]})
    with pytest.raises(InvalidFieldError, match=r"^trainable=.*cannot be pickled"):
        dump_trainable(functools.partial(print, lock))
    assert pickle.loads(dump_config(types.MappingProxyType({"a": len}))) == {"a": len}


class _Task:
    def __init__(self, lock: object) -> None:
        self.data, self.lock = [1], lock


def test_a_refusal_names_the_part_of_the_trainable() -> None:
    lock = threading.Lock()
    task = _Task(lock)

    def closure(config: dict[str, Any]) -> object:
        return lock

    def default(config: dict[str, Any], once: object = lock, *, twice: int = 2) -> None: ...

    def word(config: dict[str, Any], *, twice: object = lock) -> None: ...

    for trainable, part in (
        (closure, "lock"),
        (default, "once"),
        (word, "twice"),
        (functools.partial(print, 1, task), r"args\[1\]\.lock"),
        (functools.partial(print, end=task), r"end\.lock"),
        (functools.partial(print, end={"a": 1, "b": closure}), r"end\.b\.lock"),
        (types.MethodType(closure, task), r"self\.lock"),
    ):
        with pytest.raises(
            InvalidFieldError, match=rf"cannot be pickled because of {part}: cannot pickle '_thread.lock'"
        ):
            dump_trainable(trainable)


class Hostile:
    """Cannot be printed."""

    def __repr__(self) -> str:
        raise SystemExit("no")


def test_a_config_that_exits_while_it_is_pickled_is_refused() -> None:
    class Exits:
        def __reduce__(self) -> Any:
            raise SystemExit

        __repr__ = Hostile.__repr__

    with pytest.raises(InvalidFieldError, match=r"^config\['b'\]=a Exits that cannot be printed: cannot be pickled"):
        dump_config({"a": 1, "b": Exits()})


def test_what_is_too_long_to_be_sent_is_refused_where_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.wire.LONGEST_FIELD", 1000)
    assert dump_arguments((bytes(500),), {}) and dump_result(bytes(500))
    with pytest.raises(InvalidFieldError, match=r"^args=10\d\d bytes: are too long: at most 1000 bytes"):
        dump_arguments((bytes(1000),), {})
    with pytest.raises(TypeError, match=r"what the method returned is too long: 10.. bytes of at most 1000"):
        dump_result(bytes(1000))

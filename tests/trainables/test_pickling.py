"""What is sent to lanes."""

from __future__ import annotations

import functools
import json
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy
import pytest

from fluid.errors import InvalidFieldError
from fluid.trainables.import_scan import imports_of
from fluid.trainables.pickling import Packed, dump_config, dump_trainable, pack_metrics, plain_metrics, unpack_metrics


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


def test_metrics() -> None:
    plain = {"i": 1, "f": 0.5, "s": "x", "n": None, "l": [1, {"a": (2,)}]}
    assert pack_metrics(plain) == plain
    packed = pack_metrics({"scalar": numpy.int64(3), "array": numpy.arange(2)})
    assert isinstance(packed, Packed)
    assert packed.plain == {"scalar": 3, "array": "array([0, 1])"}
    assert list(unpack_metrics(packed)["array"]) == [0, 1] and plain_metrics(packed) is packed.plain
    with pytest.raises(TypeError, match="bad"):
        pack_metrics({"good": 1, "bad": threading.Lock()})


class Hostile:
    """Raises whatever is asked of it."""

    ndim = 0

    def item(self) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise SystemExit("no")


class Unreadable:
    """Cannot be read again."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CYCLE: dict[str, Any] = {"a": 1}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({(0, 1): 5, None: True}, {"(0, 1)": 5, "None": True}),
        ([numpy.float32(0.5), numpy.array([2]), float("inf")], [0.5, 2, float("inf")]),
        (numpy.str_("x"), "x"),
        (Hostile(), "<Hostile>"),
        ({"a": [Hostile()]}, {"a": ["<Hostile>"]}),
        (10**400, 10**400),
        pytest.param(10**5000, "<int>", id="too long to print"),
        (b"\xff", "b'\\xff'"),
    ],
)
def test_any_metric_has_a_form_in_json(value: Any, written: Any) -> None:
    assert json.loads(json.dumps(plain_metrics(pack_metrics({"x": value})))) == {"x": written}
    named = pack_metrics({"y": 1, (1, "x"): value})
    assert isinstance(named, Packed) and named.plain == {"y": 1, "(1, 'x')": written}
    assert list(unpack_metrics(named)) == ["y", (1, "x")]


@pytest.mark.parametrize("value", [Unreadable(), CYCLE, nested(100), {numpy.int64(3): 0.9}])
def test_whatever_a_metric_is_the_driver_can_write_it(value: Any) -> None:
    packed = pack_metrics({"plain": 1, "x": value})
    assert json.loads(json.dumps(plain_metrics(packed))).keys() == {"plain", "x"}
    assert unpack_metrics(packed)["plain"] == 1, "also where it cannot be read"


def test_what_nests_too_deep_to_be_pickled_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be pickled: x: "):
        pack_metrics({"x": nested(100_000)})


def test_a_config_that_exits_while_it_is_pickled_is_refused() -> None:
    class Exits:
        def __reduce__(self) -> Any:
            raise SystemExit

        __repr__ = Hostile.__repr__

    with pytest.raises(InvalidFieldError, match=r"^config\['b'\]=a Exits that cannot be printed: cannot be pickled"):
        dump_config({"a": 1, "b": Exits()})

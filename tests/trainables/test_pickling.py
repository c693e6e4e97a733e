"""What is sent to lanes."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import types
from pathlib import Path

import numpy
import pytest

from fluid.errors import InvalidFieldError
from fluid.trainables.import_scan import imports_of
from fluid.trainables.pickling import Packed, dump_config, dump_trainable, pack_metrics


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


def test_metrics() -> None:
    plain = {"i": 1, "f": 0.5, "s": "x", "n": None, "l": [1, {"a": (2,)}]}
    assert pack_metrics(plain) == plain
    packed = pack_metrics({"scalar": numpy.int64(3), "array": numpy.arange(2)})
    assert isinstance(packed, Packed)
    assert packed.plain == {"scalar": 3}
    assert list(pickle.loads(packed.payload)["array"]) == [0, 1]
    with pytest.raises(TypeError, match="bad"):
        pack_metrics({"good": 1, "bad": threading.Lock()})

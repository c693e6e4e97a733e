"""What a lane maps equals what the loader returned, and its bytes are in the file once."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fluid.shared_data.mapped_file import file_size, read_shared, write_shared
from fluid.shared_data.pickling import dump_shared


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    values: Any
    name: str


def write(value: Any, path: Path) -> int:
    """Writes a value to a file; returns the bytes of it that are not in a buffer."""
    pickled = dump_shared(value)
    with path.open("wb") as file:
        write_shared(file.fileno(), pickled)
    assert path.stat().st_size <= file_size(pickled)
    return len(pickled.pickle)


def read(path: Path) -> Any:
    with path.open("rb") as file:
        return read_shared(file.fileno())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "value"


ROWS = np.arange(6000.0).reshape(20, 300)
ARRAYS = {
    "plain": ROWS,
    "in Fortran's order": np.asfortranarray(ROWS),
    "every other column": ROWS[:, ::2],
    "transposed": ROWS.reshape(20, 30, 10).transpose(2, 0, 1),
    "read-only": np.frombuffer(bytes(8000), np.int64),
    "times": np.arange("2020-01-01", "2025-01-01", dtype="M8[D]"),
    "durations": np.arange(5000).astype("m8[ms]"),
    "big-endian": ROWS.astype(">f4"),
    "records": np.zeros(1000, [("a", "i4"), ("b", "f8")]),
    "texts": np.array(["abc", "d"] * 500),
    "booleans": ROWS > 7,
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays(array: np.ndarray, path: Path) -> None:
    assert write({"data": [array, 1]}, path) < 1000, "the array is in a buffer"
    back = read(path)["data"][0]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype
    assert not back.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        back[0] = back[1]


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.array(5), np.array([{"a": 1}, None])], ids=repr)
def test_arrays_without_bytes_of_their_own(array: np.ndarray, path: Path) -> None:
    write(array, path)
    back = read(path)
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


def test_a_map_of_a_file_becomes_an_array(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    assert write(np.load(tmp_path / "rows.npy", mmap_mode="r"), path) < 1000
    (tmp_path / "rows.npy").unlink()
    np.testing.assert_array_equal(read(path), ROWS)


def test_containers_keep_their_types(path: Path) -> None:
    value = Pair(Record(ROWS, "rows"), {"nested": (ROWS, [ROWS[0]], {1, 2}), "text": "x" * 2000})
    write(value, path)
    back = read(path)
    assert type(back) is Pair
    assert type(back.first) is Record
    assert back.first.name == "rows"
    assert back.first.values is back.second["nested"][0], "what was one object is one again"
    assert back.second["text"] == value.second["text"]
    assert back.second["nested"][2] == {1, 2}


@pytest.mark.parametrize(
    "value", [None, 0, "text", [1, [2]], {"a": {"b": ()}}, b"x" * 5000], ids=lambda value: type(value)
)
def test_values_without_buffers(value: Any, path: Path) -> None:
    write(value, path)
    assert read(path) == value


def test_classes_that_other_processes_cannot_import(path: Path) -> None:
    class Local(NamedTuple):
        rows: Any

    write(Local(ROWS), path)
    back = read(path)
    np.testing.assert_array_equal(back.rows, ROWS)
    assert type(back).__name__ == "Local"


def test_arrow_tables(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"numbers": np.arange(5000), "texts": ["a", "bb"] * 2500})
    assert write(Record(table, "t"), path) < 2000
    back = read(path).values
    assert back.equals(table)
    assert not back["numbers"].chunk(0).buffers()[1].is_mutable


def test_data_frames(path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": np.arange(5000.0), "t": pandas.date_range("2020-01-01", periods=5000)})
    assert write(frame, path) < 4000
    pandas.testing.assert_frame_equal(read(path), frame)


# -- tensors


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64", "bool", "uint8", "complex64"])
def test_tensors(torch: Any, path: Path, kind: str) -> None:
    tensor = torch.arange(4000).reshape(40, 100).to(getattr(torch, kind))
    assert write([tensor], path) < 1000
    (back,) = read(path)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_tensors_of_one_storage_still_share_it(torch: Any, path: Path) -> None:
    whole = torch.arange(4000.0)
    write((whole, whole[10:20], whole.reshape(40, 100).t(), whole.view(torch.int32)), path)
    assert path.stat().st_size < 2 * 4 * 4000
    back, part, across, bits = read(path)
    assert torch.equal(across, whole.reshape(40, 100).t())
    assert torch.equal(bits, whole.view(torch.int32))
    back[15] = -1.0
    assert part[5] == -1.0


def test_a_write_to_a_tensor_stays_in_its_process(torch: Any, path: Path) -> None:
    write(torch.arange(4000.0), path)
    ours, others = read(path), read(path)
    ours += 1.0
    assert ours[0] == 1.0
    assert torch.equal(others, torch.arange(4000.0))
    assert torch.equal(read(path), torch.arange(4000.0)), "the file is as it was"


def test_parameters_and_odd_tensors(torch: Any, path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    odd = [torch.empty(0), torch.tensor(3), torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
    assert write({"weight": weight, "odd": odd}, path) < 5000
    back = read(path)
    assert type(back["weight"]) is torch.nn.Parameter
    assert back["weight"].requires_grad
    assert torch.equal(back["weight"], weight)
    for one, other in zip(back["odd"], odd, strict=True):
        assert torch.equal(one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other)


def test_data_sets_of_torch(torch: Any, path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(5000.0), torch.arange(5000))
    assert write(data, path) < 1000
    assert [float(part) for part in read(path)[7]] == [7.0, 7.0]


def test_what_cannot_be_pickled(path: Path) -> None:
    with pytest.raises((TypeError, pickle.PicklingError)):
        dump_shared(value for value in ())


def test_neither_library_is_imported_for_values_without_it() -> None:
    code = (
        "import sys; from fluid.shared_data.pickling import dump_shared; dump_shared([1, 'a']);"
        "assert not {'numpy', 'torch'} & sys.modules.keys()"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0

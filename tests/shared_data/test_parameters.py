"""Parameters of ``tune.with_parameters`` in lanes of the local backend, without a Ray cluster."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fluid import FluidExecutor, InvalidFieldError, Trial, TrialGroup
from fluid.backends.hosts import memory as host_memory
from fluid.shared_data.parameters import dump_with_parameters
from fluid.trainables.parted_pickle import load_pickled

pytest.importorskip("ray.tune")
import ray
from ray import tune

pa = pytest.importorskip("pyarrow")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

LANES = 2
ROWS = 1 << 17
MIB = 1 << 20


def file_of(address: int) -> str | None:
    """The file that an address of this process is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[5] if "/" in line else None
    return None


def facts(rows: Any, table: Any, weights: Any, few: Any, names: list[str]) -> dict[str, Any]:
    """What a trial sees of its parameters; it then writes to its tensor."""
    column = table.column("rows").chunk(0).buffers()[1]
    found = {
        "totals": [int(rows.sum()), int(np.asarray(table.column("rows")).sum()), float(weights.sum()), names],
        "files": [file_of(address) for address in (rows.ctypes.data, column.address, weights.data_ptr())],
        "writable": [rows.flags.writeable, column.is_mutable, few.flags.writeable],
        "pid": os.getpid(),
        "ray": ray.is_initialized(),
    }
    weights += 1
    return found


def reports(config: dict[str, Any], **parameters: Any) -> None:
    tune.report(facts(**parameters))


class Steps(tune.Trainable):
    """Has its parameters from ``setup``."""

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        self.facts = facts(**parameters)

    def step(self) -> dict[str, Any]:
        return self.facts


def parameters() -> dict[str, Any]:
    rows = np.arange(ROWS)
    table = pa.table({"rows": rows})
    return {"rows": rows, "table": table, "weights": torch.ones(ROWS), "few": np.arange(5), "names": ["a"]}


def results(folder: Path, trainable: Any, trials: int) -> list[dict[str, Any]]:
    """The metrics of trials on two lanes."""
    group = TrialGroup([Trial(trainable, {}, budget=1) for _ in range(trials)])
    with FluidExecutor("local", devices=LANES, max_packing=1, run_dir=folder / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group)
        found = [dict(result.metrics) for result in handle.results()]
        handle.raise_failures()
    assert len(found) == trials
    return found


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the RAM disk."""
    (tmp_path / "ram").mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(tmp_path / "ram"))
    return tmp_path / "ram"


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [reports, Steps])
def test_all_lanes_map_one_file(trainable: Any, tmp_path: Path, ram: Path) -> None:
    found = results(tmp_path, tune.with_parameters(trainable, **parameters()), trials=3 * LANES)
    assert len({metrics["pid"] for metrics in found}) == 3 * LANES, "a process for each trial"
    (path,) = {path for metrics in found for path in metrics["files"]}
    assert path is not None and path.startswith(str(ram))
    total = ROWS * (ROWS - 1) // 2
    for metrics in found:
        assert metrics["totals"] == [total, total, float(ROWS), ["a"]], "what a trial writes, no other one sees"
        assert metrics["writable"] == [False, False, True], "a small one is in each lane"
        assert not metrics["ray"]
    assert not ray.is_initialized(), "no cluster is started"
    assert list(ram.iterdir()) == [], "it is gone with the session"


@pytest.mark.slow
def test_without_host_memory_they_map_a_file_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RAM_DISK", "/proc/there/is/none")
    found = results(tmp_path, tune.with_parameters(reports, **parameters()), trials=LANES)
    (path,) = {path for metrics in found for path in metrics["files"]}
    assert path is not None and path.startswith(str(tmp_path / "run"))
    assert not os.path.exists(path), "it is gone with the session"


@pytest.mark.slow
def test_closures_and_small_parameters_stay_as_they_were(tmp_path: Path) -> None:
    rows = np.arange(ROWS)

    def train(config: dict[str, Any], few: Any) -> None:
        tune.report({"writable": [rows.flags.writeable, few.flags.writeable], "file": file_of(rows.ctypes.data)})

    (seen,) = results(tmp_path, tune.with_parameters(train, few=np.arange(5)), trials=1)
    assert seen["writable"] == [True, True]
    assert seen["file"] is None


# -- the pickle


def get_rows(config: dict[str, Any], rows: Any) -> Any:
    return rows


def test_the_pickle_can_be_read_from_bytes_and_written_again() -> None:
    trainable = tune.with_parameters(get_rows, rows={"rows": np.arange(ROWS), "weights": torch.ones(ROWS)})
    data = dump_with_parameters(trainable)
    assert len(data) < 1.01 * 12 * ROWS, "the data are in it once"
    again = dump_with_parameters(load_pickled(data))
    assert abs(len(again) - len(data)) <= 64, "data begin at multiples of 64 bytes"
    for loaded in (load_pickled(data), load_pickled(again)):
        first, second = loaded({}), loaded({})
        np.testing.assert_array_equal(first["rows"], np.arange(ROWS))
        assert not first["rows"].flags.writeable
        first["weights"] += 1
        assert second["weights"].sum() == ROWS


def test_a_pickler_that_knows_nothing_of_parts_takes_the_data_in() -> None:
    trainable = tune.with_parameters(get_rows, rows=np.arange(ROWS))
    (registry,) = (
        cell.cell_contents
        for cell in load_pickled(dump_with_parameters(trainable)).__closure__
        if type(cell.cell_contents).__name__ == "TrialParameters"
    )
    (name,) = registry._values
    for copied in (pickle.loads(pickle.dumps(registry)), copy.deepcopy(registry)):
        np.testing.assert_array_equal(copied.get(name), np.arange(ROWS))


def test_large_objects_that_are_no_arrays_are_unpickled_once_per_lane() -> None:
    texts = [str(number) * 10 for number in range(1 << 18)]
    loaded = load_pickled(dump_with_parameters(tune.with_parameters(get_rows, rows=(texts, np.zeros(MIB // 8)))))
    assert loaded({})[0] == texts
    assert loaded({}) is loaded({})


def test_a_parameter_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    trainable = tune.with_parameters(reports, lock=threading.Lock())
    with pytest.raises(InvalidFieldError, match=r"because of .*lock") as raised:
        results(tmp_path, trainable, trials=1)
    assert raised.value.field == "trainable"

"""Checkpoints in host memory beside those of residents: counted while they are there, moved and deleted as others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fluid.lane.checkpoints.files import locked_for_reading, move
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.store import CheckpointStore, OwnStore, delete_places, own_store, set_own_store
from fluid.lane.protocol import LaneOptions

TOKEN = "0123456789abcdef"


def write(folder: str) -> None:
    Path(folder, "weights").write_bytes(b"x" * 1000)


@pytest.fixture
def own(tmp_path: Path) -> OwnStore:
    memory, run = tmp_path / f"fluid-{TOKEN}-localhost", tmp_path / "run"
    memory.mkdir()
    run.mkdir()
    StoreLedger(str(memory)).create(1500, 1500)
    return OwnStore(CheckpointStore(0, str(run), str(memory)), str(run), str(memory))


def used(own: OwnStore) -> int:
    return StoreLedger(own.memory_folder).read().used


def test_the_ledger_counts_what_is_written_until_it_is_deleted(own: OwnStore) -> None:
    stored = own.store.save_in_memory("t+tune", 1, write)
    assert stored is not None and stored.in_memory and used(own) == 1000
    assert own.store.save_in_memory("t+tune", 2, write) is None, "there is room for one"
    assert used(own) == 1000
    places = own.places_of(stored.path)
    with locked_for_reading(stored.path) as exists:
        delete_places(places)
        assert exists and os.path.isdir(stored.path) and used(own) == 1000, "it is being read"
    delete_places(places)
    delete_places(places)
    assert os.listdir(own.memory_folder) and not os.path.exists(os.path.dirname(stored.path)) and used(own) == 0


def test_one_that_the_host_has_moved_to_disk_is_found_and_deleted_there(own: OwnStore) -> None:
    stored = own.store.save_in_memory("t+tune", 1, write)
    assert stored is not None
    in_memory, on_disk = own.places_of(stored.path)
    assert move(in_memory, os.path.dirname(on_disk)) and os.path.isdir(on_disk)
    assert own.places_of(on_disk) == (on_disk,)
    delete_places((in_memory, on_disk))
    assert os.listdir(os.path.join(own.run_folder, "trials")) == []


def test_a_lane_on_another_machine_than_the_driver_has_no_memory_that_the_driver_reads(own: OwnStore) -> None:
    assert own.is_of_driver
    assert not own._replace(memory_folder=f"/dev/shm/fluid-{TOKEN}-node-1").is_of_driver
    assert not own._replace(memory_folder="").is_of_driver


def test_a_lane_makes_its_store_known(own: OwnStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.lane.checkpoints.store._own", None)
    assert own_store() is None
    options = LaneOptions(0, run_folder=own.run_folder, memory_folder=own.memory_folder)
    set_own_store(own.store, options)
    assert own_store() == own

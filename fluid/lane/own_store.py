"""The store of this lane's checkpoints in host memory, for code that writes others there than those of residents."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

from fluid.lane.checkpoint_files import delete_unread
from fluid.lane.checkpoint_paths import host_of, settled_path
from fluid.lane.checkpoint_seal import sealed_bytes
from fluid.lane.checkpoint_store import CheckpointStore
from fluid.lane.messages import LaneOptions
from fluid.lane.store_ledger import StoreLedger

#: The driver's machine, by the name in the paths of checkpoints.
_DRIVERS = "localhost"


class OwnStore(NamedTuple):
    """Where this lane writes checkpoints, and the run's folder on its machine."""

    store: CheckpointStore
    run_folder: str
    memory_folder: str

    @property
    def is_of_driver(self) -> bool:
        """Whether the driver's process can read what is written to this machine's memory."""
        return bool(self.memory_folder) and host_of(os.path.join(self.memory_folder, "")) == _DRIVERS

    def places_of(self, path: str) -> tuple[str, ...]:
        """Where a checkpoint may be that was written to host memory: there, or where the host moves it on disk."""
        settled = settled_path(path, self.run_folder)
        return (path,) if settled is None else (path, settled)


_own: OwnStore | None = None


def set_own_store(store: CheckpointStore, options: LaneOptions) -> None:
    """Makes a lane's store known in its process."""
    global _own
    _own = OwnStore(store, options.run_folder, options.memory_folder)


def own_store() -> OwnStore | None:
    """The store of the lane that this process is; ``None`` in a process that is none."""
    return _own


def delete_places(places: tuple[str, ...]) -> None:
    """Deletes a checkpoint that no resident needs, unless it is being read.

    Args:
        places: as :meth:`OwnStore.places_of` returned; the first one is in host memory.
    """
    in_memory, *on_disk = places
    folder = os.path.dirname(in_memory)
    ledger, size = StoreLedger(os.path.dirname(folder)), sealed_bytes(in_memory) or 0
    delete_unread(in_memory, lambda: ledger.correct(-size))
    ledger.close()
    emptied = [folder]
    for place in on_disk:
        delete_unread(place)
        emptied += [os.path.dirname(place), os.path.dirname(os.path.dirname(place))]
    for folder in emptied:
        with suppress(OSError):  # It has other checkpoints, or was never made.
            os.rmdir(folder)

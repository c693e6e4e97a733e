"""What backends and launchers can do, too, that keep checkpoints: those that outlive the run, and those in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from fluid.engine.checkpoint_places import CheckpointValue
from fluid.keeping import WorstKept


@runtime_checkable
class KeepingBackend(Protocol):
    """A backend of lanes that save trials for good (:class:`fluid.keeping.KeepRule`).

    ``fetch_kept`` is for any thread; the others are for the thread that calls the backend. None waits for a lane.
    """

    def set_bar(self, group: str, bar: WorstKept | None, room: int | None) -> None:
        """Tells lanes what is worth keeping; a lane that does not know it yet keeps more.

        Args:
            group: the group whose trials are compared.
            bar: the value that an iteration must beat; ``None`` if any will do.
            room: bytes that are left of the quota; ``None`` if there is no quota.
        """
        ...

    def discard_kept(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint from those that outlive the run, on another machine.

        Args:
            host: the machine's name.
            path: the checkpoint.
            demote: whether the trial may still be restored from it.
        """
        ...

    def fetch_kept(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine; waits for that.

        Args:
            host: the machine's name.
            path: the checkpoint there.
            target: its folder here, which appears as a whole.

        Raises:
            OSError: it cannot be fetched.
        """
        ...


@runtime_checkable
class FetchingLauncher(Protocol):
    """A launcher of lanes on several machines."""

    def fetch(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine: see :meth:`KeepingBackend.fetch_kept`."""
        ...


class CheckpointStores(Protocol):
    """The stores of a session's hosts: each keeps the checkpoints of its lanes in host memory and on disk.

    They work whether or not a lane is there. No method waits.
    """

    def value(self, values: Mapping[str, CheckpointValue]) -> None:
        """Tells all of them, also those to come, what checkpoints of trials are worth, by trial."""
        ...

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        """Drops what they know of a trial, and deletes its checkpoints, except those that outlive the run.

        Args:
            trial_id: the trial, of which no lane saves anything any more.
            keep_newest: whether its newest one becomes one of those.
        """
        ...

    def persist(self, host: str, trial_id: str, path: str, *, keep: bool) -> None:
        """Copies a checkpoint to disk, on its machine; always answered by a CheckpointPersisted.

        Args:
            host: name of the machine.
            trial_id: the trial.
            path: where its checkpoint was written: to host memory, or, with ``keep``, to disk; it stays there.
            keep: whether the copy is to outlive the run.
        """
        ...

    def discard(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint from those that outlive the run: see :meth:`KeepingBackend.discard_kept`."""
        ...

    def prefetch(self, host: str, trial_id: str, path: str, source: tuple[str, int] | None) -> None:
        """Has a host bring a checkpoint into its memory, if that is worth it.

        Args:
            host: name of the machine.
            trial_id: the trial.
            path: where its checkpoint was written.
            source: where the checkpoints of the machine that has it are served; ``None`` if that is the host itself.
        """
        ...

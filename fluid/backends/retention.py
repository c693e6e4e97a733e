"""What backends and launchers can do, too, that keep checkpoints which outlive the run."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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

"""Keeps large payloads, pickled trainables and configs, once per host, in files that all its lanes read.

They are kept in host memory, or on disk where there is too little of it. A file appears whole: it is written under a
temporary name and then renamed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress

from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.folders import HostFolders

#: A payload goes to host memory if that has room for so many of its size.
_ROOM = 4


class PayloadStore:
    """The payloads that a host keeps, by name.

    Args:
        folders: the host's.

    Attributes:
        folders: where lanes find the payloads. They are this host's alone: another one of the session may be on this
            machine.
    """

    def __init__(self, folders: HostFolders) -> None:
        token = secrets.token_hex(8)
        self._memory_folder = folders.memory_folder
        self.folders = tuple(os.path.join(folder, token) for folder in folders.payloads)
        self._paths: dict[str, str] = {}
        #: The payload that is being written: its name, its file under a temporary name, and the descriptor.
        self._draft: tuple[str, str, int] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def write(self, name: str, data: bytes, *, size: int, offset: int = 0) -> bool | None:
        """Writes part of a payload; the parts of one come in order, and those of others not in between.

        Args:
            name: the payload's.
            data: the part.
            size: of the whole payload, bytes.
            offset: where the part begins; at 0 the payload begins anew.

        Returns:
            ``None`` before the last part; then whether the payload is kept: there may be no space.
        """
        is_last = offset + len(data) >= size
        if offset == 0:
            self._discard_draft()
            self._begin(name, size)
        if self._draft is None or self._draft[0] != name:
            return False if is_last else None
        try:
            self._append(data)
            if is_last:
                self._finish()
        except OSError:
            self._discard_draft()
        return name in self._paths if is_last else None

    def drop(self, name: str) -> None:
        """Deletes a payload, if it is there; lanes that have opened it can still read it."""
        if self._draft is not None and self._draft[0] == name:
            self._discard_draft()
        path = self._paths.pop(name, None)
        if path is not None:
            with suppress(OSError):
                os.unlink(path)

    def close(self) -> None:
        """Deletes all payloads."""
        self.abandon()
        self._paths.clear()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # Other hosts may use it.
            os.rmdir(os.path.dirname(self.folders[-1]))

    def abandon(self) -> None:
        """Closes what is open."""
        draft, self._draft = self._draft, None
        if draft is not None:
            os.close(draft[2])

    def _begin(self, name: str, size: int) -> None:
        """Opens the file of a payload, if that is possible."""
        for folder in self.folders:
            draft = os.path.join(folder, f".{name}")
            try:
                if folder != self.folders[-1] and host_memory.free_bytes(self._memory_folder) < _ROOM * size:
                    continue
                os.makedirs(folder, mode=0o700, exist_ok=True)
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError:
                continue
            self._draft = (name, draft, descriptor)
            return

    def _append(self, data: bytes) -> None:
        assert self._draft is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._draft[2], view) :]

    def _finish(self) -> None:
        assert self._draft is not None
        name, draft, descriptor = self._draft
        path = os.path.join(os.path.dirname(draft), name)
        os.rename(draft, path)
        self._paths[name] = path
        self._draft = None
        os.close(descriptor)

    def _discard_draft(self) -> None:
        if self._draft is not None:
            _, draft, descriptor = self._draft
            self._draft = None
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(draft)

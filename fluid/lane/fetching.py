"""Fetches a checkpoint from the server of the machine that has it, :mod:`fluid.backends.hosts.checkpoint_server`."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid._private_files import make_folder
from fluid.lane.checkpoint_files import iteration_of
from fluid.lane.checkpoint_seal import damage_by_sums
from fluid.lane.checkpoint_wire import (
    LENGTH,
    PIECE,
    STALL_S,
    CheckpointRequest,
    Manifest,
    Refusal,
    SendReport,
    checkpoint_key,
    receive_exactly,
    receive_message,
    send_message,
)
from fluid.lane.link_rates import LinkRates
from fluid.processes.handshake import Address, connect_all


class Fetched(NamedTuple):
    """A checkpoint that was fetched.

    Attributes:
        path: its folder on this machine.
        problem: why better ones were not taken, in one line; empty if none was found to be damaged.
    """

    path: str
    problem: str


def fetch_checkpoint(
    source: Address, key: bytes, path: str, place_for: Callable[[str, int], str], rates: LinkRates
) -> Fetched:
    """Fetches a checkpoint, or the best one that can replace it; checks its seal.

    Args:
        source: where the server of the machine that has it listens.
        key: the session's.
        path: where the checkpoint was written.
        place_for: tells from a checkpoint's name and its bytes where to put it; the folder appears as a whole.
        rates: of recent transfers.

    Raises:
        FileNotFoundError: that machine has none.
        OSError: it cannot be reached, the transfer stalls or breaks, or there is no room.
    """
    (sock,) = connect_all(source, checkpoint_key(key), [os.getpid()])
    with sock:
        sock.settimeout(STALL_S)
        damaged: dict[str, str] = {}
        while True:
            send_message(sock, CheckpointRequest(path, list(damaged), rates.get(source[0])))
            answer = receive_message(sock)
            problem = "; ".join(damaged.values())
            if isinstance(answer, Refusal):
                raise FileNotFoundError("; ".join(filter(None, (problem, answer.reason))))
            if not isinstance(answer, Manifest):
                raise ConnectionError(f"the server answered {answer}")
            name = _checked(os.path.basename(answer.place))
            target = place_for(name, answer.size)
            damage = _receive(sock, answer, target, source[0], rates)
            if damage is None:
                return Fetched(target, problem)
            damaged[answer.place] = f"the checkpoint of iteration {iteration_of(name)} is damaged: {damage}"


def _receive(sock: socket.socket, manifest: Manifest, target: str, ip: str, rates: LinkRates) -> str | None:
    """Writes what is sent to a folder, which appears if it is whole; returns the damage otherwise."""
    parent, name = os.path.split(target)
    make_folder(parent)
    draft = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        clock = MonotonicClock()
        begun = clock.now()
        contents = _Contents(sock, manifest)
        sums = _write(contents.pieces(), manifest, draft)
        report = receive_message(sock)
        if not isinstance(report, SendReport):
            raise ConnectionError(f"the server sent {report} after the files")
        rates.record(ip, contents.received, max(1e-9, clock.now() - begun), report.seconds)
        damage = damage_by_sums(draft, sums)
        if damage is None:
            try:
                os.rename(draft, target)
            except OSError:
                if not os.path.isdir(target):  # Another lane has fetched it at the same time.
                    raise
        return damage
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Contents:
    """The contents of a checkpoint's files as they come in.

    Attributes:
        received: bytes that have come over the connection.
    """

    def __init__(self, sock: socket.socket, manifest: Manifest) -> None:
        self._socket = sock
        self._manifest = manifest
        self.received = 0

    def pieces(self) -> Iterator[memoryview]:
        """Yields them; a piece is valid until the next one is asked for."""
        return self._decompressed() if self._manifest.compressed else self._plain()

    def _plain(self) -> Iterator[memoryview]:
        left = self._manifest.size
        buffer = memoryview(bytearray(min(left, PIECE)))
        while left:
            count = self._socket.recv_into(buffer[: min(left, PIECE)])
            if not count:
                raise ConnectionError("the other side closed the connection")
            left -= count
            self.received += count
            yield buffer[:count]

    def _decompressed(self) -> Iterator[memoryview]:
        left = self._manifest.size
        try:
            for piece in self._inflated():
                left -= len(piece)
                if left < 0:
                    raise ConnectionError("more data was received than announced")
                if piece:
                    yield memoryview(piece)
        except zlib.error as error:
            raise ConnectionError(f"what was received is not compressed data: {error}") from error
        if left:
            raise ConnectionError(f"{left} bytes less than announced were received")

    def _inflated(self) -> Iterator[bytes]:
        decompressor = zlib.decompressobj()
        while data := self._packed():
            while data:
                yield decompressor.decompress(data, PIECE)
                data = decompressor.unconsumed_tail
        yield decompressor.flush()

    def _packed(self) -> bytes | bytearray:
        """Receives a piece of compressed data; empty at the end."""
        (length,) = LENGTH.unpack(receive_exactly(self._socket, LENGTH.size))
        if length > 2 * PIECE:
            raise ConnectionError(f"a piece of {length} bytes is too long")
        self.received += length
        return receive_exactly(self._socket, length)


def _write(pieces: Iterator[memoryview], manifest: Manifest, folder: str) -> dict[str, tuple[int, int]]:
    """Writes files; returns the length and the CRC-32 of each."""
    for path in manifest.folders:
        os.mkdir(os.path.join(folder, _checked(path)), 0o700)
    sums = {}
    piece = memoryview(b"")
    for path, mode, size in manifest.files:
        crc, left = 0, size
        # The folder was empty, and links come last: nothing outside it can be written to.
        descriptor = os.open(os.path.join(folder, _checked(path)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, (mode & 0o777) | 0o600)
            while left:
                piece = piece or next(pieces)
                part = piece[: min(left, len(piece))]
                crc = zlib.crc32(part, crc)
                left -= len(part)
                piece = piece[len(part) :]
                while part:
                    part = part[file.write(part) :]
        sums[path] = (size, crc)
    for path, target in manifest.links:
        os.symlink(target, os.path.join(folder, _checked(path)))
    with suppress(StopIteration):
        next(pieces)  # So that the end of the data is read.
        raise ConnectionError("more data was received than announced")
    return sums


def _checked(path: str) -> str:
    """Returns a path that is within the folder to which it is relative.

    Raises:
        ConnectionError: it is not.
    """
    parts = PurePosixPath(path).parts
    if not parts or "\0" in path or path.startswith("/") or ".." in parts:
        raise ConnectionError(f"{path!r} is no name of a file in a checkpoint")
    return path

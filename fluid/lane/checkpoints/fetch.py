"""Fetches a checkpoint from the server of the machine that has it, :mod:`fluid.backends.hosts.checkpoints.server`."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid._private_files import make_folder
from fluid.lane.checkpoints.files import iteration_of
from fluid.lane.checkpoints.seal import damage_by_sums
from fluid.processes.handshake import Address, connect_all, derive_key
from fluid.wire import Frame, decoder, encode

# -- checkpoint wire -----------------------------------------------------------------------------
#
# What a lane and the server of another machine's checkpoints say to each other.
#
# On a connection of :mod:`fluid.processes.handshake` the lane sends a :class:`CheckpointRequest`. The answer is a
# :class:`Refusal`, or a :class:`Manifest`, the contents of its files one after the other, and a :class:`SendReport`.
# If the checkpoint turns out to be damaged, the lane sends another request.
#
# A message is a batch of one frame (:mod:`fluid.wire`), preceded by its length. The contents are as they are in the
# files, or, if they are compressed, a stream of zlib in pieces, each preceded by its length, and a length of 0 at the
# end.


#: The length of a message or of a piece.
LENGTH = struct.Struct("!I")
#: Bytes sent, received and compressed at a time.
PIECE = 1 << 20
#: Seconds without any progress after which either side gives up.
STALL_S = 60.0
#: Longest message: a manifest of a million files.
_LONGEST = 1 << 28


class CheckpointRequest(Frame, frozen=True):
    """From the lane: send a checkpoint, or the best one that can replace it.

    Attributes:
        path: where it was written.
        without: places on the server's machine of those that were sent and found to be damaged.
        rate: of recent transfers from there, bytes per second; ``None`` if it is not known.
    """

    path: str
    without: list[str]
    rate: float | None


class Manifest(Frame, frozen=True):
    """From the server: which checkpoint follows.

    Attributes:
        place: its folder on the server's machine.
        folders: paths of the folders in it, relative to it, parents first.
        files: of each of its files the path relative to it, the mode, and the length in bytes.
        links: of each symbolic link to something else than a file the path relative to it, and what it points to.
        compressed: whether the contents are.
    """

    place: str
    folders: list[str]
    files: list[tuple[str, int, int]]
    links: list[tuple[str, str]]
    compressed: bool

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, _, size in self.files)


class SendReport(Frame, frozen=True):
    """From the server, after the contents: the seconds in which it was not busy compressing."""

    seconds: float


class Refusal(Frame, frozen=True):
    """From the server: why no checkpoint follows."""

    reason: str


Message = CheckpointRequest | Manifest | SendReport | Refusal
_decode = decoder(Message)


def checkpoint_key(key: bytes) -> bytes:
    """Returns the key for these connections.

    Args:
        key: the session's.
    """
    return derive_key(key, b"checkpoints")


def send_message(sock: socket.socket, message: Message) -> None:
    """Sends a message."""
    data = encode([message])
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive_message(sock: socket.socket) -> Message:
    """Receives a message.

    Raises:
        OSError: the connection has ended or stalls, or what came is no message.
    """
    (length,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    if length > _LONGEST:
        raise ConnectionError(f"a message of {length} bytes is too long")
    try:
        (message,) = _decode(receive_exactly(sock, length))
    except ValueError as error:
        raise ConnectionError(f"what was received is no message: {error!r}") from error
    assert isinstance(message, Message)
    return message


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Receives so many bytes.

    Raises:
        OSError: the connection has ended or stalls.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the other side closed the connection")
        view = view[count:]
    return data


# -- link rates ----------------------------------------------------------------------------------
#
# How fast checkpoints have come from other machines, and whether to compress the next; pure but for the files.


#: A transfer of fewer bytes says little about the link.
_LEAST_BYTES = 1 << 20
#: How much faster a link is taken to be after a transfer that did not wait for it.
_GROWTH = 1.25
_FOLDER = ".link-rates"


class LinkRates:
    """The rates of recent transfers to this machine, which all of its lanes know.

    Args:
        folder: of the session, on this machine.
    """

    def __init__(self, folder: str) -> None:
        # Other machines may share the folder.
        self._folder = os.path.join(folder, _FOLDER, os.uname().nodename)

    def get(self, ip: str) -> float | None:
        """Returns the rate of recent transfers from a machine, bytes per second; ``None`` if there were none."""
        try:
            with open(self._file(ip), encoding="ascii") as file:
                rate = float(file.read())
        except (OSError, ValueError):
            return None
        return rate if rate > 0.0 else None

    def record(self, ip: str, received: int, seconds: float, waited: float) -> None:
        """Takes a transfer into account; see :func:`updated_rate`."""
        rate = updated_rate(self.get(ip), received, seconds, waited)
        if rate is not None:
            with suppress(OSError):  # The next transfer is not compressed, then.
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
                descriptor, draft = tempfile.mkstemp(dir=self._folder)
                with open(descriptor, "w", encoding="ascii") as file:
                    file.write(repr(rate))
                os.rename(draft, self._file(ip))

    def _file(self, ip: str) -> str:
        return os.path.join(self._folder, ip)


def updated_rate(known: float | None, received: int, seconds: float, waited: float) -> float | None:
    """Returns the rate of a link after a transfer, bytes per second.

    Args:
        known: the rate before; ``None`` if it was not known.
        received: bytes that came over the link.
        seconds: that this took, more than 0.
        waited: of these, the seconds for which the sender waited for the link.
    """
    if received < _LEAST_BYTES:
        return known
    measured = received / seconds
    if waited < 0.5 * seconds:
        # The sender was busy compressing. The link is faster than that; a rate that is taken for higher and higher ends
        # the compression at last, and is then measured again.
        return measured if known is None else max(measured, _GROWTH * known)
    return measured if known is None else 0.5 * (known + measured)


def compression_pays(link_rate: float, compress_rate: float, ratio: float) -> bool:
    """Whether data arrives earlier if it is compressed while it is sent.

    Args:
        link_rate: bytes per second that the link carries.
        compress_rate: bytes per second that the compressor takes in.
        ratio: bytes that come out of it per byte that goes in.
    """
    return max(1.0 / compress_rate, ratio / link_rate) < 1.0 / link_rate


# -- fetching ------------------------------------------------------------------------------------


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

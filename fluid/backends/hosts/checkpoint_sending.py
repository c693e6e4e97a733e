"""Sends a checkpoint over a connection: straight from its files, or compressed where it then arrives earlier."""

from __future__ import annotations

import os
import socket
import stat
import zlib

from fluid._clock import Clock
from fluid._logs import logger_of
from fluid.lane.checkpoints.fetch import LENGTH, PIECE, Manifest, SendReport, compression_pays, send_message
from fluid.lane.checkpoints.seal import SEAL

_log = logger_of(__name__)

#: The fastest level of zlib.
_LEVEL = 1
#: A transfer that takes fewer seconds is not worth a look at how well its data compresses.
_WORTH_A_LOOK_S = 0.05
#: Where samples for that are taken, as shares of all data, and the bytes of each.
_SAMPLES_AT, _SAMPLE_BYTES = (0.1, 0.5, 0.9), 1 << 16


def describe(folder: str) -> Manifest | None:
    """Returns the manifest of a checkpoint; ``None`` if it has no seal. A link to a file counts as the file."""
    folders: list[str] = []
    files: list[tuple[str, int, int]] = []
    links: list[tuple[str, str]] = []

    def add(path: str, prefix: str) -> None:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = prefix + entry.name
                if entry.is_file():
                    found = entry.stat()
                    files.append((name, stat.S_IMODE(found.st_mode), found.st_size))
                elif entry.is_symlink():
                    links.append((name, os.readlink(entry.path)))
                elif entry.is_dir():
                    folders.append(name)
                    add(entry.path, f"{name}/")

    add(folder, "")
    has_seal = any(path == SEAL for path, _, _ in files)
    return Manifest(folder, folders, files, links, compressed=False) if has_seal else None


def send_checkpoint(sock: socket.socket, manifest: Manifest, rate: float | None, clock: Clock) -> None:
    """Sends a checkpoint, which is locked.

    Raises:
        OSError: the connection broke or stalls, or a file cannot be read; the connection must then be closed.
    """
    manifest = manifest._replace(compressed=_should_compress(manifest, rate, clock))
    send_message(sock, manifest)
    begun = clock.now()
    waited = _send_compressed(sock, manifest, clock) if manifest.compressed else _send_plain(sock, manifest, clock)
    send_message(sock, SendReport(waited))
    _log.debug("%s was sent in %.3f s%s", manifest.place, clock.now() - begun, ", compressed" * manifest.compressed)


def _send_plain(sock: socket.socket, manifest: Manifest, clock: Clock) -> float:
    """Sends files as they are; returns the seconds that it took."""
    begun = clock.now()
    for path, _, size in manifest.files:
        if size:
            with open(os.path.join(manifest.place, path), "rb", buffering=0) as file:
                if sock.sendfile(file, count=size) != size:
                    raise OSError(f"{path} has become shorter")
    return clock.now() - begun


def _send_compressed(sock: socket.socket, manifest: Manifest, clock: Clock) -> float:
    """Sends files compressed; returns the seconds in which it waited for the network."""
    compressor = zlib.compressobj(_LEVEL)
    waited = 0.0

    def send(data: bytes) -> None:
        nonlocal waited
        if data:
            begun = clock.now()
            sock.sendall(LENGTH.pack(len(data)))
            sock.sendall(data)
            waited += clock.now() - begun

    for path, _, size in manifest.files:
        left = size
        with open(os.path.join(manifest.place, path), "rb", buffering=0) as file:
            while left:
                piece = file.read(min(left, PIECE))
                if not piece:
                    raise OSError(f"{path} has become shorter")
                left -= len(piece)
                send(compressor.compress(piece))
    send(compressor.flush())
    sock.sendall(LENGTH.pack(0))
    return waited


def _should_compress(manifest: Manifest, rate: float | None, clock: Clock) -> bool:
    """Whether a checkpoint arrives earlier if it is compressed, as far as samples of it tell.

    Args:
        manifest: the checkpoint's.
        rate: bytes per second that the link carries; ``None`` if it is not known.
        clock: measures the compressor.
    """
    if rate is None or manifest.size < _WORTH_A_LOOK_S * rate:
        return False
    sample = b"".join(_read_at(manifest, int(share * manifest.size)) for share in _SAMPLES_AT)
    begun = clock.now()
    packed = zlib.compress(sample, _LEVEL)
    if not sample:  # The files have just become shorter; sending them will tell.
        return False
    seconds = max(1e-9, clock.now() - begun)
    return compression_pays(rate, len(sample) / seconds, len(packed) / len(sample))


def _read_at(manifest: Manifest, offset: int) -> bytes:
    """Reads some bytes at an offset into all the data of a checkpoint, from one file."""
    for path, _, size in manifest.files:
        if offset < size:
            with open(os.path.join(manifest.place, path), "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(_SAMPLE_BYTES)
        offset -= size
    return b""

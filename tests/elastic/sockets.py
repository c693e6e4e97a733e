"""The ports at which processes accept connections."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress


def listening(pids: Sequence[int]) -> list[tuple[str, int]]:
    """The addresses and ports at which processes accept connections."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            rows = [line.split() for line in list(file)[1:]]
        ours = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
        found += [(readable(address), int(port, 16)) for address, port in ours]
    return found


def readable(address: str) -> str:
    """An IPv4 address of /proc/net/tcp as people write it; others as they are."""
    return socket.inet_ntoa(struct.pack("<I", int(address, 16))) if len(address) == 8 else address

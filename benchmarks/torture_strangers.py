"""Strangers on the ports of a session: processes that connect and do not know what to say.

python -SE benchmarks/torture_strangers.py WAY SECONDS SEED IP:PORT...
"""

from __future__ import annotations

import os
import random
import resource
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: What a stranger does, and with how many connections to each port at a time.
WAYS = {"silent": 300, "garbage": 20, "half_handshake": 50, "slow": 50, "many": 1200}
#: State of a listening socket in the system's lists.
_LISTENS = "0A"
#: What a client of HTTP, of a lane's connection and of TLS begin with; none of them goes on.
_BEGINNINGS = (b"GET / HT", b"\0\0\0\x20", b"\x16\x03\x01", b"")


def ports(processes: Iterable[int]) -> list[tuple[str, int]]:
    """Returns the addresses and ports on which processes listen."""
    listening: dict[str, tuple[str, int]] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS:
                    listening[f"socket:[{fields[9]}]"] = _address(fields[1], family)
    found = set()
    for process in processes:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    found.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    return sorted({listening[each] for each in found & listening.keys()})


def _address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """Reads an address of the system's lists: words of 32 bits in the machine's order, and the port."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    ip = socket.inet_ntop(family, b"".join(words) if sys.byteorder == "little" else bytes.fromhex(address))
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip), int(port, 16)


class Stranger:
    """Connections to a port that are made anew when they end.

    Args:
        address: of the port.
        way: one of :data:`WAYS`.
        draws: what is drawn from.
    """

    def __init__(self, address: tuple[str, int], way: str, draws: random.Random) -> None:
        self._address = address
        self._way = way
        self._draws = draws
        self._sockets: list[socket.socket] = []

    def go_on(self) -> None:
        """Connects, says something, and takes what is answered."""
        for sock in self._sockets[:]:
            try:
                gone = sock.recv(4096) == b""
                if self._way == "slow":
                    sock.send(self._draws.randbytes(1))
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                sock.close()
                self._sockets.remove(sock)
        if self._way == "many":
            for sock in self._sockets[: len(self._sockets) // 2]:
                sock.close()
            del self._sockets[: len(self._sockets) // 2]
        while len(self._sockets) < WAYS[self._way]:
            try:
                sock = socket.create_connection(self._address, timeout=0.2)
                self._sockets.append(sock)
                if self._way == "garbage":
                    sock.send(self._draws.randbytes(self._draws.randint(1, 20_000)))
                elif self._way == "half_handshake":
                    with suppress(TimeoutError):
                        sock.settimeout(0.02)
                        sock.recv(4096)
                    sock.send(self._draws.choice(_BEGINNINGS) + self._draws.randbytes(self._draws.randint(1, 40)))
                sock.setblocking(False)
            except OSError:
                break


def main() -> None:
    """Disturbs ports for some seconds."""
    way, seconds, draws = sys.argv[1], float(sys.argv[2]), random.Random(sys.argv[3])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    addresses = [text.rpartition(":") for text in sys.argv[4:]]
    strangers = [Stranger((ip, int(port)), way, draws) for ip, _, port in addresses]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for stranger in strangers:
            stranger.go_on()
        time.sleep(0.05)


if __name__ == "__main__":
    main()

"""How fast checkpoints have come from other machines, and whether to compress the next; pure but for the files."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

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

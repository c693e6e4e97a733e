"""What contexts were found to take on a GPU whose processes NVML does not list: shared by the lanes of a session, and
remembered from one session to the next.

A size that was found while no other process held memory on the GPU is exact. It is the same for each process of a GPU
model, driver and release of PyTorch, and is noted in the user's cache folder. Other sizes are differences of the whole
device's memory, which neighbours raise and lower by what they allocate and free meanwhile: their median counts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median_low
from typing import Any

from fluid._clock import MonotonicClock, nap
from fluid.gpu.driver_notes import read_note, write_note

_KIND = "context-bytes"
#: Bytes between which a context is taken to be where only the whole device's memory is known: less was found because
#: others freed memory meanwhile, more because they took some.
LEAST, MOST = 250e6, 3e9
#: Longest that a lane waits for another one of its device to make its context, and how often it looks, seconds.
PATIENCE_S = 5.0
_LOOK_S = 0.01


class ContextSizes:
    """Sizes of contexts on one device.

    Args:
        folder: where the lanes of the session have their files; empty for none.
        device: UUID of the GPU.
        about: what contexts depend on besides the driver: the GPU's model, and the release of PyTorch.
    """

    def __init__(self, folder: str, device: str, about: str) -> None:
        self._path = os.path.join(folder, f"context-{device.replace('/', '-')}") if folder else ""
        self._about = about
        #: What is known where there is no folder.
        self._alone: dict[str, Any] = {}

    @property
    def are_listed(self) -> bool:
        """Whether a lane of the device was listed by NVML under its own number, so that none has to guess."""
        return bool(self._read().get("listed"))

    @property
    def is_orderly(self) -> bool:
        """Whether every lane of the session has waited for its turn; else a difference may be that of two contexts."""
        return not self._read().get("hurried")

    @property
    def lanes(self) -> int:
        """Lanes that have made a context on the device in this session."""
        return int(self._read().get("lanes", 0))

    @property
    def estimate(self) -> float | None:
        """What a context takes, as far as is known, bytes; ``None`` if nothing is."""
        known, found = self.remembered, self._read().get("found", [])
        if known is not None:
            return known
        return min(MOST, max(LEAST, median_low(found))) if found else None

    @property
    def remembered(self) -> float | None:
        """The exact size, bytes; ``None`` if none was found yet, in any session."""
        with suppress(ValueError):
            known = float(read_note(_KIND, self._about))
            return known if 0.0 < known <= MOST else None
        return None

    @property
    def grown(self) -> float:
        """What libraries and kernels were seen to add to a context in this session, bytes."""
        return float(self._read().get("grown", 0.0))

    def add_lane(self, *, listed: bool) -> None:
        """Counts a lane that has made its context, and says whether NVML lists it."""
        self._update(lambda known: known.update(lanes=known.get("lanes", 0) + 1, listed=listed or known.get("listed")))

    def add(self, difference: float, *, exact: bool) -> None:
        """Adds by how much the device's memory grew with a context, bytes.

        Args:
            difference: without what is reserved for tensors.
            exact: whether no other process held memory there.
        """
        if exact and 0.0 < difference <= MOST:
            write_note(_KIND, repr(min(difference, self.remembered or difference)), self._about)
        self._update(lambda known: known.setdefault("found", []).append(difference))

    def add_growth(self, grown: float) -> None:
        """Adds by how many bytes a context grew once a trial had used it."""
        self._update(lambda known: known.update(grown=max(grown, known.get("grown", 0.0))))

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Waits until no other lane of the device makes its context; yields whether that is so.

        The wait has an end, as another lane may hang in its driver, or take a minute for a machine's first context.
        """
        with _locked(f"{self._path}.turn" if self._path else "") as is_alone:
            if not is_alone:
                self._update(lambda known: known.update(hurried=True))
            yield is_alone

    def _read(self) -> dict[str, Any]:
        if not self._path:
            return self._alone
        try:
            with open(self._path, encoding="ascii") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def _update(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes what the session's lanes know; not if there is no folder or space for it."""
        if not self._path:
            change(self._alone)
            return
        with _locked(f"{self._path}.lock") as is_alone, suppress(OSError):
            if is_alone:
                change(known := self._read())
                with open(f"{self._path}.new", "w", encoding="ascii") as file:
                    json.dump(known, file)
                os.replace(file.name, self._path)


@contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Locks a file for a while, which may take a few seconds; yields whether it is locked."""
    clock = MonotonicClock()
    deadline = clock.now() + PATIENCE_S
    try:
        file = open(path, "wb")  # noqa: SIM115
    except OSError:
        yield not path
        return
    with file:
        while (is_locked := _lock(file.fileno())) is False and clock.now() < deadline:
            nap(_LOOK_S)
        yield bool(is_locked)


def _lock(file: int) -> bool | None:
    """Locks a file, if no other process has; ``None`` where files cannot be locked, as on some network file systems."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True

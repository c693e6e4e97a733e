"""What trains in the run folders of an older version that tests/session/test_older_folders.py reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Counter:
    """Counts, and is saved and restored."""

    def setup(self, config: dict[str, Any]) -> None:
        self._step = float(config["step"])
        self._count = 0

    def step(self) -> dict[str, Any]:
        threading.Event().wait(0.02)
        self._count += 1
        return {"loss": self._step / self._count, "count": self._count}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "count").write_text(str(self._count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self._count = int((Path(folder) / "count").read_text(encoding="utf-8"))


def count_down(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A trial that cannot be saved."""
    for left in range(9, 0, -1):
        threading.Event().wait(0.02)
        yield {"loss": config["scale"] * left}

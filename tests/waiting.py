"""Waits for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 120.0
_LOOK_AGAIN_S = 0.02


def eventually(condition: Callable[[], Any]) -> Any:
    """Waits until a condition holds, and returns what it returned."""
    deadline = time.monotonic() + PATIENCE
    while not (held := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(_LOOK_AGAIN_S)
    return held

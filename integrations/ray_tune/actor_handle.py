"""What Tune's controller takes for the handle of an actor."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import ray


class _Method:
    """Answers ``handle.method.remote()`` at once."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.remote = answer


class StandIn:
    """Answers the two things that Tune asks of an actor before there is a first result.

    Args:
        trial_id: Tune's.
    """

    def __init__(self, trial_id: str) -> None:
        self._trial_id = trial_id
        self.get_auto_filled_metrics = _Method(self._metrics)
        self.get_current_ip_pid = _Method(lambda: (ray.util.get_node_ip_address(), os.getpid()))

    def _metrics(self, debug_metrics_only: bool = False) -> dict[str, Any]:
        return {
            "trial_id": self._trial_id,
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": ray.util.get_node_ip_address(),
        }

"""The actor handle that Tune's controller holds for a trial that runs in a lane, where there is no actor of Ray."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import ray

from fluid._clock import wall_seconds


class _LocalMethod:
    """Answers ``handle.method.remote()`` in the driver, at once."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.remote = answer


class LocalActorHandle:
    """Answers the two calls that Tune makes to an actor before its first result.

    Args:
        trial_id: Tune's.
        config: the trial's.
    """

    def __init__(self, trial_id: str, config: Any) -> None:
        self._trial_id, self._config = trial_id, config
        self.get_auto_filled_metrics = _LocalMethod(self._metrics)
        self.get_current_ip_pid = _LocalMethod(lambda: (ray.util.get_node_ip_address(), os.getpid()))

    def _metrics(self, debug_metrics_only: bool = False) -> dict[str, Any]:
        seconds = wall_seconds()
        return {
            "trial_id": self._trial_id,
            # One copy for all trials of a second: Tune keeps what is returned for every trial.
            "date": sys.intern(datetime.fromtimestamp(seconds).strftime("%Y-%m-%d_%H-%M-%S")),
            "timestamp": int(seconds),
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": ray.util.get_node_ip_address(),
            "config": self._config,
        }

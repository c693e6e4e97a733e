"""Devices of a Ray cluster that other jobs hold: who has them, and waiting until they are given back.

Sessions name their placement groups, so that other drivers can tell who holds what.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid._logs import logger_of
from fluid.backends.ray.api import gcs_address, pending_requests
from fluid.backends.ray.nodes import describe, free, require_total, total, wait_for_free
from fluid.errors import InvalidFieldError
from fluid.resources import Cluster, Device, DeviceKind

with try_import("Ray", extra="ray"):
    from ray.util.placement_group import placement_group_table


_log = logger_of(__name__)
_NAME = re.compile(r"^fluid/(?P<user>[^/]*)/(?P<host>[^/]*)/(?P<pid>\d+)/[0-9a-f]+$")
#: Holders that a message names.
_MOST_NAMED = 5
#: Seconds to wait for a given number of devices that other jobs use.
DEFAULT_TIMEOUT_S = 30.0
#: Seconds between two looks for a free device, and between two warnings that there is none.
_LOOK_S, _WARN_S = 0.5, 300.0


def await_free(kind: str, timeout: float | None) -> int:
    """Waits until a device is free, by calls to Ray, and warns of the wait.

    Args:
        kind: of the device.
        timeout: seconds to wait; ``None`` to wait as long as other jobs hold all.

    Returns:
        How many devices are free, at least one.

    Raises:
        InvalidFieldError: the cluster has no device of the kind, or the time is over.
    """
    clock = MonotonicClock()
    begun = warned = clock.now()
    there = wait_for_free(kind, 1)
    if not there and total(kind):
        _log.warning("%s; this session begins as soon as one is given back", occupied([kind]))
    while not there:
        now = clock.now()
        if not total(kind):
            raise InvalidFieldError("devices", None, describe(kind, 0))
        if timeout is not None and now >= begun + timeout:
            raise InvalidFieldError("devices", None, f"{occupied([kind])}; waited {timeout:g} s")
        if now >= warned + _WARN_S:
            warned = now
            _log.warning("%s; this session has waited for one for %.0f min", occupied([kind]), (now - begun) / 60.0)
        threading.Event().wait(_LOOK_S)
        there = free(kind)
    return there


def choose_devices(devices: int | Sequence[Device] | None, most: int | None, timeout: float | None) -> list[Device]:
    """Returns the devices to begin with, by calls to Ray.

    Args:
        devices: how many, or which; ``None`` for all that are free, for one of which it waits.
        most: most devices of a number.
        timeout: see :func:`await_free`.

    Raises:
        InvalidFieldError: see :func:`await_free`; or the cluster has fewer, and does not scale.
    """
    if isinstance(devices, Sequence):
        chosen = list(devices)
    else:
        kind: DeviceKind = "gpu" if total("gpu") else "cpu"
        count = await_free(kind, timeout) if devices is None else devices
        chosen = list(Cluster.of(count, kind=kind).devices[:most])
    if most is None and devices is not None:
        require_total(chosen)
    return chosen


def not_given(devices: Sequence[Device], timeout: float) -> InvalidFieldError:
    """Returns the error for devices that Ray has not given in time.

    Args:
        devices: those asked for.
        timeout: seconds waited.
    """
    what = occupied(sorted({device.kind for device in devices}))
    return InvalidFieldError("devices", len(devices), f"{what}; waited {timeout:g} s")


def warn_of_fewer(kind: str, taken: int) -> None:
    """Says that a session takes fewer devices than there are, where other sessions or jobs have reserved the rest."""
    there = total(kind)
    if taken < there and (holders := _holders(kind, without=os.getpid())):
        _log.warning(
            "this session takes %d of the Ray cluster's %d %ss, as others hold the rest: %s",
            taken,
            there,
            kind.upper(),
            "; ".join(holders),
        )


def occupied(kinds: Iterable[str]) -> str:
    """Says how many devices of each kind there are and are free, and who holds the others, by calls to Ray."""
    parts = []
    for kind in kinds:
        holders = _holders(kind)
        parts.append(describe(kind, free(kind)) + (f" (held: {'; '.join(holders)})" if holders else ""))
    return "; ".join(parts)


def _holders(kind: str, without: int | None = None) -> list[str]:
    try:
        groups = list(placement_group_table().values())
    except Exception as error:  # It only makes the message better.
        _log.debug("the placement groups of the Ray cluster cannot be listed: %s", error)
        return []
    mine = f"/{socket.gethostname()}/{without}/"
    return holders_in([group for group in groups if mine not in str(group.get("name") or "")], kind)


def holders_in(groups: Iterable[Mapping[str, Any]], kind: str) -> list[str]:
    """Returns who has reserved devices of a kind, those with most devices first.

    Tasks and actors outside placement groups are not known.

    Args:
        groups: placement groups as Ray's table has them.
        kind: of the devices.

    Returns:
        Such as ``["2 by ann's Fluid session (process 4711 on node-1)"]``.
    """
    held: Counter[str] = Counter()
    for group in groups:
        if group["state"] == "CREATED":
            held[_holder(group)] += sum(int(bundle.get(kind.upper(), 0)) for bundle in group["bundles"].values())
    named = [f"{count} by {holder}" for holder, count in held.most_common() if count]
    rest = len(named) - _MOST_NAMED
    return [*named[:_MOST_NAMED], *([f"and {rest} more holders"] if rest > 0 else [])]


def _holder(group: Mapping[str, Any]) -> str:
    name = str(group.get("name") or "")
    if found := _NAME.match(name):
        mine = found["pid"] == str(os.getpid()) and found["host"] == socket.gethostname()
        owner = "another session of this process" if mine else f"{found['user']}'s Fluid session"
        return owner if mine else f"{owner} (process {found['pid']} on {found['host']})"
    return f"placement group {name or group['placement_group_id']}"


# -- starvation ----------------------------------------------------------------------------------
#
# Warns of tasks and actors of Ray that wait for devices which the session holds, as those of a trial may.


#: Seconds between two looks; what waits at two of them is warned of.
LOOK_S = 10.0


class StarvationWatch:
    """Looks for tasks and actors that wait, and warns once.

    Args:
        kind: of the session's devices.
    """

    def __init__(self, kind: str) -> None:
        self._resource = kind.upper()
        self._clock = MonotonicClock()
        self._due = self._clock.now() + LOOK_S
        self._waited = False
        self._warned = False

    def look(self, held: int) -> None:
        """Looks if it is time to, by a call to Ray.

        Args:
            held: devices of the session.
        """
        if self._warned or self._clock.now() < self._due:
            return
        self._due = self._clock.now() + LOOK_S
        waiting = [request for request in pending_requests(gcs_address()) if request.get(self._resource, 0.0) > 0.0]
        if waiting and self._waited:
            self._warned = True
            _log.warning(
                "tasks or actors of Ray wait for %s, while this session holds %d %ss of the cluster: give them "
                'num_%ss=0, or leave them some, with FluidExecutor(backend="ray", devices=...)',
                waiting[0],
                held,
                self._resource,
                self._resource.lower(),
            )
        self._waited = bool(waiting)

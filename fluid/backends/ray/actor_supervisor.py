"""The thread that calls Ray, which may block, so that the driver's own thread never waits for Ray."""

from __future__ import annotations

import functools
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from fluid._imports import try_import
from fluid.backends.hosts.folders import SessionFolders, clear_host
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.lane_actor import LaneStart, run_lane
from fluid.backends.ray.nodes import NodeChanges
from fluid.backends.ray.placement import PIN_SHARE
from fluid.backends.ray.remote import call, make_actor_class, pickled
from fluid.errors import FluidError

with try_import("Ray", extra="ray"):
    import ray

_log = logging.getLogger(__name__)
#: Seconds between two checks of the nodes.
_LOOK_S = 1.0
#: Seconds for all nodes to be asked whether they are there.
_PROBE_S = 2.0
#: Seconds for killed actors to end, and for other machines to clear their folders: together as long as it may take.
_END_S = 2.0
_CLEAR_S = 3.0
CLOSE_S = _END_S + _CLEAR_S
_NO_CHANGES = NodeChanges()
#: The part of Ray's message about a death that says why; the rest are names, numbers and advice.
_WHY = re.compile(r"(?:(?<=actor is dead because )|Worker exit type: |The actor is temporarily unavailable)[^\n]+")
_ADVICE = ". Some common causes include"
_LONGEST_REASON = 300


class ActorSupervisor:
    """Starts and kills actors, notices their end, and checks the nodes.

    Args:
        devices: where actors run.
        session: the folders that other machines clear in the end.
        wake: called in another thread when an actor has ended.

    Attributes:
        on_change: called in another thread when devices or nodes have changed.
    """

    def __init__(self, devices: RayDevices, session: SessionFolders, wake: Callable[[], None]) -> None:
        self._devices = devices
        self._session = session
        self._wake = wake
        self.on_change: Callable[[], None] = lambda: None
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: The thread's own.
        self._handles: dict[int, Any] = {}
        self._calls: dict[int, Any] = {}
        self._ended: deque[tuple[int, str]] = deque()
        self._changes: deque[NodeChanges] = deque()
        self._actor_class = make_actor_class()
        self._thread = threading.Thread(target=self._run, name="fluid-ray", daemon=True)
        self._thread.start()

    def start(self, number: int, device_id: int, start: LaneStart) -> None:
        """Starts an actor; :meth:`ended` tells if that fails."""
        self._requests.put(functools.partial(self._start, number, device_id, start))

    def kill(self, number: int) -> None:
        """Kills an actor, if it is there; :meth:`ended` tells when it is gone."""
        self._requests.put(functools.partial(self._kill, number))

    def ended(self) -> list[tuple[int, str]]:
        """Returns the actors that have ended since the last call, and why, to be read after "lane 3"."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def changes(self, *, probe: bool) -> NodeChanges:
        """Returns what has changed since the last call; with ``probe``, after the nodes were asked, if they answer."""
        if probe:
            asked = threading.Event()
            self._requests.put(lambda: self._look(probe=True))
            self._requests.put(asked.set)
            asked.wait(_PROBE_S)
        if not self._changes:
            return _NO_CHANGES
        return NodeChanges.merged([self._changes.popleft() for _ in range(len(self._changes))])

    def ask(self, count: int) -> None:
        """Asks Ray for devices: see :meth:`fluid.backends.ray.devices.RayDevices.ask`."""
        self._requests.put(functools.partial(self._devices.ask, count))

    def give_back(self, index: int) -> None:
        """Gives Ray a device back: see :meth:`fluid.backends.ray.devices.RayDevices.give_back`."""
        self._requests.put(functools.partial(self._devices.give_back, index))

    def close(self, hosts: Sequence[str]) -> None:
        """Ends all actors; waits at most :data:`CLOSE_S` seconds for them.

        Args:
            hosts: other machines, which clear their folders.
        """
        self._requests.put(functools.partial(self._end, hosts))
        self._requests.put(None)
        self._thread.join(CLOSE_S)  # It may hang: Ray may not answer.

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_LOOK_S)
            except queue.Empty:
                request = self._look
            if request is None:
                return
            try:
                request()
            except Exception as error:  # Ray may raise anything once it is shut down.
                _log.debug("Ray: %s", error)

    def _start(self, number: int, device_id: int, start: LaneStart) -> None:
        try:
            options = self._devices.options_for(device_id)
            threads = self._devices.threads_for(device_id)
            actor = self._actor_class.options(**options, max_restarts=0, max_task_retries=0).remote()
            self._handles[number] = actor
            self._calls[number] = running = actor.run.remote(pickled(run_lane, start._replace(threads=threads)))
            running.future().add_done_callback(functools.partial(self._note_end, number))
        except Exception as error:
            self._tell(number, str(error) if isinstance(error, FluidError) else f"could not be started: {error}")

    def _kill(self, number: int) -> None:
        actor = self._handles.pop(number, None)
        if actor is not None:
            ray.kill(actor)

    def _look(self, *, probe: bool = False) -> None:
        changes = self._devices.check(probe=probe)
        if any(changes):
            self._changes.append(changes)
            self.on_change()

    def _end(self, hosts: Sequence[str]) -> None:
        if not ray.is_initialized():
            return
        for number in list(self._handles):
            with suppress(Exception):
                self._kill(number)
        running = list(self._calls.values())
        if running:
            ray.wait(running, num_returns=len(running), timeout=_END_S, fetch_local=False)
        clearing = [
            call(clear_host, self._session, host, resources={f"node:{host}": PIN_SHARE})
            for host in hosts
            if not self._devices.is_gone(host)
        ]
        if clearing:
            ray.wait(clearing, num_returns=len(clearing), timeout=_CLEAR_S, fetch_local=False)

    # -- in a thread of Ray's ------------------------------------------------------------------------------

    def _note_end(self, number: int, running: Future[Any]) -> None:
        error = running.exception()
        self._tell(number, "ended" if error is None else _describe(error))

    def _tell(self, number: int, reason: str) -> None:
        self._ended.append((number, reason))
        # Its work is over, but its process would wait for more.
        self._requests.put(functools.partial(self._forget, number))
        self._wake()

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)
        self._kill(number)


def _describe(error: BaseException) -> str:
    """Why an actor ended, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"ended with {type(cause).__name__}: {cause}"[:_LONGEST_REASON]
    text = str(error).strip()
    # The last line is that of the traceback, if there is one.
    why = _WHY.search(text)
    reason = text.rpartition("\n")[2] if why is None else why[0].partition(_ADVICE)[0]
    return f"died: {reason}"[:_LONGEST_REASON]

"""The thread that calls Ray, which may block, so that the driver's own thread never waits for Ray.

It starts and kills the actors of hosts, notices their end, and checks the nodes.
"""

from __future__ import annotations

import functools
import queue
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from fluid._imports import try_import
from fluid._logs import logger_of
from fluid._waiting import BackgroundThread
from fluid.backends.hosts.folders import SessionFolders, clear_host
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.host_actor import HostStart, run_host
from fluid.backends.ray.nodes import NodeChanges
from fluid.backends.ray.placement import PIN_SHARE
from fluid.backends.ray.remote import call, make_host_class, pickled
from fluid.backends.ray.starvation import StarvationWatch

with try_import("Ray", extra="ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_log = logger_of(__name__)
#: Seconds between two checks of the nodes.
_LOOK_S = 1.0
#: Seconds for killed actors to end and for machines whose host has died to clear their folders.
_END_S = 3.0
#: The part of Ray's message about a death that says why; the rest are names, numbers and advice.
_WHY = re.compile(r"(?:(?<=actor is dead because )|Worker exit type: |The actor is temporarily unavailable)[^\n]+")
_ADVICE = ". Some common causes include"
_LONGEST_REASON = 300


class Checked(NamedTuple):
    """The nodes were checked because a host has gone.

    Attributes:
        number: the host's.
    """

    number: int


class ActorEnded(NamedTuple):
    """A host's actor has ended, or could not be started; ``reason`` is to be read after "its host"."""

    number: int
    reason: str


class HostActors:
    """Starts and kills the actors of hosts, notices their end, and checks the nodes.

    Args:
        devices: the session's, on the nodes that are checked.
        session: its folders, which machines clear whose host has died.
        wake: called in another thread when there is something to :meth:`take`.
    """

    def __init__(self, devices: RayDevices, session: SessionFolders, wake: Callable[[], None]) -> None:
        self._devices = devices
        self._session = session
        self._wake = wake
        self._starvation = StarvationWatch(devices.devices[0].kind)
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: The thread's own.
        self._handles: dict[int, Any] = {}
        self._calls: dict[int, Any] = {}
        self._host_class = make_host_class()
        self._news: deque[Checked | ActorEnded] = deque()
        self._changes: deque[NodeChanges] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._thread = BackgroundThread("fluid-ray", self._run)
        self._thread.start()

    def start(self, node: str, start: HostStart) -> None:
        """Starts a host on a node; :meth:`take` tells if that fails."""
        self._requests.put(functools.partial(self._start, node, start))

    def kill(self, number: int) -> None:
        """Kills a host's actor, if it is there."""
        self._requests.put(functools.partial(self._kill, number))

    def check(self, number: int) -> None:
        """Checks the nodes now, as a host has gone; :meth:`take` tells when that is done."""
        self._requests.put(functools.partial(self._check, number))

    def request(self, work: Callable[[], None]) -> None:
        """Makes a call to Ray in the thread; an error that it raises is logged only."""
        self._requests.put(work)

    def take(self) -> list[Checked | ActorEnded]:
        """Returns what has become of hosts since the last call, in order."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def take_changes(self) -> list[NodeChanges]:
        """Returns what has become of the nodes since the last call."""
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def notify_of_changes(self, notify: Callable[[], None]) -> None:
        """Sets what is called, in another thread, when there is something to :meth:`take_changes`."""
        self._notify = notify
        if self._changes:
            notify()

    def close(self, hosts: Sequence[str]) -> bool:
        """Kills the actors that are left, and ends the thread; waits for it a few seconds, as Ray may not answer.

        Args:
            hosts: machines whose host has died: they clear their folders.

        Returns:
            Whether Ray answers.
        """
        self._requests.put(functools.partial(self._end, hosts))
        self._requests.put(None)
        self._thread.join(_LOOK_S + _END_S)
        return not self._thread.is_alive()

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

    def _start(self, node: str, start: HostStart) -> None:
        try:
            actor = self._host_class.options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote()
            self._handles[start.number] = actor
            self._calls[start.number] = running = actor.run.remote(pickled(run_host, start))
            running.future().add_done_callback(functools.partial(self._note_end, start.number))
        except Exception as error:
            self._tell(ActorEnded(start.number, f"could not be started: {error}"))

    def _kill(self, number: int) -> None:
        actor = self._handles.pop(number, None)
        self._calls.pop(number, None)
        if actor is not None:
            ray.kill(actor)

    def _check(self, number: int) -> None:
        try:
            self._look(probe=True)
        finally:
            self._tell(Checked(number))

    def _look(self, *, probe: bool = False) -> None:
        self._starvation.look(len(self._devices.devices))
        changes = self._devices.check(probe=probe)
        if any(changes):
            self._changes.append(changes)
            self._notify()

    def _end(self, hosts: Sequence[str]) -> None:
        if not ray.is_initialized():
            return
        running = list(self._calls.values())
        for number in list(self._handles):
            with suppress(Exception):
                self._kill(number)
        waits = [
            call(clear_host, self._session, host, resources={f"node:{host}": PIN_SHARE})
            for host in hosts
            if not self._devices.is_gone(host)
        ]
        if running or waits:
            running += waits
            ray.wait(running, num_returns=len(running), timeout=_END_S, fetch_local=False)

    # -- in a thread of Ray's ------------------------------------------------------------------------------

    def _note_end(self, number: int, running: Future[Any]) -> None:
        error = running.exception()
        self._tell(ActorEnded(number, "has ended" if error is None else _describe(error)))
        # Its work is over, but its process would wait for more.
        self.kill(number)

    def _tell(self, news: Checked | ActorEnded) -> None:
        self._news.append(news)
        self._wake()


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

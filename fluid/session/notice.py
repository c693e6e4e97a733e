"""Notice of preemption: SIGTERM and SIGUSR1 make the executors of this process save their trials, and then end it.

A cloud or a cluster sends SIGTERM some time before it takes a machine away; Slurm sends the signal that
``srun --signal=USR1@120`` names. The handler starts a thread that drains the executors. The main thread goes on
meanwhile, as it may hold locks; when all is saved, it is interrupted by SystemExit with status 128 + number. A second
signal has its usual effect at once.

Handlers are set from the main thread only, and while an executor is open. One that the user has set stays, but Ray's
own, which end the process, are replaced; at the end what was there before is put back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, TypeVar

#: Seconds that trials have to be saved after SIGTERM: Kubernetes and spot markets kill a machine's processes after 30.
SIGTERM_DEADLINE_S = 25.0
#: The same after SIGUSR1, whose notice the user chooses: 100 s go with ``srun --signal=USR1@120``.
SIGUSR1_DEADLINE_S = 100.0

_DEADLINES = {signal.SIGTERM: SIGTERM_DEADLINE_S, signal.SIGUSR1: SIGUSR1_DEADLINE_S}

#: Saves what runs, within so many seconds, and returns a line for the user, empty if there is nothing to say;
#: ``None`` if the main thread saves, and ends by itself.
Response = Callable[[float], "str | None"]


class PreemptionNotice:
    """The state of this process: who responds to a notice, and what the handlers replaced."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._responses: dict[int, Response] = {}
        #: Those who respond, and print nothing of it.
        self._quiet: set[int] = set()
        self._before: dict[int, Any] = {}
        #: The signal that was heard; ``None`` before.
        self._heard: int | None = None
        self._saved = self._responds = False

    @property
    def heard(self) -> int | None:
        """The signal that was heard; ``None`` if none was."""
        return self._heard

    @property
    def responds(self) -> bool:
        """Whether trials are being saved, and the main thread has not been interrupted yet."""
        return self._responds

    def watch(self, key: object, response: Response, *, quiet: bool = False) -> Response | None:
        """Responds to a notice from now on; returns the response of the same object whose place this one takes.

        Args:
            key: the object that responds.
            response: saves what runs.
            quiet: whether nothing is printed of it.
        """
        with self._lock:
            before = self._responses.get(id(key))
            self._responses[id(key)] = response
            (self._quiet.add if quiet else self._quiet.discard)(id(key))
        self.install()
        return before

    def unwatch(self, key: object) -> None:
        """Responds no more; the last one puts the handlers back."""
        with self._lock:
            self._responses.pop(id(key), None)
            self._quiet.discard(id(key))
            if self._responses or threading.current_thread() is not threading.main_thread():
                return
            before, self._before = self._before, {}
            self._heard, self._saved, self._responds = None, False, False
        self._put_back(before)

    def install(self) -> None:
        """Sets the handlers, in the main thread, where there are the default ones or Ray's."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _DEADLINES:
            current = signal.getsignal(number)
            if current is signal.SIG_DFL or _is_rays(current):
                if getattr(current, "__module__", "") != "ray.tune.tune":  # That one ends a sweep which is over then.
                    self._before[number] = current
                signal.signal(number, self._handle)

    # -- when it comes -------------------------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._responses and self._heard is None:  # The last executor was closed by another thread.
            before, self._before = self._before, {}
            self._put_back(before)
            if signal.getsignal(number) != self._handle:
                os.kill(os.getpid(), number)
                return
        if (self._heard is not None and not self._saved) or not self._responses:
            self._end_at_once(number)
        elif self._heard is None:
            self._heard, self._responds = number, True
            threading.Thread(target=self._respond, args=(number,), name="fluid-notice", daemon=True).start()
        else:
            self._responds = False
            raise SystemExit(128 + self._heard)

    def _respond(self, number: int) -> None:
        name, deadline = signal.Signals(number).name, _DEADLINES[signal.Signals(number)]
        with self._lock:
            responses, quiet = dict(self._responses), set(self._quiet)
        if not responses.keys() <= quiet:
            _tell(
                f"{name}: trials are saved after their iterations, within {deadline:g} s; a second signal ends at once"
            )
        lines: list[str | None] = []

        def respond(key: int, response: Response) -> None:
            line = response(deadline)
            lines.append("" if line and key in quiet else line)

        threads = [threading.Thread(target=respond, args=each, daemon=True) for each in responses.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in lines:
            self._responds = False
            return
        for line in lines:
            if line:
                _tell(f"{name}: {line}")
        self._saved = True
        main = threading.main_thread().ident
        if main is not None and threading.main_thread().is_alive():
            signal.pthread_kill(main, number)
        else:
            self._responds = False

    def _put_back(self, before: Mapping[int, Any]) -> None:
        for number, handler in before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def forget(self) -> None:
        """In a process forked from the driver: a signal to it is not about the driver's trials."""
        self._put_back(self._before)
        self._responses.clear()
        self._quiet.clear()
        self._before.clear()

    def _end_at_once(self, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _tell(text: str) -> None:
    print(f"fluid: {text}", file=sys.stderr, flush=True)


def _is_rays(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"


#: That of this process.
NOTICE = PreemptionNotice()
os.register_at_fork(after_in_child=NOTICE.forget)


# -- in force ------------------------------------------------------------------------------------
#
# Which executor is in force: the one that :func:`fluid.submit_trialgroup` uses.
#
# That is the innermost ``with`` block of the calling thread or task (a context variable holds it); else the innermost
# block of the process, so that worker threads of a block's owner submit to that block's executor; else the default
# one.


T = TypeVar("T")


class InForce(Generic[T]):
    """The executors in force in one process.

    Args:
        is_closed: whether one was closed. One that was drained stays in force, and refuses what it is given.

    Attributes:
        lock: held while one is made or looked for, so that two threads do not make two default ones.
    """

    def __init__(self, is_closed: Callable[[T], bool]) -> None:
        self._is_closed = is_closed
        self.lock = threading.RLock()
        #: Blocks that this thread or task is in, the innermost last. A task starts with those of the one that made it.
        self._entered_here: ContextVar[tuple[T, ...]] = ContextVar("fluid_executors", default=())
        #: Blocks that any thread of the process is in, the latest last.
        self._entered: list[T] = []
        #: The default executor, while there is one.
        self._default: list[T] = []

    def enter(self, executor: T) -> None:
        """Puts an executor in force for the block that begins."""
        self._entered_here.set((*self._entered_here.get(), executor))
        with self.lock:
            self._entered.append(executor)

    def make_default(self, executor: T) -> None:
        """Makes an executor the one in force outside all blocks."""
        with self.lock:
            self._default.append(executor)

    def leave(self, executor: T) -> None:
        """Takes a closed executor out of force; other contexts skip it as it is closed."""
        with self.lock:
            for stack in (self._entered, self._default):
                stack[:] = [other for other in stack if other is not executor]
        self._entered_here.set(tuple(other for other in self._entered_here.get() if other is not executor))

    def find(self) -> T | None:
        """Returns the executor in force; ``None`` if there is none."""
        with self.lock:
            candidates = [*self._default, *self._entered, *self._entered_here.get()]
        return next((executor for executor in reversed(candidates) if not self._is_closed(executor)), None)

    def has(self, executor: T) -> bool:
        """Whether an executor is the default one, or in a ``with`` block of any thread."""
        with self.lock:
            return any(other is executor for other in (*self._default, *self._entered))

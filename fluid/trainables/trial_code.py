"""To which trial the code that runs in a thread belongs: what it reaches by a global name is that trial's, ever after.

A lane may host several trials, and code of a trial may run on after its trial has ended: a helper thread, or a function
that catches everything. So the reporter, the link to the driver and what integrations keep for a trial are not the
process's, but those of the calling thread's trial: the one whose code the lane's thread runs, and in other threads the
one whose code started the thread. The code of a thread of unknown origin is that of the one trial in the process, and
of none if there are several.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from fluid._clock import MonotonicClock
from fluid.errors import FluidError

#: The attribute of a thread that has its trial.
_OF_THREAD = "_fluid_trial"
#: Seconds that a function has to unwind when its trial has ended, and how often it may catch that it has.
_UNWIND_S = 10.0
_MOST_REFUSALS = 3
_LOOK_AGAIN_S = 0.05
#: Modules whose threads serve a process as long as it lives, also those that a trial has started; they run no code of
#: the trial.
_SERVICES = ("fluid.", "tqdm.", "fsspec.", "ray._private.", "torch._inductor.")


#: Writes the state of a trial into an empty folder.
Save = Callable[[Path], object]


class Reporter(Protocol):
    """What runs a trial's function, and takes what it reports."""

    def report(self, metrics: Mapping[str, Any], save: Save | None) -> None:
        """Ends an iteration, and returns when the next one begins."""
        ...

    @property
    def checkpoint(self) -> Path | None:
        """The folder from which the function goes on; ``None`` if it begins."""
        ...


class DriverLink(Protocol):
    """Connects one trial in a lane with its submitter in the driver's process.

    Attributes:
        folder: the trial's own folder, which :func:`fluid.trial_dir` makes; an integration may set another one.
    """

    folder: str

    @property
    def trial_id(self) -> str:
        """The trial."""
        ...

    def ask(self, request: Any) -> Any:
        """Sends a request, and waits for the answer. Any thread of the lane's process may call it.

        The time of waiting does not count as time of the trial's iteration, nor as silence of a trial that hangs. If
        the driver ends, so does the lane.

        Args:
            request: is pickled by cloudpickle.

        Raises:
            RequestRefusedError: the trial has ended, or the submitter answers no requests.
            FluidError: this is another process than the lane's, such as a worker that the trial has started.
            Exception: what the submitter raised in place of an answer.
        """
        ...


class TrialEnded(BaseException):
    """Raised by :func:`fluid.report` in the function of a trial that has ended, so that it unwinds.

    No ``Exception``, which code that handles the errors of its training would catch.
    """


class TrialCode:
    """The code of one trial in this process, and what it reaches by global names.

    Attributes:
        link: its way to the driver; ``None`` outside a lane.
        reporter: takes what its function reports; ``None`` before the function runs, and if it is no function.
        attached: what integrations keep for it.
        function: the thread that runs its function; ``None`` if it is no function, and before it runs.
        ended: whether the trial is over; code of it that still runs reaches nothing any more.
    """

    def __init__(self, link: DriverLink | None = None) -> None:
        self.link = link
        self.reporter: Reporter | None = None
        self.attached: dict[str, Any] = {}
        self.function: threading.Thread | None = None
        self.ended = False
        self._refusals = 0
        self._process = os.getpid()

    def begin(self) -> TrialCode:
        """Begins: code of a thread of unknown origin is this trial's as long as no other one begins; returns itself."""
        _live.add(self)
        return self

    def enter(self) -> None:
        """Makes what the calling thread runs from now on code of this trial."""
        bind(threading.current_thread(), self)

    def end(self) -> None:
        """Ends: what still runs of it is refused everything, and waits for nothing."""
        self.ended = True
        self.reporter = None
        _live.discard(self)

    def check(self) -> None:
        """Checks that the calling code may reach its trial.

        Raises:
            FluidError: it runs in a process that the trial has started.
            TrialEnded: the trial has ended.
        """
        if self._process != os.getpid():
            raise FluidError(
                "fluid.report() is called by a process that the trial has started: call it in the trial's own"
            )
        if self.ended:
            self.refuse()

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raises :class:`TrialEnded`, in code of a trial that has ended."""
        self._refusals += 1
        raise TrialEnded

    def await_function(self) -> None:
        """Waits until the thread of its function has unwound, or seems not to; it was told that the trial has ended."""
        clock = MonotonicClock()
        deadline = clock.now() + _UNWIND_S
        while (
            self.function is not None
            and self.function.is_alive()
            and self._refusals < _MOST_REFUSALS
            and clock.now() < deadline
        ):
            threading.Thread.join(self.function, _LOOK_AGAIN_S)  # Ray's class has a join of its own.

    def threads(self) -> list[threading.Thread]:
        """The threads other than the calling one that run its code; not those that serve the whole process."""
        here = threading.current_thread()
        return [
            thread
            for thread in threading.enumerate()
            if thread is not here
            and getattr(thread, _OF_THREAD, None) is self
            and (thread is self.function or not _module_of(thread).startswith(_SERVICES))
        ]


#: The trials that have begun in this process and not ended.
_live: set[TrialCode] = set()


def current_trial() -> TrialCode | None:
    """Returns the trial whose code the calling thread runs; ``None`` outside a trial, or if that is unknown."""
    code = trial_of_thread()
    if code is None and len(_live) == 1:
        return next(iter(tuple(_live)), None)
    return code


def trial_of_thread() -> TrialCode | None:
    """Returns the trial to which the calling thread was bound; ``None`` if it was not."""
    code: TrialCode | None = getattr(threading.current_thread(), _OF_THREAD, None)
    return code


def bind(thread: threading.Thread, code: TrialCode | None) -> None:
    """Makes what a thread runs code of a trial; of none with ``None``."""
    setattr(thread, _OF_THREAD, code)


def is_function(thread: threading.Thread) -> bool:
    """Whether a thread runs the function of a trial, which was told to unwind as the trial ended."""
    code: TrialCode | None = getattr(thread, _OF_THREAD, None)
    return code is not None and code.function is thread


def inherit_trials() -> None:
    """Makes threads that are started from now on belong to the trial whose code starts them; called once in a lane."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_in_trial(self: threading.Thread) -> None:
        if not hasattr(self, _OF_THREAD):
            bind(self, current_trial())
        start(self)

    threading.Thread.start = start_in_trial  # type: ignore[method-assign]


def _module_of(thread: threading.Thread) -> str:
    """The module of what a thread runs: of its class, or of its target if the class is the standard library's."""
    module = type(thread).__module__
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", None) or module) if module == "threading" else module

"""Sweeps that a signal ends: Ctrl-C, and notice of preemption (SIGTERM, SIGUSR1; :mod:`fluid.session.notice`).

Tune's own handler of SIGINT ends its loop, writes the experiment's state, and returns as if the sweep had ended; here
the call then ends with :class:`fluid.SweepInterrupted`. After a notice, each live trial first makes a checkpoint of
Tune, and the controller gets the results up to that checkpoint only: a restored sweep repeats none and misses none.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from fluid.executor import FluidExecutor
from fluid.session.listeners import SweepInterrupted
from fluid.session.notice import NOTICE, Response

#: Interruptions by executor and thread, while a sweep runs there: several threads may share an executor.
_of_sweep: dict[tuple[int, int], Interruption] = {}


class Interruption:
    """Watches for signals while a sweep runs; a context manager.

    Args:
        executor: runs the sweep.

    Attributes:
        deadline_s: seconds that trials have to be saved, once a notice has come; ``None`` before.
        cut_off: Tune's ids of the trials that had not ended when the signal came.
    """

    def __init__(self, executor: FluidExecutor) -> None:
        self._executor = executor
        self._before: dict[int, Any] = {}
        #: Ends Tune's loop; ``None`` until the controller runs.
        self._end_loop: Callable[[int, FrameType | None], None] | None = None
        #: The executor's own response to a notice, to be put back.
        self._response: Response | None = None
        self._controller: Any = None
        self._signal: int | None = None
        self.deadline_s: float | None = None
        self.cut_off: frozenset[str] = frozenset()

    def __enter__(self) -> Interruption:
        _of_sweep[id(self._executor), threading.get_ident()] = self
        if _in_main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del _of_sweep[id(self._executor), threading.get_ident()]
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._response is not None and not self._executor.closed:
            NOTICE.watch(self._executor, self._response)

    def attach(self, controller: Any) -> None:
        """Puts handlers in the place of those that Tune and Ray have set; called once Tune's controller runs."""
        tunes = signal.getsignal(signal.SIGUSR1)
        if not _in_main_thread() or getattr(tunes, "__module__", "") != "ray.tune.tune":
            return  # Tune sets none in other threads.
        assert callable(tunes)
        self._controller, self._end_loop = controller, tunes
        if getattr(signal.getsignal(signal.SIGINT), "__module__", "") == "ray.tune.tune":
            signal.signal(signal.SIGINT, self._interrupt)
        self._response = NOTICE.watch(self._executor, self._respond)

    @property
    def has_come(self) -> bool:
        """Whether a signal has ended Tune's loop."""
        return self._signal is not None

    def end_loop(self) -> None:
        """Ends Tune's loop after a notice, in the main thread."""
        if self._end_loop is not None and NOTICE.heard is not None:
            self._end(NOTICE.heard, None)

    def finish(self, result: Any) -> Any:
        """Returns the result of a sweep that ran to its end.

        Raises:
            SweepInterrupted: a signal has ended it.
        """
        if self._signal is None:
            return result
        analysis = getattr(result, "_experiment_analysis", result)
        call = self._call_to_go_on(analysis.experiment_path, result is not analysis)
        name = signal.Signals(self._signal).name
        cut_off = f"{len(self.cut_off)} of {len(analysis.trials)} trials were cut off"
        print(f"fluid: interrupted by {name}: {cut_off}; go on with {call}", file=sys.stderr, flush=True)
        raise SweepInterrupted(128 + self._signal, result, self.cut_off)

    @staticmethod
    def _call_to_go_on(path: str, is_tuner: bool) -> str:
        if is_tuner:
            return f"Tuner.restore({path!r}, trainable, executor=FluidExecutor()).fit()"
        storage, _, name = path.rstrip("/").rpartition("/")
        return f"tune.run(..., storage_path={storage!r}, name={name!r}, resume=True, executor=FluidExecutor())"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._end(number, frame)

    def _end(self, number: int, frame: FrameType | None) -> None:
        assert self._end_loop is not None
        self._signal = number
        # Tune gives them another status when its loop has ended.
        trials = self._controller.get_trials()
        self.cut_off = frozenset(trial.trial_id for trial in trials if not trial.is_finished())
        self._end_loop(number, frame)  # It also sets the handler of before, so that a second Ctrl-C breaks off.

    def _respond(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s


def interruption_of(executor: FluidExecutor) -> Interruption | None:
    """The interruption of this thread's sweep on an executor; ``None`` where only a scheduler was passed to Tune."""
    return _of_sweep.get((id(executor), threading.get_ident()))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

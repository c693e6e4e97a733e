"""Sweeps that a signal ends: Ctrl-C, and notice of preemption (SIGTERM, SIGUSR1; :mod:`fluid.session.notice`).

Tune's own handler of SIGINT ends its loop, writes the experiment's state, and returns as if the sweep had ended; here
the call then ends with :class:`fluid.SweepInterrupted`. After a notice, each live trial first makes a checkpoint of
Tune, and the controller gets the results up to that checkpoint only: a restored sweep repeats none and misses none.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from fluid._clock import MonotonicClock
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.controller.tune_trial import ActorStage, TuneTrial
from fluid.integrations.ray_tune.private_api import TRAINING_ITERATION
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
        if not self._executor.session.quiet:
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


# -- final saves ---------------------------------------------------------------------------------
#
# The last checkpoints of a sweep that is about to be preempted: one of Tune's for each live trial.


#: Times that the controller has its turn after the last checkpoint was handed to it.
_LAST_TURNS = 2


class FinalSaves:
    """Makes live trials save, and gives the controller each checkpoint after the result of its iteration.

    Results of later iterations, which a restored sweep will make again, are dropped.

    Args:
        controller: Tune's.
        trials: the live ones.
        deadline_s: seconds after which no checkpoint is waited for.
        post: runs a callback in the controller's thread.
    """

    def __init__(
        self,
        controller: Any,
        trials: Iterable[TuneTrial],
        deadline_s: float,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._controller = controller
        self._clock = MonotonicClock()
        self._deadline = self._clock.now() + deadline_s
        #: The checkpoint of each trial, ``None`` until its lane has made it.
        self._open: dict[TuneTrial, Any] = {}
        self._turns_left = _LAST_TURNS
        for tune_trial in trials:
            try:
                future = tune_trial.handle.call(tune_trial.trial_id, "save")
            except FluidError:
                continue  # It has failed, or was stopped.
            self._open[tune_trial] = None
            future.add_done_callback(lambda done, trial=tune_trial: post(partial(self._saved, trial, done)))

    def advance(self) -> bool:
        """Hands checkpoints to the controller; returns whether all are, or the deadline has come."""
        for tune_trial, saved in list(self._open.items()):
            if tune_trial.stage is not ActorStage.LIVE:
                del self._open[tune_trial]
            elif saved is not None and not tune_trial.results:
                del self._open[tune_trial]
                tune_trial.discard_unclaimed_save()
                tune_trial.unclaimed_save = saved
                self._controller._schedule_trial_save(tune_trial.trial)
        if not self._open:
            self._turns_left -= 1
        return self._turns_left < 0 or self._clock.now() >= self._deadline

    def _saved(self, tune_trial: TuneTrial, done: Future[Any]) -> None:
        if done.exception() is not None or tune_trial not in self._open:
            self._open.pop(tune_trial, None)  # A function, which saves when it reports; or it has ended.
            return
        saved = tune_trial.completed(done.result())
        if saved.checkpoint is None:
            del self._open[tune_trial]
            return
        self._open[tune_trial] = saved
        tune_trial.cut_at = int(saved.metrics.get(TRAINING_ITERATION, 0))

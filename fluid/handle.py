"""What a submitter holds of a TrialGroup that runs: its results as they come, and ways to change it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluid.engine.commands import Report, ReportEnd
from fluid.engine.events import Failure
from fluid.errors import FluidError, require_integer, require_number

if TYPE_CHECKING:
    from fluid.trialgroup import Trial, TrialGroup


@dataclass(frozen=True, slots=True)
class Result:
    """One finished iteration of a trial.

    Attributes:
        trial_id: the trial.
        iteration: its number, from 1.
        metrics: what the trial reported.
        seconds: wall time of the iteration.
        width: width at which it ran: ``1/p``, 1 or a number of devices.
        device_ids: devices on which it ran.
        config: the trial's hyperparameters.
    """

    trial_id: str
    iteration: int
    metrics: Any
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    config: Mapping[str, Any]


class TrialFailedError(FluidError):
    """A trial failed for good.

    Attributes:
        trial_id: the trial.
        failure: why; its ``traceback`` is the trial's own.
    """

    def __init__(self, trial_id: str, failure: Failure) -> None:
        super().__init__(f"trial {trial_id!r} failed: {failure.message}\n{failure.traceback}".rstrip())
        self.trial_id = trial_id
        self.failure = failure


class Controls:
    """What a handle may ask of the executor; the executor fills it in."""

    def __init__(
        self,
        *,
        add: Callable[[str, Trial], None],
        stop: Callable[[str], None],
        extend: Callable[[str, int], None],
        eta: Callable[[str], float | None],
    ) -> None:
        self.add = add
        self.stop = stop
        self.extend = extend
        self.eta = eta


class TrialGroupHandle:
    """A submitted TrialGroup. Safe to use from several threads.

    Attributes:
        name: the group's name.
    """

    def __init__(self, group_id: str, group: TrialGroup, controls: Controls) -> None:
        self.name = group.name
        self._id = group_id
        self._group = group
        self._controls = controls
        self._changed = threading.Condition()
        self._results: list[Result] = []
        self._states: dict[str, str] = {}
        self._failures: dict[str, Failure] = {}
        self._open: set[str] = {trial.id for trial in group.active}
        self._first_start: float | None = None
        self._last_end: float | None = None
        self._broken: BaseException | None = None

    # -- for the submitter ---------------------------------------------------------------------------------

    def results(self) -> Iterator[Result]:
        """Gives every result from the first one on, as it comes, until all trials have ended.

        Each call starts at the first result. A trial that is extended or added while results are read is waited
        for too.

        Raises:
            FluidError: the executor was closed, or broke, before the trials ended.
        """
        position = 0
        while True:
            with self._changed:
                while position == len(self._results) and self._open:
                    self._raise_if_broken()
                    self._changed.wait()
                fresh = self._results[position:]
                if not fresh and not self._open:
                    return
            yield from fresh
            position += len(fresh)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all trials have ended.

        Args:
            timeout: seconds to wait at most; ``None`` for as long as it takes.

        Returns:
            Whether they have.
        """
        if timeout is not None:
            require_number("timeout", timeout, at_least=0.0)
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._open or self._broken is not None, timeout)
            if self._open:
                self._raise_if_broken()
            return ended

    def stop(self, trial_id: str) -> None:
        """Stops a trial at the end of its current iteration. Stopping one that has ended is harmless."""
        self._controls.stop(trial_id)
        self._group.stop(trial_id)

    def extend(self, trial_id: str, budget: int) -> None:
        """Gives a trial ``budget`` further iterations; one that was done goes on where it was.

        Raises:
            InvalidFieldError: the trial is unknown, stopped or failed, or the budget is below 1.
        """
        self._controls.extend(trial_id, require_integer("budget", budget, at_least=1))
        self._group.extend(trial_id, budget)

    def add(self, trial: Trial) -> None:
        """Adds a trial to the group.

        Raises:
            InvalidFieldError: its id is taken, or it cannot be sent to another process.
        """
        self._group.add(trial)
        try:
            self._controls.add(self._id, trial)
        except BaseException:
            self._group.remove(trial.id)
            raise

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        with self._changed:
            return not self._open

    @property
    def makespan(self) -> float | None:
        """Seconds from the first start to the last finish so far; ``None`` before the first iteration ended."""
        with self._changed:
            if self._first_start is None or self._last_end is None:
                return None
            return self._last_end - self._first_start

    @property
    def eta(self) -> float | None:
        """Predicted seconds until all trials have ended; ``None`` where nothing is known yet."""
        return self._controls.eta(self._id)

    @property
    def states(self) -> dict[str, str]:
        """``"DONE"``, ``"STOPPED"`` or ``"FAILED"`` by trial, for those that have ended."""
        with self._changed:
            return {trial_id: state for trial_id, state in self._states.items() if trial_id not in self._open}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why trials failed for good, by trial."""
        with self._changed:
            return dict(self._failures)

    def raise_failures(self) -> None:
        """Raises :class:`TrialFailedError` for the first trial that failed, if any did."""
        for trial_id, failure in self.failures.items():
            raise TrialFailedError(trial_id, failure)

    # -- for the executor ----------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Takes a finished iteration."""
        config = self._group[report.trial_id].config if report.trial_id in self._group else {}
        result = Result(
            report.trial_id,
            report.iteration,
            report.metrics,
            report.seconds,
            report.width,
            report.device_ids,
            config,
        )
        with self._changed:
            started = report.at - report.seconds
            self._first_start = started if self._first_start is None else min(self._first_start, started)
            self._last_end = report.at if self._last_end is None else max(self._last_end, report.at)
            self._results.append(result)
            self._changed.notify_all()

    def report_end(self, end: ReportEnd) -> None:
        """Takes the end of a trial."""
        with self._changed:
            self._states[end.trial_id] = end.state
            if end.failure is not None and end.state == "FAILED":
                self._failures[end.trial_id] = end.failure
            self._open.discard(end.trial_id)
            self._changed.notify_all()

    def reopen(self, trial_id: str) -> None:
        """Notes that a trial was added or extended, and is to be waited for."""
        with self._changed:
            self._open.add(trial_id)

    def take_over(self, ended: Mapping[str, str], failures: Mapping[str, Failure]) -> None:
        """Notes which trials had ended in an earlier session."""
        with self._changed:
            self._states.update(ended)
            self._open -= set(ended)
            self._failures.update({trial_id: failures[trial_id] for trial_id in ended if trial_id in failures})
            self._changed.notify_all()

    def break_off(self, error: BaseException) -> None:
        """Wakes whoever waits: nothing will come any more."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise FluidError(f"group {self.name!r} did not end: {self._broken}") from self._broken

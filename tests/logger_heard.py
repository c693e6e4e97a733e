"""A logger that notes what it hears, for tests."""

from __future__ import annotations

import threading
from typing import Any

from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.results.records import Result

PATIENCE = 90.0


class Heard(TrialLogger):
    """Notes every call, in order.

    Attributes:
        calls: name of the method, id of the trial, and what else is told.
        trials: what was told of each trial last, by id.
        results: the results by id of the trial.
        threads: names of the threads that called.
    """

    def __init__(self, destination: str = "") -> None:
        self.destination = destination
        self.calls: list[tuple[Any, ...]] = []
        self.trials: dict[str, LoggedTrial] = {}
        self.results: dict[str, list[Result]] = {}
        self.threads: set[str] = set()
        self.session: LoggedSession

    def on_session(self, session: LoggedSession) -> None:
        self.session = session

    def on_trial(self, trial: LoggedTrial) -> None:
        self.trials[trial.trial_id] = trial
        self._note("trial", trial.trial_id, dict(trial.config))

    def on_start(self, trial_id: str) -> None:
        self._note("start", trial_id)

    def on_result(self, result: Result) -> None:
        self.results.setdefault(result.trial_id, []).append(result)
        self._note("result", result.trial_id, result.iteration)

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        self._note("end", trial_id, state, None if failure is None else failure.message)

    def on_broken(self, error: BaseException) -> None:
        self._note("broken", "", str(error))

    def _note(self, *call: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)

    def of(self, trial_id: str) -> list[tuple[Any, ...]]:
        """The calls about a trial, without its id."""
        return [(name, *rest) for name, about, *rest in self.calls if about == trial_id]

    def iterations(self, trial_id: str) -> list[int]:
        return [result.iteration for result in self.results.get(trial_id, ())]

    @property
    def ends(self) -> dict[str, str]:
        """How each trial was said to have ended last."""
        return {call[1]: call[2] for call in self.calls if call[0] == "end"}

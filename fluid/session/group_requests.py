"""What a group's handle asks of its session: changes of the group and its trials, each a step of the session's thread.

In that step the engine is asked first. What it accepts is then done wholly: the group that the user holds is changed,
too, and waiters wait for further trials, before anyone is told. An interrupted caller has nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from fluid.backends.base import Backend
from fluid.engine.engine import EngineState
from fluid.engine.events import (
    OUTCOMES,
    BudgetExtended,
    CallRequested,
    Event,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrialForgotten,
    TrialsAdded,
    TrialSpec,
)
from fluid.errors import require_one_of
from fluid.session.inbox import GroupInbox
from fluid.session.pump import Pump
from fluid.session.run_folder import RunFolder
from fluid.session.specs import say_what_is_awaited
from fluid.trainables.json_form import json_form
from fluid.trialgroup import Trial, TrialState

#: What the engine is to know of trials, and what registers and writes them once it has accepted them.
Prepared = tuple[tuple[TrialSpec, ...], Callable[[], None]]


class GroupRequests:
    """The requests of one group's submitter, from any thread.

    Args:
        inbox: of the group.
        pump: the session's thread.
        state: the engine.
        backend: executes its commands.
        folder: the run folder.
        prepare: pickles trials.
    """

    def __init__(
        self,
        inbox: GroupInbox,
        pump: Pump,
        state: EngineState,
        backend: Backend,
        folder: RunFolder,
        prepare: Callable[[list[Trial]], Prepared],
    ) -> None:
        self._inbox, self._pump, self._state = inbox, pump, state
        self._backend, self._folder, self._prepare = backend, folder, prepare

    def ask(self, event: Callable[..., Event]) -> None:
        """Asks the engine for something, by an event that is made at its time."""
        self._pump.act(lambda: self._handle(event))

    def add(self, trials: list[Trial]) -> None:
        """Adds trials to the group, all of them or none."""
        inbox = self._inbox
        specs, take_in = self._prepare(trials)

        def accepted() -> None:
            for trial in trials:
                inbox.change(inbox.group.add, trial)
                self._pump.notify(partial(inbox.reopen, trial.id))
            take_in()

        def add() -> None:
            inbox.require_new(trials)
            self._handle(partial(TrialsAdded, group_id=inbox.group_id, trials=specs), accepted)
            say_what_is_awaited(self._state, inbox.group.name, specs)

        self._pump.work(add)

    def extend(self, trial_id: str, budget: int, follow_up_iterations: int) -> None:
        """Gives a trial ``budget`` further iterations."""
        inbox = self._inbox

        def accepted() -> None:
            inbox.change(partial(inbox.group.extend, follow_up_iterations=follow_up_iterations), trial_id, budget)
            if not self._state.trials[trial_id].state.ended:
                self._pump.notify(partial(inbox.reopen, trial_id))

        event = partial(BudgetExtended, trial_id=trial_id, iterations=budget, follow_up_iterations=follow_up_iterations)
        self._pump.work(lambda: self._handle(event, accepted))

    def stop(self, trial_id: str, outcome: str | None, *, now: bool = False) -> None:
        """Stops a trial; with ``now``, by killing its lanes."""
        inbox, known = self._inbox, None
        if outcome is not None:
            known = TrialState(require_one_of("outcome", outcome, OUTCOMES))
        event = partial(StopRequested, trial_id=trial_id, outcome=known, now=now)

        def accepted() -> None:
            inbox.change(inbox.group.stop, trial_id)
            inbox.say(trial_id, outcome)

        self._pump.act(lambda: self._handle(event, accepted))

    def pause(self, trial_id: str) -> None:
        """Pauses a trial until it is resumed."""
        self.ask(partial(PauseRequested, trial_id=trial_id))

    def resume(self, trial_id: str) -> None:
        """Lets a paused trial go on."""
        self._pump.work(lambda: self._handle(partial(ResumeRequested, trial_id=trial_id)))

    def call(self, trial_id: str, method: str, payload: bytes) -> Future[Any]:
        """Calls a method of a trial; returns a future of what that returns."""
        call_id, future = self._inbox.expect_answer(method)
        event = partial(CallRequested, trial_id=trial_id, call_id=call_id, method=method, payload=payload)
        try:
            self._pump.work(lambda: self._handle(event))
        except BaseException:
            self._inbox.withdraw_call(call_id)
            raise
        return future

    def show_config(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """Says, and writes, which hyperparameters reports show of a trial."""
        form = json_form(dict(config))

        def show() -> None:
            self._inbox.show(trial_id, config)
            self._folder.write_shown_config(trial_id, form)

        self._pump.call(show)

    def forget(self, trial_id: str) -> None:
        """Drops a trial that has ended."""

        def forget() -> None:
            known = self._state.trials.get(trial_id)
            self._handle(partial(TrialForgotten, trial_id=trial_id))
            self._pump.notify(partial(self._backend.forget, trial_id))
            if known is not None:
                self._pump.notify(partial(self._inbox.drop, trial_id, known.outcome))

        self._pump.act(forget)

    def _handle(self, event: Callable[..., Event], accepted: Callable[[], None] | None = None) -> None:
        self._pump.handle(event(at=self._backend.now()), accepted=accepted)

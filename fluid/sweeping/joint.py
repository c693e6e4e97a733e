"""A sweep that several drivers work together: its trials begin in the order of the shared folder's log.

Each of them decides by the same results in the same order, and so comes to the same. What a driver decides by itself is
when it has room for a further trial. It asks the log for it: the sweep's next trial begins at the place of that entry,
for all drivers, and in the one that has asked.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.joint.entries import Begun, Founded
from fluid.random_state import SeedOrigin
from fluid.search.schedules import with_schedules
from fluid.search.searchers import SearchOutcome
from fluid.search.space import Space
from fluid.search.suggestion import ELSEWHERE, Suggestion
from fluid.session.joint.session import JointSession
from fluid.sweeping.agreement import arguments_of, codes_of, require_alike
from fluid.sweeping.asking import Asking
from fluid.sweeping.plan import SweepPlan
from fluid.sweeping.submitting import SweepTrials
from fluid.sweeping.under_way import begin_together


class JointStarts:
    """Begins the trials of a sweep as the log says.

    Args:
        plan: of the sweep.
        trials: those that were started.
        asking: asks the searcher.
        begin: begins the next trial, by a suggestion.
        do: does a piece of the sweep's work, at once.
        fail: ends the sweep with an error.
        is_over: whether nothing begins any more.
    """

    def __init__(
        self,
        plan: SweepPlan,
        trials: SweepTrials,
        asking: Asking,
        *,
        begin: Callable[[Suggestion], None],
        do: Callable[[Callable[[], None]], None],
        fail: Callable[[BaseException], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._trials = trials
        self._asking = asking
        self._begin = begin
        self._do = do
        self._fail = fail
        self._is_over = is_over
        self._session: JointSession | None = None
        self._detach: Callable[[], object] = lambda: None
        self._arguments: Mapping[str, str] = {}
        self._codes = codes_of(plan)
        #: How many trials have begun, in all drivers.
        self._begun = 0
        #: The first config, which is asked for ahead: all drivers must have the same.
        self._first: Suggestion | None = None
        #: What the searcher has suggested: not told to the log yet, and told.
        self._ready: deque[Suggestion] = deque()
        self._told: deque[Suggestion] = deque()

    def attach(self, session: JointSession) -> None:
        """Takes part; called in the session's thread."""
        self._session = session
        if not self._plan.learns:
            self._first = self._asking.ask_now()
        origin, plan = self._trials.seed_origin, self._plan
        self._arguments = arguments_of(plan, self._first)
        seeds = (*(state.hex() for state in origin.states), origin.salt)
        # Those that begin together in one driver do so here: what takes longest is to start first.
        together = plan.samples if begin_together(plan) else None
        begins = [Begun(plan.name, None, plan.samples, is_free=True)] * (together or 0)
        self._detach = session.attach(self, Founded(plan.name, self._arguments, seeds, self._codes), begins)
        session.claims.look()

    def detach(self) -> None:
        """Takes part no more: what has not ended is for the other drivers."""
        self._detach()
        for suggestion in (*self._ready, *self._told):
            self._asking.tell(partial(_not_begun, suggestion))

    def is_settled(self) -> bool:
        """Whether all that the sweep has stopped is known to have ended; called in the session's thread."""
        return self._session is None or self._session.is_settled(self._plan.name)

    @property
    def has_all(self) -> bool:
        """Whether no further trial begins."""
        samples = self._plan.samples
        if samples is not None and self._begun >= samples:
            return True
        waiting = self._ready or self._told or self._asking.pending
        return self._plan.learns and self._asking.is_exhausted and not waiting

    def take(self, suggestion: Suggestion) -> None:
        """Takes what the searcher has suggested."""
        if suggestion.budget is not None or suggestion.continues is not None:
            raise InvalidFieldError("join", True, "cannot be with a searcher that decides how far trials run")
        try:
            form = suggestion.config
            if isinstance(self._plan.space, Space):  # Which makes schedules of their text again.
                form = with_schedules(form, repr)
            config = json.loads(json.dumps(form))  # As the others read it.
            self._read(config)
        except (TypeError, ValueError):
            reason = "needs a searcher whose configs are JSON: other drivers run them too"
            raise InvalidFieldError("join", True, reason) from None
        self._ready.append(replace(suggestion, config=config))
        if self._session is not None:
            self._session.claims.look()

    # -- of a JointSweep -----------------------------------------------------------------------------------

    def ready(self, most: int) -> int:
        """How many trials can begin now."""
        plan = self._plan
        if self._is_over() or self.has_all:
            return 0
        if plan.under_way is not None:
            most = min(most, plan.under_way - self._trials.open)
        if plan.samples is not None:
            most = min(most, plan.samples - self._begun)
        if not plan.learns:
            return max(0, most)
        while self._asking.pending + len(self._ready) < most and self._asking.ask():
            pass
        return max(0, min(most, len(self._ready)))

    def begins(self, number: int) -> list[Begun]:
        """What to tell the log of trials that are to begin here."""
        plan = self._plan
        if not plan.learns:
            return [Begun(plan.name, None, plan.samples, under_way=plan.under_way)] * number
        fresh = [self._ready.popleft() for _ in range(number)]
        self._told += fresh
        return [Begun(plan.name, one.config, plan.samples) for one in fresh]

    def begin(self, config: Any, *, is_own: bool) -> None:
        """Begins the next trial."""
        self._do(lambda: self._begin_one(config, is_own))

    def _begin_one(self, config: Any, is_own: bool) -> None:
        if self._is_over():
            return
        self._begun += 1
        if self._plan.learns:
            own = next((one for one in self._told if is_own and one.config == config), None)
            if own is not None:
                self._told.remove(own)
            self._begin(replace(own or Suggestion(ELSEWHERE, config), config=self._read(config)))
            return
        first, self._first = self._first, None
        suggestion = first or self._asking.ask_now()
        if suggestion is not None:
            self._begin(suggestion)

    def _read(self, config: Any) -> Any:
        space = self._plan.space
        return space.read(config) if isinstance(space, Space) else config

    def rejoined(self) -> None:
        """What was told to the log and has not come back never will: this driver was taken for dead."""
        self._ready.extendleft(reversed(self._told))
        self._told.clear()

    def founded(self, founded: Founded, *, is_own: bool) -> bool:
        """Checks that all drivers were given the same, and takes the seeds of the first."""
        try:
            require_alike(founded, self._arguments, self._codes, takes_other_code=self._plan.takes_other_code)
        except InvalidFieldError as error:
            self._fail(error)
            return False
        share = getattr(self._plan.searcher, "share", None)
        if not is_own and callable(share):
            share()
        if len(founded.seeds) > 1:
            *states, salt = founded.seeds
            self._trials.seed_origin = SeedOrigin(tuple(map(bytes.fromhex, states)), salt)
        return True


def _not_begun(suggestion: Suggestion) -> SearchOutcome:
    return SearchOutcome(token=suggestion.token, config=suggestion.config, values=None, state="STOPPED", iteration=0)


__all__ = ["JointStarts"]

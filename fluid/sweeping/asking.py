"""Asks the searcher of a sweep, and tells it, apart from the thread that decides: either may take seconds."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fluid.errors import FluidError
from fluid.search.searchers import AskLater, Searcher, SearchOutcome
from fluid.search.suggestion import Suggestion
from fluid.waiting.clock_hold import NO_HOLD, ClockHold
from fluid.waiting.queue import HeldQueue
from fluid.waiting.waits import LOOK_UP_S


class Asking:
    """What a sweep asks its searcher and tells it, as errands for the thread that called :func:`fluid.run`.

    Errands are run in the order in which they came. The thread that does the sweep's work calls all other methods.

    Args:
        searcher: the searcher.
        samples: the most suggestions; ``None`` for no limit.
        is_slow: whether the searcher may be slow; else the thread that does the sweep's work asks and tells it at once.
        do: does a piece of the sweep's work.
        take: takes a suggestion; called as a piece of work, as is ``resume``.
        resume: called when more may be asked, and when nothing is left to ask.

    Attributes:
        asked: suggestions that were asked for, or are about to be.
        pending: those of them that are not there yet.
        is_exhausted: whether the searcher has no more.
    """

    def __init__(
        self,
        searcher: Searcher,
        samples: int | None,
        *,
        is_slow: bool,
        do: Callable[[Callable[[], None]], None],
        take: Callable[[Suggestion], None],
        resume: Callable[[], None],
    ) -> None:
        self._searcher = searcher
        self._samples = samples
        self._is_slow = is_slow
        self._do = do
        self._take = take
        self._resume = resume
        self._hold: ClockHold = NO_HOLD
        self._errands = HeldQueue[Callable[[], None] | None]()
        self.asked = 0
        self.pending = 0
        self.is_exhausted = False
        #: Outcomes that the searcher does not know yet.
        self._untold = 0
        self._is_closed = False
        #: What the searcher said when it was to be asked later; ``None`` if it may be asked now.
        self._postponed: AskLater | None = None

    def begin(self, hold: ClockHold) -> None:
        """Called once, before anything is asked, with the hold of the session's clock."""
        self._hold = hold
        self._errands = HeldQueue(hold)

    def ask(self) -> bool:
        """Asks for one more suggestion; returns whether there may be one."""
        if self.is_done or self._postponed is not None:
            return False
        self.asked += 1
        self.pending += 1
        self._errands.put(self._ask)
        return True

    def ask_now(self) -> Suggestion | None:
        """Asks for one more suggestion, here; ``None`` if there are no more."""
        suggestion = self._searcher.ask()
        self.is_exhausted = suggestion is None
        self.asked += suggestion is not None
        return suggestion

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to ask for."""
        return self.is_exhausted or self._is_closed or (self._samples is not None and self.asked >= self._samples)

    def tell(self, outcome: Callable[[], SearchOutcome]) -> None:
        """Tells the searcher what came of a suggestion.

        Args:
            outcome: makes it, in the thread that tells: metrics may be objects of the user's classes.
        """
        self._have_told(self._searcher.tell, outcome)

    def observe(self, outcome: Callable[[], SearchOutcome]) -> None:
        """Tells the searcher how a suggestion stands at a rung, if it listens to that."""
        if callable(observe := getattr(self._searcher, "observe", None)):
            self._have_told(observe, outcome)

    def _have_told(self, hear: Callable[[SearchOutcome], object], outcome: Callable[[], SearchOutcome]) -> None:
        if not self._is_slow:
            hear(outcome())
            return
        self._untold += 1
        self._errands.put(partial(self._tell, hear, outcome))

    def close(self) -> None:
        """Asks nothing more, not even what is pending."""
        self._is_closed = True

    def require_progress(self, under_way: int) -> None:
        """Checks that the searcher does not wait for results that never come.

        Args:
            under_way: trials that will be told.

        Raises:
            FluidError: it does.
        """
        if self._postponed is not None and not (under_way or self.pending or self._untold or self._is_closed):
            text = "the searcher waits for a result before it suggests more, but no trial is under way"
            raise FluidError(text) from self._postponed

    # -- the caller's thread -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wakes the thread that waits in :meth:`run_errand`."""
        self._errands.put(None)

    def run_errand(self, timeout: float | None) -> None:
        """Waits for an errand, for so many seconds at most, and runs it; on a real clock no longer than a moment.

        Raises:
            Exception: what the searcher raises.
        """
        if not self._hold.is_virtual:
            timeout = LOOK_UP_S if timeout is None else min(timeout, LOOK_UP_S)
        with suppress(queue.Empty):
            errand = self._errands.get(timeout)
            if errand is not None:
                errand()

    def run_all(self) -> None:
        """Runs the errands that there are."""
        while not self._errands.empty():
            self.run_errand(0.0)

    def _ask(self) -> None:
        if self._is_closed or self.is_exhausted or self._postponed is not None:
            self._do(self._drop)
            return
        try:
            suggestion = self._searcher.ask()
        except AskLater as error:
            self._do(partial(self._postpone, error))
        else:
            self._do(partial(self._answered, suggestion))

    def _tell(self, hear: Callable[[SearchOutcome], object], outcome: Callable[[], SearchOutcome]) -> None:
        hear(outcome())
        self._do(self._told)

    # -- pieces of work ------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self.asked -= 1
        self.pending -= 1
        self._resume()

    def _postpone(self, error: AskLater) -> None:
        self._postponed = error
        self._drop()

    def _answered(self, suggestion: Suggestion | None) -> None:
        self.pending -= 1
        if suggestion is None:
            self.asked -= 1
            self.is_exhausted = True
        elif self._is_closed:
            token, config = suggestion.token, suggestion.config
            stopped = SearchOutcome(token=token, config=config, values=None, state="STOPPED", iteration=0)
            self.tell(lambda: stopped)
        else:
            self._take(suggestion)
        self._resume()

    def _told(self) -> None:
        self._untold -= 1
        self._postponed = None
        self._resume()

"""Which trials of a played search continue, and when new ones start, by the shape of its algorithm."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from fluid.search.brackets import Brackets
from fluid.search.rungs import BracketShape, RungDecision
from fluid.search.schedulers import AshaRung, AsynchronousHalving, FullBudget, RungScheduler, StoppingHalving
from fluid.search_shape import SearchShape
from fluid.simulation.search_draws import Draw
from fluid.simulation.search_now import LiveTrial, SearchNow

_NONE: tuple[int, ...] = ()


class PlayRules:
    """A search in one draw, of whose trials each runs as far as chance lets it, and none waits for another.

    Args:
        search: as it stands.
        draw: what chance has decided.
        devices: that there are.

    Attributes:
        running: live trials that hold a device.
        queued: those that wait for one, in order.
    """

    def __init__(self, search: SearchNow, draw: Draw, devices: int) -> None:
        self._live = search.live
        self._draw = draw
        self._pace = draw.pace
        self._next = len(search.live)
        self._count = self._next + search.coming
        self._done: list[float] = [float(trial.done) for trial in search.live]
        self._done += [0.0] * search.coming
        self._elapsed = {number: trial.elapsed for number, trial in enumerate(search.live) if trial.elapsed}
        under_way = [number for number in range(self._next) if self._goes_on(number)]
        self._start_s = search.start_s
        self._running = {number for number, trial in enumerate(search.live) if trial.runs}
        #: Trials that run or wait for a device, and their most.
        self._open = len(under_way)
        self._most = self._most_open(search, devices)
        self.running = [number for number in under_way if self._live[number].runs]
        self.queued = [number for number in under_way if not self._live[number].runs]
        # The longest one first, as planners start what arrives together.
        self.queued.sort(key=lambda number: -self._left(number) * (self._live[number].seconds or search.seconds))

    def work(self, trial: int) -> float:
        """Seconds of a trial's run that starts now, alone on a device."""
        left = self._left(trial)
        self._done[trial] += left
        seconds = left * self._pace[trial]
        if self._start_s:
            if trial in self._running:
                self._running.discard(trial)
            else:
                seconds += self._start_s
        if self._elapsed and trial in self._elapsed:
            seconds -= self._elapsed.pop(trial)
        return seconds if seconds > 0.0 else 0.0

    def next_fresh(self) -> int:
        """Starts a new trial; returns -1 if there is none, or no room for it."""
        if self._next >= self._count or self._open >= self._most:
            return -1
        self._open += 1
        self._next += 1
        return self._next - 1

    def ended(self, trial: int) -> Sequence[int]:
        """Takes note that a run has ended; returns the trials that go on."""
        self._open -= 1
        return _NONE

    def _goes_on(self, trial: int) -> bool:
        """Whether a live trial runs or waits for a device, rather than for a decision."""
        return self._draw.length[trial] > self._live[trial].done

    def _left(self, trial: int) -> float:
        """Iterations of a trial's next run."""
        return max(0.0, self._draw.length[trial] - self._done[trial])

    def _most_open(self, search: SearchNow, devices: int) -> float:
        return max(1, self._open)


class _AtRungs(PlayRules):
    """Trials run from rung to rung; a scheduler of :mod:`fluid.search` decides which of them go on.

    Args:
        shape: of the search.
        search, draw, devices: as above.
    """

    def __init__(self, shape: SearchShape, search: SearchNow, draw: Draw, devices: int) -> None:
        self._shape = shape
        self._rungs = shape.rungs
        self._last = len(shape.rungs) - 1
        self._number = {iterations: rung for rung, iterations in enumerate(shape.rungs)}
        #: The rung to which each trial runs, or at which it waits.
        self._rung = [self._rung_of(trial) for trial in search.live] + [0] * search.coming
        #: Trials that end before they reach their rung.
        self._cut: set[int] = set()
        super().__init__(search, draw, devices)
        #: Trials that the scheduler knows and that are not alive here.
        self._gone = 0
        self._scheduler, decision = self._take_up(
            search, {trial for trial in range(self._next) if self._goes_on(trial)}
        )
        self.queued.extend(self._go_on(decision))

    def next_fresh(self) -> int:
        if self._next >= self._count or self._open >= self._most:
            return -1
        started = self._scheduler.start()
        if started is None:
            return -1
        self._rung[self._next] = self._number[started.budget]
        return super().next_fresh()

    def ended(self, trial: int) -> Sequence[int]:
        self._open -= 1
        known = trial + self._gone
        if self._cut and trial in self._cut:
            self._cut.discard(trial)
            return self._go_on(self._scheduler.ended(known))
        return self._go_on(self._scheduler.reached(known, self._draw.chance[trial][self._rung[trial]]))

    def work(self, trial: int) -> float:
        stops, rung = self._draw.stops, self._rung[trial]
        if stops is not None and stops[trial][rung] < 1.0:
            done = self._done[trial]
            self._cut.add(trial)
            seconds = super().work(trial)
            self._done[trial] = done
            return seconds * stops[trial][rung]
        return super().work(trial)

    def _take_up(self, search: SearchNow, under_way: set[int]) -> tuple[RungScheduler, RungDecision]:
        """The scheduler of the search as it stands, and what it decides at once: here, all run to the last rung."""
        return FullBudget(budget=self._rungs[-1], samples=None), RungDecision()

    def _rung_of(self, trial: LiveTrial) -> int:
        passed = bisect_right(self._rungs, trial.done)
        if trial.granted <= trial.done:  # It waits at the rung that it has come to.
            return max(0, passed - 1)
        return min(passed, self._last)

    def _goes_on(self, trial: int) -> bool:
        live = self._live[trial]
        return live.granted > live.done and self._left(trial) > 0.0

    def _left(self, trial: int) -> float:
        return max(0.0, self._rungs[self._rung[trial]] - self._done[trial])

    def _most_open(self, search: SearchNow, devices: int) -> float:
        if self._shape.concurrency is None:
            return math.inf
        return self._shape.concurrency or devices

    def _go_on(self, decision: RungDecision) -> Sequence[int]:
        """The trials that are promoted."""
        if not decision.promoted:
            return _NONE
        found = []
        for budget in decision.promoted:
            trial = budget.trial - self._gone
            self._rung[trial] = self._number[budget.budget]
            found.append(trial)
        self._open += len(found)
        return found


class _Full(_AtRungs):
    """Each trial runs to the last rung at once."""

    def _rung_of(self, trial: LiveTrial) -> int:
        return self._last


class _Stopping(_AtRungs):
    """A trial that reaches a rung goes on at once or ends."""

    def _take_up(self, search: SearchNow, under_way: set[int]) -> tuple[RungScheduler, RungDecision]:
        shape = self._shape
        scheduler = StoppingHalving(rungs=shape.rungs, eta=shape.eta, first=shape.first, slack=shape.slack)
        came = _arrivals(search, shape.rungs)[:-1]
        # The scores of those that came are in even steps, as nothing is known of them.
        scores = [[(place + 1) / (number + 1) for place in range(number)] for number in came]
        scheduler.take_up(self._next, {trial: self._rung[trial] for trial in under_way}, scores)
        return scheduler, RungDecision()


class _Promoting(_AtRungs):
    """ASHA: each arrival at a rung may promote one of the best 1/eta that came there."""

    def _take_up(self, search: SearchNow, under_way: set[int]) -> tuple[RungScheduler, RungDecision]:
        shape, draw = self._shape, self._draw
        self._gone = ended = sum(search.ended.values())
        came = _arrivals(search, shape.rungs)
        rungs = [AshaRung(arrived=number) for number in came]
        for length, number in search.ended.items():
            if length not in self._number:  # They were on their way to the rung above.
                rungs[min(bisect_right(shape.rungs, length), self._last)].lost += number
        for rung, target in enumerate(shape.rungs[:-1]):
            gone, waiting = came[rung + 1], []
            for number, trial in enumerate(search.live):
                if number not in under_way and self._rung[number] == rung:
                    waiting.append(number)
                elif target <= trial.done < shape.rungs[rung + 1]:
                    gone += 1  # It runs to the next rung.
            waiting.sort(key=lambda number: draw.chance[number][rung])
            others = max(0, came[rung] - gone - len(waiting))
            # Of so many in order of their scores, those that were promoted are taken for the best, then those that may
            # be; numbers below 0 stand for trials that are not alive here.
            numbers = [*range(-gone, 0), *(number + ended for number in waiting)]
            step = 1.0 / (len(numbers) + others + 1)
            rungs[rung].best = [((place + 1) * step, number) for place, number in enumerate(numbers)]
            rungs[rung].promoted = set(range(-gone, 0))
        scheduler = AsynchronousHalving(rungs=shape.rungs, eta=shape.eta, samples=ended + self._count)
        heading = {trial + ended: self._rung[trial] for trial in under_way}
        return scheduler, scheduler.take_up(ended + self._next, heading, rungs)


class _Halving(_AtRungs):
    """Synchronous successive halving: a rung of a bracket is decided when all of its trials are there."""

    #: The bracket of each trial, and the last one whose trials may start.
    _bracket: list[int]
    _filling: int

    def next_fresh(self) -> int:
        if self._next < self._count and self._bracket[self._next] > self._filling:
            if self._open:
                return -1
            self._filling = self._bracket[self._next]
        return super().next_fresh()

    def _rung_of(self, trial: LiveTrial) -> int:
        brackets = self._shape.brackets
        # A bracket with fewer rungs has the last ones.
        first = len(self._rungs) - len(brackets[min(trial.bracket, len(brackets) - 1)]) if brackets else 0
        return max(first, super()._rung_of(trial))

    def _take_up(self, search: SearchNow, under_way: set[int]) -> tuple[RungScheduler, RungDecision]:
        sizes = self._shape.brackets_of(self._count + sum(search.ended.values()))
        last = len(sizes) - 1
        fresh = [number for number, of_bracket in enumerate(sizes) for _ in range(of_bracket[0])]
        fresh = [*fresh, *[last] * search.coming][max(0, len(fresh) - search.coming) :][: search.coming]
        self._bracket = [min(trial.bracket, last) for trial in search.live] + fresh
        self._filling = self._bracket[self._next] if self._shape.one_by_one and fresh else last
        trials = Counter(self._bracket)
        # The rung of each bracket is the highest one of its trials; those that wait below it have lost.
        at = [
            max((self._rung[number] for number in range(self._next) if self._bracket[number] == each), default=0)
            for each in range(last + 1)
        ]
        shapes = [
            BracketShape(self._rungs[len(self._rungs) - len(each) :], (trials[number], *each[1:]))
            for number, each in enumerate(sizes)
        ]
        scheduler = Brackets(shapes)
        there = {
            number: self._draw.chance[number][self._rung[number]]
            for number in range(self._next)
            if number not in under_way and self._rung[number] == at[self._bracket[number]]
        }
        first = [len(self._rungs) - len(each) for each in sizes]
        local = [max(0, rung - below) for rung, below in zip(at, first, strict=True)]
        return scheduler, scheduler.take_up(self._bracket[: self._next], local, under_way, there)

    def _go_on(self, decision: RungDecision) -> Sequence[int]:
        """The trials that are promoted, the longest first."""
        return sorted(super()._go_on(decision), key=lambda trial: -self._pace[trial])


_RULES = {"full": _Full, "stopping": _Stopping, "asha": _Promoting, "halving": _Halving}


def rules_for(search: SearchNow, draw: Draw, devices: int) -> PlayRules:
    """Returns a search in one draw, on so many devices."""
    if search.shape is None:
        return PlayRules(search, draw, devices)
    return _RULES[search.shape.algorithm](search.shape, search, draw, devices)


def _arrivals(search: SearchNow, rungs: Sequence[int]) -> list[int]:
    """How many trials have come to each rung."""
    came = [0] * len(rungs)
    for trial in search.live:
        for rung in range(bisect_right(rungs, trial.done)):
            came[rung] += 1
    for done, number in search.ended.items():
        for rung in range(bisect_right(rungs, done)):
            came[rung] += number
    return came

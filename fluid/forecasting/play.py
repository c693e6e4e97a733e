"""Plays a search from now to its end, many times over: a fast list schedule of its shape, without the engine.

Each draw has paces of its own, lognormal about their medians, and chance decides which trials continue. Devices are
alike and serve the trials in the order in which they come; trials that were promoted go before new ones. What a draw
takes from chance does not depend on the number of devices, so that plays on several numbers compare.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fluid.errors import require_integer
from fluid.forecasting.search_now import LiveTrial, SearchNow
from fluid.measure.runtime_model import FloatArray
from fluid.planners.instance import EndDistribution
from fluid.search.brackets import Brackets
from fluid.search.rungs import BracketShape, RungDecision
from fluid.search.schedulers import AshaRung, AsynchronousHalving, FullBudget, RungScheduler, StoppingHalving
from fluid.search_shape import SearchShape

# -- search draws --------------------------------------------------------------------------------
#
# What chance decides in one play of a search: paces, scores, lengths and early ends.


#: How often a pace is drawn anew that would have ended the iteration in flight before now.
_TRIES = 20
#: Most by which the spread of a draw exceeds the one that was observed: few observations say little.
_WIDEST = 2.5


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance decides in one play; trials are numbered, live ones first.

    Attributes:
        pace: seconds per iteration of each trial, alone on a device.
        chance: for each trial, a number in (0, 1) for each rung.
        stops: for each trial, the share of its way to each rung after which it ends early, if below 1; ``None`` if none
            does.
        length: iterations of each trial in all, of a search whose shape is unknown; else none.
    """

    pace: list[float]
    chance: list[list[float]]
    stops: list[list[float]] | None
    length: list[float]


class SearchDraws:
    """Draws from what is known of a search, the same for a number each time.

    The medians of new trials' paces are drawn too, as they follow from few observations: the variance of their
    logarithms from its scaled inverse chi-squared distribution, the mean given that variance.

    Args:
        search: as it stands.
        seed: of chance.
    """

    def __init__(self, search: SearchNow, seed: int) -> None:
        self._search = search
        self._seed = require_integer("seed", seed, at_least=0)
        live = search.live
        unknown = [trial.seconds is None for trial in live]
        self._count = len(live) + search.coming
        self._is_new = np.array([*unknown, *[True] * search.coming], dtype=bool)
        self._median = np.full(self._count, 1.0)
        self._median[: len(live)] = [1.0 if trial.seconds is None else trial.seconds for trial in live]
        self._sigma = np.zeros(self._count)
        self._sigma[: len(live)] = [0.0 if trial.seconds is None else trial.sigma for trial in live]
        self._elapsed = np.zeros(self._count)
        self._elapsed[: len(live)] = [trial.elapsed for trial in live]
        self._rungs = 1 if search.shape is None else len(search.shape.rungs)
        self._exposure = _exposure(search) if search.stops else 0.0
        self._lengths = _LengthDraws(search) if search.shape is None else None

    def of(self, draw: int) -> Draw:
        """Returns the draw of that number."""
        rng = np.random.default_rng([self._seed, draw])
        pace = self._paces(rng)
        chance = rng.random((self._count, self._rungs)).tolist()
        stops = None
        if self._search.stops:
            hazard = rng.gamma(self._search.stops + 0.5) / (self._exposure + 0.5)
            stops = (rng.standard_exponential((self._count, self._rungs)) / hazard).tolist()
        length = [] if self._lengths is None else self._lengths.draw(rng)
        return Draw(pace.tolist(), chance, stops, length)

    def _paces(self, rng: np.random.Generator) -> FloatArray:
        search, observed = self._search, self._search.observed
        median, sigma = search.seconds, search.sigma
        if observed and sigma:
            sigma *= min(_WIDEST, math.sqrt((observed + 1) / rng.chisquare(observed + 1)))
            median *= math.exp(sigma / math.sqrt(observed) * rng.standard_normal())
        medians = np.where(self._is_new, median, self._median)
        sigmas = np.where(self._is_new, sigma, self._sigma)
        pace = medians * np.exp(sigmas * rng.standard_normal(self._count))
        for _ in range(_TRIES):
            late = np.flatnonzero((pace < self._elapsed) & (sigmas > 0.0))
            if not len(late):
                break
            pace[late] = medians[late] * np.exp(sigmas[late] * rng.standard_normal(len(late)))
        bounded: FloatArray = np.maximum(pace, np.where(sigmas > 0.0, self._elapsed, 0.0))
        return bounded


def _exposure(search: SearchNow) -> float:
    """Number of ways to a rung, whole and in parts, that trials have gone."""
    assert search.shape is not None
    rungs = (0, *search.shape.rungs)
    numbers = Counter(search.ended)
    numbers.update(trial.done for trial in search.live)
    result = 0.0
    for done, number in numbers.items():
        passed = bisect_right(rungs, done) - 1
        part = (done - rungs[passed]) / (rungs[passed + 1] - rungs[passed]) if passed + 1 < len(rungs) else 0.0
        result += number * (passed + part)
    return result


class _LengthDraws:
    """Draws how far trials of an unknown algorithm run, as others did.

    With probability 1 - e(t)/n(t), a trial that has come to t iterations goes on: e of the n that came so far ended
    there (Kaplan and Meier, 1958); that probability is drawn from its beta distribution. Beyond the furthest trial, a
    trial survives t iterations with a probability that falls as 1/t.
    """

    def __init__(self, search: SearchNow) -> None:
        self._search = search
        reach = [trial.done for trial in search.live]
        at_risk = sum(search.ended.values()) + len(reach)
        lengths = sorted({*search.ended, *reach})
        self._most = max([search.most, *search.ended, *(max(trial.done, trial.granted) for trial in search.live)])
        running = Counter(reach)
        at, ends, stays = [], [], []
        for length in lengths:
            if length and (ended := search.ended.get(length, 0)):
                at.append(length)
                ends.append(ended)
                stays.append(at_risk - ended)
            at_risk -= search.ended.get(length, 0) + running[length]
        self._at = np.array(at, dtype=np.float64)
        self._ends = np.array(ends, dtype=np.float64)
        self._stays = np.array(stays, dtype=np.float64)
        # A trial that waits for a decision has survived less than what it has run.
        survived = [trial.done if trial.granted > trial.done else trial.done - 1 for trial in search.live]
        self._done = np.array([*(trial.done for trial in search.live), *[0] * search.coming], dtype=np.float64)
        self._survived = np.array([*survived, *[-1] * search.coming], dtype=np.float64)
        self._furthest = float(max([1, *lengths, *(trial.granted for trial in search.live)]))

    def draw(self, rng: np.random.Generator) -> list[float]:
        """Draws the length of each trial."""
        most = float(self._most)
        count = len(self._done)
        # Of those that have ended by themselves at the most, none goes on.
        stay = (
            np.where(self._at >= most, 0.0, rng.beta(np.maximum(self._stays, 1e-9) + 0.5, self._ends + 0.5))
            if len(self._at)
            else np.empty(0)
        )
        survival = np.concatenate([[1.0], np.cumprod(stay)])
        level = survival[np.searchsorted(self._at, self._survived, side="right")] * rng.random(count)
        # The first length at which the survival falls to the level or below.
        position = np.searchsorted(-survival[1:], -level, side="left")
        inside = position < len(self._at)
        lengths = np.where(inside, self._at[np.minimum(position, len(self._at) - 1)], most) if len(self._at) else None
        if lengths is None:
            lengths = np.full(count, most)
        tail = survival[-1]
        known = max(self._furthest, 1.0)
        if tail > 0.0 and most > known:
            # S(t) = tail * known / t.
            with np.errstate(divide="ignore"):
                beyond = np.minimum(most, np.maximum(known, tail * known / np.maximum(level, 1e-12)))
            lengths = np.where(inside, lengths, beyond)
        rounded: list[float] = np.maximum(np.round(lengths), self._done).tolist()
        return rounded


# -- play rules ----------------------------------------------------------------------------------
#
# Which trials of a played search continue, and when new ones start, by the shape of its algorithm.


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


# -- playing -------------------------------------------------------------------------------------


def play(search: SearchNow, devices: int, *, draws: int = 200, seed: int = 0) -> EndDistribution:
    """Returns when a search ends, from now.

    Example:
        >>> from fluid.forecasting.play import play
        >>> from fluid.forecasting.scenario import Workload
        >>> from fluid.forecasting.search_now import SearchNow
        >>> search = SearchNow.at_start(Workload("random", trials=3, max_iterations=5), seconds=1.0)
        >>> play(search, 2).quantile(0.5), play(search, 3).quantile(0.5)
        (10.0, 5.0)

    Args:
        search: as it stands.
        devices: that it has from now on, at least 1.
        draws: how often it is played, at least 1.
        seed: of chance: the same seed gives the same distribution.
    """
    return Player(search, draws=draws, seed=seed).on(devices)


class Player:
    """Plays one search, on several numbers of devices with the same draws.

    Args:
        search: as it stands.
        draws: how often it is played, at least 1.
        seed: of chance.
    """

    def __init__(self, search: SearchNow, *, draws: int = 200, seed: int = 0) -> None:
        self._search = search
        self._count = require_integer("draws", draws, at_least=1)
        self._draws = SearchDraws(search, seed)

    def on(self, devices: int) -> EndDistribution:
        """Returns when the search ends on so many devices, from now."""
        devices = require_integer("devices", devices, at_least=1)
        return EndDistribution.of_draws([self.end_of(draw, devices) for draw in range(self._count)])

    def end_of(self, draw: int, devices: int) -> float:
        """Returns the seconds after which the search ends in one draw, on so many devices."""
        seconds = self._play(draw, devices)
        limit = self._search.ends_in
        return seconds if limit is None else min(seconds, max(0.0, limit))

    def _play(self, draw: int, devices: int) -> float:
        stretch = stretches(self._search, devices)
        slots = len(stretch) - 1
        rules = rules_for(self._search, self._draws.of(draw), devices)
        running: list[tuple[float, int]] = []
        # Of work, in seconds of a trial alone on a device, those that run are served alike.
        served = now = 0.0
        count = 0
        queue = deque[int]()
        for trial in rules.running:
            if count < slots:
                count += 1
                running.append((rules.work(trial), trial))
            else:
                queue.append(trial)
        heapq.heapify(running)
        queue.extend(rules.queued)
        push, pop, next_fresh, work, ended = heapq.heappush, heapq.heappop, rules.next_fresh, rules.work, rules.ended
        while True:
            while count < slots:
                if queue:
                    trial = queue.popleft()
                elif (trial := next_fresh()) < 0:
                    break
                push(running, (served + work(trial), trial))
                count += 1
            if not running:
                return now
            until, trial = pop(running)
            now += (until - served) * stretch[count]
            served = until
            count -= 1
            further = ended(trial)
            if further:
                queue.extend(further)


def stretches(search: SearchNow, devices: int) -> Sequence[float]:
    """Seconds that a trial takes for what takes it a second alone on a device, by the number of trials that run.

    With fewer trials than devices, each spans as many as it may; with more, they share devices evenly, and the mean
    counts. The last entry is for as many as may run.

    Args:
        search: ``packing``, ``rate``, ``max_width`` and ``beta`` count.
        devices: that there are.
    """
    most = max(1, search.packing)
    alpha = (most / search.rate) ** (1.0 / (most - 1)) if most > 1 else 1.0
    result = [1.0]
    for count in range(1, devices * most + 1):
        if count <= devices:
            widths = range(1, min(search.max_width, devices // count) + 1)
            result.append(min(search.beta ** (width - 1) / width for width in widths))
            continue
        fewer, fuller = divmod(count, devices)
        seconds = fuller * (fewer + 1) * alpha**fewer + (devices - fuller) * fewer * alpha ** (fewer - 1)
        result.append(max(seconds / count, math.nextafter(0.0, 1.0)))
    return result

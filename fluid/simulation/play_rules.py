"""Which trials of a played search continue, and when new ones start, by the shape of its algorithm."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from fluid.search_shape import SearchShape
from fluid.simulation.search_draws import Draw
from fluid.simulation.search_now import SearchNow

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

    def finish(self) -> Sequence[int]:
        """Returns the trials that go on once all runs have ended; none if the search has ended."""
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
    """Trials run from rung to rung; here, each to the last one.

    Args:
        shape: of the search.
        search, draw, devices: as above.
    """

    def __init__(self, shape: SearchShape, search: SearchNow, draw: Draw, devices: int) -> None:
        self._shape = shape
        self._rungs = shape.rungs
        self._last = len(shape.rungs) - 1
        #: The rung to which each trial runs, or at which it waits.
        self._rung = [self._rung_of(trial.done, trial.granted) for trial in search.live]
        self._rung += [self._first_rung(number) for number in range(search.coming)]
        #: Trials that end before they reach their rung.
        self._cut: set[int] = set()
        super().__init__(search, draw, devices)

    def ended(self, trial: int) -> Sequence[int]:
        self._open -= 1
        if self._cut and trial in self._cut:
            self._cut.discard(trial)
            return self._lost(trial, self._rung[trial])
        return self._reached(trial, self._rung[trial])

    def work(self, trial: int) -> float:
        stops, rung = self._draw.stops, self._rung[trial]
        if stops is not None and stops[trial][rung] < 1.0:
            done = self._done[trial]
            self._cut.add(trial)
            seconds = super().work(trial)
            self._done[trial] = done
            return seconds * stops[trial][rung]
        return super().work(trial)

    def _rung_of(self, done: int, granted: int) -> int:
        if granted <= done:  # It waits at the rung that it has come to.
            return max(0, bisect_right(self._rungs, done) - 1)
        return min(bisect_right(self._rungs, done), self._last)

    def _first_rung(self, number: int) -> int:
        """The rung to which a new trial runs first."""
        return 0

    def _goes_on(self, trial: int) -> bool:
        live = self._live[trial]
        return live.granted > live.done and self._left(trial) > 0.0

    def _left(self, trial: int) -> float:
        return max(0.0, self._rungs[self._rung[trial]] - self._done[trial])

    def _most_open(self, search: SearchNow, devices: int) -> float:
        if self._shape.concurrency is None:
            return math.inf
        return self._shape.concurrency or devices

    def _promote(self, trial: int, rung: int) -> Sequence[int]:
        """Sends a trial on from a rung."""
        self._rung[trial] = rung + 1
        self._open += 1
        return (trial,)

    def _reached(self, trial: int, rung: int) -> Sequence[int]:
        """A trial has reached a rung."""
        return _NONE

    def _lost(self, trial: int, rung: int) -> Sequence[int]:
        """A trial has ended on its way to a rung."""
        return _NONE


class _Full(_AtRungs):
    """Each trial runs to the last rung at once."""

    def _rung_of(self, done: int, granted: int) -> int:
        return self._last

    def _first_rung(self, number: int) -> int:
        return self._last


class _Stopping(_AtRungs):
    """A trial that reaches a rung goes on at once or ends."""

    def __init__(self, shape: SearchShape, search: SearchNow, draw: Draw, devices: int) -> None:
        super().__init__(shape, search, draw, devices)
        #: Trials that have come to each rung.
        self._came = _arrivals(search, shape.rungs)

    def _reached(self, trial: int, rung: int) -> Sequence[int]:
        if rung == self._last:
            return _NONE
        self._came[rung] += 1
        came, shape = self._came[rung], self._shape
        if came <= shape.first or self._draw.chance[trial][rung] * came < came / shape.eta + shape.slack:
            return self._promote(trial, rung)
        return _NONE


class _Promoting(_AtRungs):
    """ASHA: each arrival at a rung may promote one of the best 1/eta that came there."""

    def __init__(self, shape: SearchShape, search: SearchNow, draw: Draw, devices: int) -> None:
        super().__init__(shape, search, draw, devices)
        self._came = _arrivals(search, shape.rungs)
        #: At each rung, the score and number of those that came there and were promoted or may be, the best first.
        self._best: list[list[tuple[float, int]]] = []
        #: Those that were promoted from each rung; -1 for one that has ended since, or runs beyond.
        self._promoted: list[set[int]] = []
        for rung in range(self._last):
            gone, waiting = self._came[rung + 1], []
            target = shape.rungs[rung]
            for number, trial in enumerate(search.live):
                if trial.granted <= trial.done and self._rung[number] == rung:
                    waiting.append(number)
                elif target <= trial.done < shape.rungs[rung + 1]:
                    gone += 1  # It runs to the next rung.
            waiting.sort(key=lambda number: draw.chance[number][rung])
            others = max(0, self._came[rung] - gone - len(waiting))
            # Of so many in order of their scores, those that were promoted are taken for the best, then those that may
            # be; numbers below 0 stand for trials that are not alive here.
            numbers = [*range(-gone, 0), *waiting]
            step = 1.0 / (len(numbers) + others + 1)
            self._best.append([((place + 1) * step, number) for place, number in enumerate(numbers)])
            self._promoted.append(set(range(-gone, 0)))

    def finish(self) -> Sequence[int]:
        """Promotes the best one that waits at the highest rung if none came to the last."""
        if self._came[self._last]:
            return _NONE
        for rung in range(self._last - 1, -1, -1):
            for _, trial in self._best[rung]:
                if trial not in self._promoted[rung]:
                    self._promoted[rung].add(trial)
                    return self._promote(trial, rung)
        return _NONE

    def _reached(self, trial: int, rung: int) -> Sequence[int]:
        self._came[rung] += 1
        if rung == self._last:
            return _NONE
        best, promoted, quota = self._best[rung], self._promoted[rung], self._came[rung] // self._shape.eta
        score = (self._draw.chance[trial][rung], trial)
        place = bisect_right(best, score)
        best.insert(place, score)
        candidate = min(place, quota - 1)
        if candidate < 0 or best[candidate][1] in promoted:
            return _NONE
        chosen = best[candidate][1]
        promoted.add(chosen)
        return self._promote(chosen, rung)


class _Halving(_AtRungs):
    """Synchronous successive halving: a rung of a bracket is decided when all of its trials are there."""

    def __init__(self, shape: SearchShape, search: SearchNow, draw: Draw, devices: int) -> None:
        known = len(search.live) + sum(search.ended.values())
        self._sizes = shape.brackets_of(known + search.coming)
        last = len(self._sizes) - 1
        fresh = [number for number, sizes in enumerate(self._sizes) for _ in range(sizes[0])]
        fresh = ([*fresh, *[last] * search.coming])[max(0, len(fresh) - search.coming) :][: search.coming]
        self._fresh = fresh
        super().__init__(shape, search, draw, devices)
        self._bracket = [min(trial.bracket, last) for trial in search.live] + fresh
        #: Of each bracket: trials on the way to its rung, those that are there, and whether it has more rungs.
        self._missing = [0] * (last + 1)
        self._there: list[list[int]] = [[] for _ in self._sizes]
        at = [-1] * (last + 1)
        for number in range(len(search.live)):
            at[self._bracket[number]] = max(at[self._bracket[number]], self._rung[number])
        for number in range(self._count):
            bracket = self._bracket[number]
            if number >= self._next or self._goes_on(number):
                self._missing[bracket] += 1
            elif self._rung[number] == at[bracket]:
                self._there[bracket].append(number)
        for bracket in range(last + 1):
            self.queued.extend(self._decide(bracket))
        if shape.one_by_one and self._next < self._count:
            self._filling = self._bracket[self._next]
        else:
            self._filling = last

    def next_fresh(self) -> int:
        if self._next < self._count and self._bracket[self._next] > self._filling:
            if self._open:
                return -1
            self._filling = self._bracket[self._next]
        return super().next_fresh()

    def _first_rung(self, number: int) -> int:
        return self._last + 1 - len(self._sizes[self._fresh[number]])

    def _reached(self, trial: int, rung: int) -> Sequence[int]:
        bracket = self._bracket[trial]
        self._missing[bracket] -= 1
        self._there[bracket].append(trial)
        return self._decide(bracket)

    def _lost(self, trial: int, rung: int) -> Sequence[int]:
        bracket = self._bracket[trial]
        self._missing[bracket] -= 1
        return self._decide(bracket)

    def _decide(self, bracket: int) -> Sequence[int]:
        """Returns the trials of a bracket's next rung once all are there, the longest first."""
        there = self._there[bracket]
        if self._missing[bracket] or not there:
            return _NONE
        self._there[bracket] = []
        rung = self._rung[there[0]]
        if rung >= self._last:
            return _NONE
        chance = self._draw.chance
        there.sort(key=lambda trial: chance[trial][rung])
        best = there[: self._places(bracket, rung + 1)]
        best.sort(key=lambda trial: -self._pace[trial])
        for trial in best:
            self._promote(trial, rung)
        self._missing[bracket] = len(best)
        return best

    def _places(self, bracket: int, rung: int) -> int:
        """How many trials of a bracket run to a rung."""
        sizes = self._sizes[bracket]
        return sizes[max(0, min(len(sizes) - 1, rung - (self._last + 1 - len(sizes))))]


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

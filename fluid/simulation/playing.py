"""Plays a search from now to its end, many times over: a fast list schedule of its shape, without the engine.

Each draw has paces of its own, lognormal about their medians, and chance decides which trials continue. Devices are
alike and serve the trials in the order in which they come; trials that were promoted go before new ones. What a draw
takes from chance does not depend on the number of devices, so that plays on several numbers compare.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from fluid.errors import require_integer
from fluid.planners.instance import EndDistribution
from fluid.simulation.play_rules import rules_for
from fluid.simulation.search_draws import SearchDraws
from fluid.simulation.search_now import SearchNow


def play(search: SearchNow, devices: int, *, draws: int = 200, seed: int = 0) -> EndDistribution:
    """Returns when a search ends, from now.

    Example:
        >>> from fluid.simulation.playing import play
        >>> from fluid.simulation.scenario import Workload
        >>> from fluid.simulation.search_now import SearchNow
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

"""Checkpoints in host memory: what each is worth there, and which are brought there ahead (docs/theory.md, section 18).

How likely a trial that waits at a rung is to go on follows from its rank there. Trials that are still to come are taken
to be like those that came (exchangeable): a newcomer takes each rank among them with the same probability. No model of
scores is needed then, and the probabilities are exact.

What it gains (``benchmarks/checkpoint_values.py``): a quarter of the restores from disk that the least recently used
leaving first has, in simulation; on a real disk that was read from its cache the stalls did not differ.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from fluid.engine.commands import CheckpointValue, PrefetchCheckpoint, ValueCheckpoints
from fluid.engine.core import Claims, SessionState
from fluid.engine.events import (
    Checkpoint,
    CheckpointPlaced,
    Event,
    RungReached,
    TrialForgotten,
    TrialForked,
    TrialMoved,
    TrialSaved,
)
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import TrialRecord
from fluid.search_shape import Rung
from fluid.trialgroup import TrialState

#: Probability that a trial that runs is restored from its newest checkpoint: its lane has to die first.
LOST_LANES = 0.05
#: The same of a trial that has done all iterations that it was said to get.
GOES_ON_UNSAID = 0.05
#: A probability that changes by less is not told anew: hardly ever another checkpoint would be evicted.
VALUE_STEP = 0.02

#: Most trials of an asynchronous rung whose order of arrival is followed: the table has half the square of that.
MOST_FOLLOWED = 512


@lru_cache(maxsize=1024)
def odds_at(rung: Rung, reported: int) -> tuple[float, ...]:
    """Returns the probability to go on by rank, the best first, where so many trials of a rung have reported.

    Example:
        >>> from fluid.policies.checkpoints import odds_at
        >>> from fluid.search_shape import Rung
        >>> [round(each, 3) for each in odds_at(Rung(size=9, places=3), reported=3)]
        [0.762, 0.226, 0.012]
    """
    if reported < 1:
        return ()
    if rung.places < 1:
        return (0.0,) * reported
    size = None if rung.size is None else max(rung.size, reported)
    if not rung.promotes_at_once:
        return final_odds(reported, size, rung.places)
    eta = rung.places  # One in so many.
    if reported <= MOST_FOLLOWED and (size is None or size <= MOST_FOLLOWED):
        return arriving_odds(reported, min(MOST_FOLLOWED, size or MOST_FOLLOWED), eta)
    return final_odds(reported, size, eta if size is None else max(1, size // eta))


def final_odds(reported: int, size: int | None, places: int) -> tuple[float, ...]:
    """Returns the probability to be among the best ``places`` of ``size`` in the end, by rank among those reported.

    The trial of rank r, from 0, is among them if at least r + 1 of those reported are: their number is hypergeometric.

    Args:
        reported: how many have reported; at least 1.
        size: how many will have; ``None`` for no limit: then one in ``places`` goes on, and the number is binomial.
        places: how many go on.
    """
    return _final_odds(reported, size, places)


@lru_cache(maxsize=256)
def _final_odds(n: int, size: int | None, places: int) -> tuple[float, ...]:
    if size is None:
        share = min(1.0 / max(1, places), 1.0 - 1e-12)
        promoted = np.arange(n + 1)
        logs = _log_choose(n, promoted) + promoted * math.log(share) + (n - promoted) * math.log1p(-share)
    else:
        places = min(places, size)
        # So many of those reported may be among the best ones: no more than there are of either kind.
        promoted = np.arange(max(0, n - (size - places)), min(n, places) + 1)
        logs = _log_choose(places, promoted) + _log_choose(size - places, n - promoted) - _log_choose(size, n)
    odds = np.zeros(n + 1)
    odds[promoted] = np.exp(logs)
    tails = np.cumsum(odds[::-1])[::-1]  # of at least so many
    return tuple(np.minimum(1.0, tails[1:]).tolist())


def arriving_odds(arrived: int, size: int, eta: int) -> tuple[float, ...]:
    """Returns the probability to be among the best 1/eta of those that came, now or after a later arrival, by rank.

    ASHA promotes a trial as soon as it is. With t trials there, the next one ranks before the trial of rank r with
    probability (r + 1)/(t + 1); the table over t and r is worked out from the last arrival back.

    Args:
        arrived: how many have come; at least 1.
        size: how many will.
        eta: one in so many goes on.

    Example:
        >>> from fluid.policies.checkpoints import arriving_odds
        >>> [round(each, 3) for each in arriving_odds(2, 3, 3)]
        [0.667, 0.0]
    """
    return tuple(map(float, _arrival_table(size, eta)[min(arrived, size) - 1]))


@lru_cache(maxsize=8)
def _arrival_table(size: int, eta: int) -> tuple[np.ndarray, ...]:
    """The odds by rank, for 1, 2, ... arrivals."""
    later = (np.arange(size) < size // eta).astype(float)
    table = [later]
    for there in range(size - 1, 0, -1):
        ranks = np.arange(there)
        before = (ranks + 1.0) / (there + 1.0)
        odds = before * later[1:] + (1.0 - before) * later[:-1]
        odds[: there // eta] = 1.0
        table.append(odds)
        later = odds
    return tuple(reversed(table))


def _log_choose(n: int, k: Any) -> Any:
    """Logarithms of binomial coefficients."""
    table = _log_factorials(1 << n.bit_length())
    return table[n] - table[k] - table[n - k]


@lru_cache(maxsize=8)
def _log_factorials(size: int) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1.0, size + 1.0)))))


# -- rungs ---------------------------------------------------------------------------------------
#
# Rungs as the engine knows them: who has come there, in which order of scores (docs/theory.md, section 18).


#: All trials of a rung are valued again when so many times as many have come: odds differ by little before.
VALUED_AGAIN = 1.05
#: Share of a rung's trials that must have come before the best of them are sure enough to go on.
NEARLY_ALL = 0.8


#: Names a rung of a session: its group, its bracket, and its iterations.
RungKey = tuple[str, int, int]


@dataclass(slots=True)
class RungRanking:
    """Who has come to a rung.

    Attributes:
        rung: what was said of it last.
        ranked: score and order of arrival of those that came, and their ids; the best first.
        places: score and order of each of them.
        waiting: how many of them have come to no later rung.
        valued: how many had come when all of them were valued last.
    """

    rung: Rung
    ranked: list[tuple[float, int, str]] = field(default_factory=list)
    places: dict[str, tuple[float, int]] = field(default_factory=dict)
    waiting: int = 0
    valued: int = 0

    def add(self, trial_id: str, rung: Rung, score: float) -> None:
        """Adds a trial, or gives it another score."""
        self.rung = rung
        before = self.places.get(trial_id)
        if before is not None:
            del self.ranked[bisect_left(self.ranked, before)]
        else:
            self.waiting += 1
        score = math.inf if math.isnan(score) else score
        # Of equal scores the first to come is the better one.
        place = self.places[trial_id] = (score, len(self.places) if before is None else before[1])
        insort(self.ranked, (*place, trial_id))

    def rank(self, trial_id: str) -> int:
        """Rank of a trial among those that came, from 0."""
        return bisect_left(self.ranked, self.places[trial_id])

    def is_to_be_valued(self) -> bool:
        """Whether so many have come since the last time that the odds of all are to be looked at; then that is noted.

        So a trial of a large rung is valued some tens of times, not once for each trial that comes after it.
        """
        came = len(self.ranked)
        if came < self.valued * VALUED_AGAIN and came != self.rung.size:
            return False
        self.valued = came
        return True

    @property
    def is_over(self) -> bool:
        """Whether no trial that came waits there, and no further one comes."""
        return not self.waiting and self.rung.size is not None and len(self.ranked) >= self.rung.size

    @property
    def odds(self) -> tuple[float, ...]:
        """Probability to go on by rank, the best first."""
        return odds_at(self.rung, len(self.ranked))

    @property
    def promotable(self) -> int:
        """How many of the best would go on if no further trial came."""
        return self._share(self.rung.places, is_rate=self.rung.promotes_at_once or self.rung.size is None)

    @property
    def parents(self) -> int:
        """How many of the best others would go on from if no further trial came."""
        return self._share(self.rung.parents, is_rate=False)

    def _share(self, places: int, *, is_rate: bool) -> int:
        came, size = len(self.ranked), self.rung.size
        if places < 1:
            return 0
        return came // places if is_rate else math.ceil(places * came / max(came, size or came))

    def best_when_nearly_all_came(self) -> list[str]:
        """The trials that would go on if no further one came; none before so many have come that it is likely."""
        if not self._nearly_all_came:
            return []
        return [trial_id for *_, trial_id in islice(self.ranked, self.promotable)]

    def goes_on_surely(self, trial_id: str) -> bool:
        """Whether a trial is one of those."""
        return self._nearly_all_came and self.rank(trial_id) < self.promotable

    @property
    def _nearly_all_came(self) -> bool:
        return self.rung.size is not None and len(self.ranked) >= NEARLY_ALL * self.rung.size


# -- checkpoint values ---------------------------------------------------------------------------
#
# What checkpoints are worth to keep in memory, and which are brought there ahead of time.
#
# A checkpoint is worth what it saves when its trial is restored from it, times how likely that is. The stores of hosts
# know the bytes and what a read from disk takes; the engine knows which trials come back: those that wait for a
# device, and of those that wait at a rung the ones that rank well there.


#: What a store takes a checkpoint of a trial for that was never named.
UNNAMED = CheckpointValue(0.5)
_NEVER = CheckpointValue(0.0)
_AT_ONCE = CheckpointValue(1.0, pinned=True)
_GONE = frozenset(state for state in TrialState if state.is_over)
_ABOUT_TO_START = frozenset({TrialState.QUEUED, TrialState.STARTING})
_WAITS = frozenset({TrialState.DONE, TrialState.QUEUED})
_RUNS = frozenset({TrialState.RUNNING, TrialState.RESIZING, TrialState.STOPPING})


class CheckpointValues(Policy):
    """Tells the stores of hosts what checkpoints in their memory are worth, and what to bring there.

    Only what has changed is told, once for each call of the engine, and of checkpoints that are in memory.

    Attributes:
        told: what the stores were told last, by trial.
    """

    def __init__(self, core: SessionState) -> None:
        self.told: dict[str, CheckpointValue] = {}
        self._core = core
        #: Trials whose newest checkpoint is in memory, as far as is known.
        self._in_memory: set[str] = set()
        #: Those among them whose checkpoint or rank is new.
        self._due: set[str] = set()
        self._rankings: dict[RungKey, RungRanking] = {}
        #: The latest rung that each trial came to.
        self._rung_of: dict[str, RungKey] = {}
        #: By group: iterations of the highest rung reached, the best score there negated, and the trial that has it.
        self._best: dict[str, tuple[int, float, str]] = {}
        #: Those whose checkpoint another driver has written, in a folder of its own.
        self._foreign: set[str] = set()
        #: Of trials whose checkpoint was asked for and has not come: its iteration, and the host.
        self._asked: dict[str, tuple[int, str]] = {}

    # -- events --------------------------------------------------------------------------------------------

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Rungs that trials come to, and checkpoints that come and go."""
        return {
            RungReached: (self.check_reached, self.reached),
            CheckpointPlaced: (None, self.checkpoint_placed),
            TrialSaved: (None, self.saved),
            TrialForked: (None, self.forked),
            TrialForgotten: (None, self.trial_forgotten),
            TrialMoved: (None, self.moved),
        }

    def moved(self, event: TrialMoved) -> None:
        """A trial goes on from what another driver has written, which lanes read where it is."""
        self._in_memory.discard(event.trial_id)
        self._foreign.add(event.trial_id)

    def check_reached(self, event: RungReached, claims: Claims) -> None:
        """Refuses the rung of an unknown trial."""
        self._core.require_known(event.trial_id)

    def reached(self, event: RungReached) -> None:
        """Ranks a trial at its rung, whose other trials then have other odds."""
        trial_id, rung = event.trial_id, event.rung
        trial = self._core.trials[trial_id]
        key = (trial.group_id, rung.bracket, rung.iterations)
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._rankings[key] = RungRanking(rung)
        before = self._rung_of.get(trial_id)
        if before is not None and before != key:
            self._leave(before)
        self._rung_of[trial_id] = key
        ranking.add(trial_id, rung, event.score)
        self._note_best(trial.group_id, (rung.iterations, -ranking.places[trial_id][0], trial_id))
        if trial_id in self._in_memory:
            self._due.add(trial_id)
        known, asked = self._in_memory, self._asked
        if (known or asked) and ranking.is_to_be_valued():
            self._due.update(name for *_, name in ranking.ranked if name in known or name in asked)
        self._due.update(name for name in ranking.best_when_nearly_all_came() if name not in self._in_memory)

    def forked(self, event: TrialForked) -> None:
        """A trial has the state from which it starts."""
        if event.checkpoint is not None and event.trial_id in self._core.trials:
            self.saved(TrialSaved(event.at, event.trial_id, None, event.checkpoint))

    def saved(self, event: TrialSaved) -> None:
        """A trial has a new checkpoint, or one that was copied to disk."""
        self._due.add(event.trial_id)
        self._foreign.discard(event.trial_id)
        if event.checkpoint.in_memory:
            self._in_memory.add(event.trial_id)

    def checkpoint_placed(self, event: CheckpointPlaced) -> None:
        """A store has moved a checkpoint; one that is not its trial's newest is of use only if that is lost."""
        trial, moved = self._core.trials.get(event.trial_id), event.checkpoint
        if trial is None:
            return
        residence = trial.residence
        if residence.checkpoint is not None and residence.checkpoint.iteration == moved.iteration:
            trial.residence = replace(trial.residence, checkpoint=moved)
            self._due.add(trial.trial_id)
            if moved.in_memory:
                self._in_memory.add(trial.trial_id)
            else:
                self._in_memory.discard(trial.trial_id)
        durable = residence.durable
        if not moved.in_memory and (durable is None or moved.iteration >= durable.iteration):
            trial.residence = replace(trial.residence, durable=moved)

    def trial_forgotten(self, event: TrialForgotten) -> None:
        """Drops what was known of a trial that is forgotten; its checkpoints are deleted."""
        trial_id = event.trial_id
        for known in (self._in_memory, self._due, self._foreign):
            known.discard(trial_id)
        self.told.pop(trial_id, None)
        self._asked.pop(trial_id, None)
        key = self._rung_of.pop(trial_id, None)
        if key is not None:
            self._leave(key)

    def at_end(self) -> None:
        """Tells the stores what has changed in this call of the engine, and asks for what is wanted in memory."""
        core, due = self._core, self._due
        due.update(name for name in core.trials.touched if name in self._in_memory or name in self._rung_of)
        changed: dict[str, CheckpointValue] = {}
        wanted: list[tuple[int, str, str]] = []
        for trial_id in due:
            trial = core.trials.get(trial_id)
            checkpoint = None if trial is None else trial.residence.checkpoint
            if trial is None or checkpoint is None:
                self._in_memory.discard(trial_id)
                continue
            value = self._value(trial)
            was_asked, host = trial_id in self._asked, self._wanted_on(trial, checkpoint)
            if host is None and (checkpoint.in_memory or not value.pinned):
                self._asked.pop(trial_id, None)
            elif host is not None and self._asked.get(trial_id) != (checkpoint.iteration, host):
                self._asked[trial_id] = (checkpoint.iteration, host)
                wanted.append((self._rankings[self._rung_of[trial_id]].rank(trial_id), trial_id, host))
            # A store also has to know what a checkpoint is worth that it is to bring, and when it need not any more.
            is_of_use = checkpoint.in_memory or was_asked or trial_id in self._asked
            if is_of_use and _differ(value, self.told.get(trial_id, UNNAMED)):
                changed[trial_id] = self.told[trial_id] = value
            if not checkpoint.in_memory or trial.state in _GONE:
                self._in_memory.discard(trial_id)
        due.clear()
        if changed:
            core.commands.append(ValueCheckpoints(changed))
        for _, trial_id, host in sorted(wanted):  # Those that start first come first.
            checkpoint = core.trials[trial_id].residence.checkpoint
            assert checkpoint is not None
            core.commands.append(PrefetchCheckpoint(trial_id, checkpoint, host))

    def problems(self) -> Iterator[str]:
        """What is wrong with what stores were told, for the validation of states."""
        for trial_id in sorted({*self._in_memory, *self._asked}):
            trial = self._core.trials.get(trial_id)
            if trial is None or trial.residence.checkpoint is None:
                continue  # It was lost, which the next event about it will show.
            if not trial.residence.checkpoint.in_memory and trial_id not in self._asked:
                continue
            value, told = self._value(trial), self.told.get(trial_id, UNNAMED)
            key = self._rung_of.get(trial_id)
            if key is not None and self._rankings[key].valued < len(self._rankings[key].ranked):
                continue  # Others have come since, too few to look at all again.
            if _differ(value, told):
                yield f"trial {trial_id!r}: its checkpoint is worth {value}, and the stores were told {told}"
        for key, ranking in self._rankings.items():
            if ranking.waiting != sum(rung == key for rung in self._rung_of.values()):
                yield f"rung {key}: {ranking.waiting} trials are said to be at it"
            if len(ranking.ranked) != len(ranking.places):
                yield f"rung {key}: {len(ranking.ranked)} ranks, and {len(ranking.places)} trials"

    # -- values --------------------------------------------------------------------------------------------

    def _value(self, trial: TrialRecord) -> CheckpointValue:
        """What the newest checkpoint of a trial is worth."""
        if trial.state in _GONE:
            return _NEVER
        if trial.state in _ABOUT_TO_START:
            return _AT_ONCE
        best = self._best.get(trial.group_id)
        is_best = best is not None and best[2] == trial.trial_id
        returns, is_pinned = self._odds(trial)
        if trial.state in _RUNS and not is_pinned:
            # Its state is in its lane: the checkpoint is of use only if that dies.
            returns *= LOST_LANES
        return CheckpointValue(returns, is_pinned or is_best)

    def odds(self, trial: TrialRecord) -> float:
        """Probability that a trial goes on from its state, or others do."""
        return self._odds(trial)[0]

    def _odds(self, trial: TrialRecord) -> tuple[float, bool]:
        """Probability that a trial goes on from its state, or others do, and whether it is pinned for that."""
        key = self._rung_of.get(trial.trial_id)
        if trial.state is TrialState.PAUSED:
            return UNNAMED.returns, False  # The user decides.
        if key is not None:
            ranking = self._rankings[key]
            rank = ranking.rank(trial.trial_id)
            if rank < ranking.parents:
                return 1.0, True
            returns = ranking.odds[rank]
            return returns, trial.state not in _RUNS and not ranking.rung.parents and rank < ranking.promotable
        if trial.state in _RUNS:
            return 1.0, False
        if trial.spec.follow_up_iterations > 0 and trial.progress.follow_up_iterations == 0:
            return GOES_ON_UNSAID, False  # Iterations were to follow, and none do any more.
        return UNNAMED.returns, False

    def _note_best(self, group_id: str, found: tuple[int, float, str]) -> None:
        """Takes a trial for the best of its group, if it came to a higher rung, or to that one with a better score."""
        best = self._best.get(group_id)
        if best is None or found[:2] > best[:2]:
            self._best[group_id] = found
            if best is not None and best[2] in self._in_memory:
                self._due.add(best[2])

    def _leave(self, key: RungKey) -> None:
        """A trial has left a rung: for a later one, or for good."""
        ranking = self._rankings[key]
        ranking.waiting -= 1
        if ranking.is_over:
            del self._rankings[key]

    # -- prefetching ---------------------------------------------------------------------------------------

    def _wanted_on(self, trial: TrialRecord, checkpoint: Checkpoint) -> str | None:
        """The host to whose memory the checkpoint of a trial is to be brought: of one that goes on from its rung."""
        key = self._rung_of.get(trial.trial_id)
        if key is None or trial.state not in _WAITS or trial.residence.lane is not None:
            return None
        if trial.trial_id in self._foreign:
            return None  # A copy in memory may be given up: its original is not where lanes look for it.
        if not self._rankings[key].goes_on_surely(trial.trial_id):
            return None
        host = self._host_for(trial, checkpoint.host)
        return None if checkpoint.in_memory and checkpoint.host == host else host

    def _host_for(self, trial: TrialRecord, home: str) -> str | None:
        """The host on which a trial is likely to run: that of its checkpoint, or that with most devices for it."""
        occupancy = self._core.occupancy
        eligible = occupancy.eligible.of(trial.constraint)
        hosts: dict[str, int] = {}
        for index in occupancy.residents if eligible is None else eligible:
            if not occupancy.is_closed(index):
                host = occupancy.device(index).host
                hosts[host] = hosts.get(host, 0) + 1
        if home in hosts:
            return home
        return max(sorted(hosts), key=hosts.__getitem__) if hosts else None


def _differ(value: CheckpointValue, told: CheckpointValue) -> bool:
    """Whether stores are to be told a value: small changes hardly ever change what is evicted."""
    if value.pinned != told.pinned or (value.returns == 0.0) != (told.returns == 0.0):
        return True
    return abs(value.returns - told.returns) >= VALUE_STEP

"""A member of a shared folder without a session: takes part by Membership, JointState and a scheduler alone.

python fake_member.py SHARED ALGORITHM SLOW_WHILE

Its trials are what :func:`loss_of` computes. At the end it writes what it knows of the sweep to ``fake.json`` in its
folder.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import time
from pathlib import Path
from typing import Any

from fluid.joint import membership
from fluid.joint.entries import Begun, Claimed, Ended, Founded, Iterated, Joined, Started
from fluid.joint.membership import Entry, Membership
from fluid.joint.state import BegunTrial, Gone, JointState, JointTrial
from fluid.search.algorithms import make_scheduler
from fluid.search.rungs import RungDecision, rungs_of

GROUP, SAMPLES, BUDGET, ETA = "fake", 64, 27, 3
LEASE_S, BEAT_S = 2.0, 0.25
#: Seconds of an iteration: as long as a file is there, and afterwards.
SLOW_S, FAST_S = 0.3, 0.01
RESULTS = "fake.json"


def config_of(number: int) -> dict[str, float]:
    """The config of a trial by its number."""
    return {"x": random.Random(number).random()}


def loss_of(config: dict[str, float], iteration: int) -> float:
    """What an iteration of a trial comes to."""
    return abs(config["x"] - 0.4) + config["x"] ** 2 / iteration


class FakeMember:
    """Works at the sweep until it is done.

    Args:
        shared: the folder.
        algorithm: whose scheduler decides.
        slow_while: the file while which iterations are slow.
    """

    def __init__(self, shared: Path, algorithm: str, slow_while: Path) -> None:
        self._slow_while = slow_while
        self._state = JointState()
        self._scheduler = make_scheduler(algorithm, rungs=rungs_of(BUDGET, ETA, 1), eta=ETA, samples=SAMPLES)
        self._told: queue.SimpleQueue[list[Entry] | BaseException] = queue.SimpleQueue()
        self._membership = Membership(shared)
        self._membership.hear(self._told.put, self._told.put)
        self._names: set[str] = set()
        #: Whether it takes part: what is posted before may be dropped.
        self._is_in = False
        #: Numbers of trials by id, how far each may run, and those that are on their way there.
        self._numbers: dict[str, int] = {}
        self._granted: dict[str, int] = {}
        self._heading: set[str] = set()
        self._metrics: dict[str, list[str]] = {}
        #: Whether it has asked for a trial, and does not know yet whether it has it.
        self._asks = False
        #: What it does, under which lease, and how many iterations of that it has told.
        self._runs: tuple[JointTrial, int] | None = None
        #: The same of when it was taken for dead.
        self._lost: tuple[JointTrial, int] | None = None
        self._done = 0
        self._began: set[int] = set()

    def run(self) -> None:
        self._membership.start({0: "cpu"})
        while not self._is_over:
            self._listen()
            trial = self._trial()
            if trial is None:
                self._ask()
                self._listen(0.05)
            else:
                self._work(trial)
        (self._membership.folder / RESULTS).write_text(json.dumps(self._metrics))
        self._membership.close()

    @property
    def _is_over(self) -> bool:
        return len(self._numbers) == SAMPLES and not self._heading

    # -- what is told --------------------------------------------------------------------------------------

    def _listen(self, seconds: float = 0.0) -> None:
        while True:
            try:
                told = self._told.get(timeout=seconds) if seconds else self._told.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            if isinstance(told, BaseException):
                raise told
            for entry in told:
                for item in entry.items:
                    if isinstance(item, (Begun, Claimed)) and entry.writer in self._names:
                        self._asks = False
                    for fact in self._state.apply(entry.number, entry.writer, item):
                        self._learn(entry.writer, fact)

    def _learn(self, writer: str, fact: Any) -> None:
        if isinstance(fact, Joined) and fact.folder == self._membership.folder.name:
            self._names.add(writer)
            self._is_in, self._asks = True, False
            self._membership.post(Founded(GROUP, {}))
            if self._lost is not None:  # As a process would that does not know yet: it must not count.
                trial, lease = self._lost
                self._tell(trial.trial_id, lease, trial.reported + 1, -1.0)
        elif isinstance(fact, Gone) and fact.member in self._names:
            self._lost, self._is_in, self._runs = self._runs, False, None
        elif isinstance(fact, BegunTrial):
            budget = self._scheduler.start()
            assert budget is not None and budget.trial == len(self._numbers)
            self._numbers[fact.trial.trial_id] = budget.trial
            self._metrics[fact.trial.trial_id] = []
            self._head(fact.trial.trial_id, budget.budget)
        elif isinstance(fact, Iterated):
            self._metrics[fact.trial_id] += fact.metrics
        elif isinstance(fact, Ended) and fact.trial_id in self._heading:
            self._heading.remove(fact.trial_id)
            number = self._numbers[fact.trial_id]
            if fact.state == "FAILED":
                self._decide(self._scheduler.ended(number))
            else:
                loss = json.loads(self._metrics[fact.trial_id][-1])["loss"]
                self._decide(self._scheduler.reached(number, loss))

    def _decide(self, decision: RungDecision) -> None:
        ids = list(self._numbers)
        for promotion in decision.promoted:
            self._head(ids[promotion.trial], promotion.budget)
        for number in decision.ended:
            trial = self._state.trials[ids[number]]
            if trial.holder in self._names and trial.lease is not None:
                self._membership.post(Ended(trial.trial_id, trial.lease, state="STOPPED", iteration=trial.reported))

    def _head(self, trial_id: str, budget: int) -> None:
        self._granted[trial_id] = budget
        self._heading.add(trial_id)

    # -- work ----------------------------------------------------------------------------------------------

    def _trial(self) -> JointTrial | None:
        """A trial of its own that has something to do."""
        mine = [self._state.trials[trial_id] for trial_id in self._heading]
        return next(
            (trial for trial in sorted(mine, key=lambda one: one.trial_id) if trial.holder in self._names), None
        )

    def _ask(self) -> None:
        if not self._is_in or self._asks or GROUP not in self._state.founded:
            return
        free = sorted(trial_id for trial_id in self._heading if self._state.trials[trial_id].lease is None)
        if free:
            self._membership.post(Claimed(GROUP, free[0]))
        elif len(self._numbers) < SAMPLES:
            self._membership.post(Begun(GROUP, None, SAMPLES))
        else:
            return
        self._asks = True

    def _work(self, trial: JointTrial) -> None:
        """Does an iteration of a trial, or ends it."""
        assert trial.lease is not None
        lease = trial.lease
        if self._runs != (trial, lease):
            # It goes on from a checkpoint, which may be older than what was told.
            self._runs, self._done = (trial, lease), max(0, trial.reported - random.randrange(3))
            self._membership.post(Started(trial.trial_id, lease))
        budget = self._granted[trial.trial_id]
        while self._done < budget:
            began = time.monotonic()
            time.sleep(SLOW_S if self._slow_while.exists() else FAST_S)
            self._done += 1
            config = config_of(self._numbers[trial.trial_id])
            if self._done > trial.reported:
                self._tell(trial.trial_id, lease, self._done, loss_of(config, self._done), time.monotonic() - began)
            self._listen()
            if (self._runs, trial.lease) != ((trial, lease), lease):
                return  # It was taken for dead.
        self._membership.post(Ended(trial.trial_id, lease, state="DONE", iteration=self._done))
        while trial.trial_id in self._heading and self._granted[trial.trial_id] == budget and trial.lease == lease:
            self._listen(0.05)

    def _tell(self, trial_id: str, lease: int, iteration: int, loss: float, seconds: float = 0.0) -> None:
        self._membership.post(
            Iterated(
                trial_id,
                lease,
                iteration=iteration,
                metrics=(json.dumps({"loss": loss, "pid": os.getpid()}),),
                seconds=(seconds,),
                at=time.monotonic(),
                ages=(0.0,),
                width=1.0,
                device_ids=(0,),
            )
        )


if __name__ == "__main__":
    membership.LEASE_S, membership.BEAT_S = LEASE_S, BEAT_S
    FakeMember(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])).run()

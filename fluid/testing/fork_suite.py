"""The part of the conformance suite that is about trials that start from another trial's state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from unittest import SkipTest

from fluid.engine.commands import Fork, ForkSaved, Report, Save
from fluid.engine.events import (
    Checkpoint,
    GroupRecovered,
    GroupSubmitted,
    TrialForked,
    TrialHistory,
    TrialSaved,
)
from fluid.testing.backend_session import BackendSession
from fluid.testing.suite import Suite
from fluid.testing.trainables import Drawing

#: A budget that no trial uses up here; a backend that does not answer is found once it is used up.
_ENDLESS = 1000


class ForkConformance(Suite):
    """What holds for forks on every backend. The commands are given beside the engine, which knows the parent only."""

    runs_code: bool
    isolated: bool

    def open(self) -> BackendSession:
        """Returns a session with a new backend."""
        raise NotImplementedError

    # -- tests -----------------------------------------------------------------------------------------------

    def test_a_fork_goes_on_as_its_parent_which_goes_on_too(self) -> None:
        session = self._begin(seconds=0.02)
        session.run(lambda: len(session.iterations("a")) >= 2)
        forked = self._fork(session, ["b"], at=None)[0]
        assert forked.checkpoint is not None and forked.lane_id == session.engine.trials["a"].placement.lanes[0]
        at = forked.checkpoint.iteration
        assert 2 <= at <= len(session.iterations("a")) + 1
        self._start(session, forked, iterations=3)
        session.run(lambda: len(session.iterations("a")) >= at + 4 and session.ends().get("b") == "DONE")
        assert session.iterations("b") == [at + 1, at + 2, at + 3]
        assert session.iterations("a")[: at + 4] == list(range(1, at + 5)), "the parent lost and repeated nothing"
        self._are_alike(session, "b", since=at)

    def test_a_fork_waits_until_its_parent_has_come_to_the_iteration_wanted(self) -> None:
        session = self._begin(seconds=0.02)
        session.run(lambda: len(session.iterations("a")) >= 1)
        forked = self._fork(session, ["b"], at=6)[0]
        assert forked.checkpoint is not None and forked.checkpoint.iteration == 6
        assert len(session.iterations("a")) >= 5
        self._start(session, forked, iterations=2)
        session.run(lambda: session.ends().get("b") == "DONE" and len(session.iterations("a")) >= 8)
        assert session.iterations("b") == [7, 8]
        self._are_alike(session, "b", since=6)

    def test_a_state_that_the_parent_has_left_behind_is_refused(self) -> None:
        session = self._begin(seconds=0.01)
        session.run(lambda: len(session.iterations("a")) >= 4)
        forked = self._fork(session, ["b"], at=2)[0]
        assert forked.checkpoint is None and forked.is_past and forked.problem and not forked.cannot

    def test_many_fork_from_one_state(self) -> None:
        session = self._begin(seconds=0.05)
        names = [f"b{number}" for number in range(5)]
        answers = self._fork(session, names, at=3)
        assert [answer.trial_id for answer in answers] == names
        places = [answer.checkpoint for answer in answers]
        assert all(place is not None and place.iteration == 3 for place in places)
        if self.runs_code:
            assert len({place.path for place in places if place is not None}) == len(names), "each has one of its own"
        for answer in answers:
            self._start(session, answer, iterations=2)
        session.run(lambda: all(session.ends().get(name) == "DONE" for name in names))
        assert all(session.iterations(name) == [4, 5] for name in names)
        if self.runs_code:
            told = {name: self._draws(session, name) for name in names}
            assert all(draws == told[names[0]] for draws in told.values())

    def test_a_trial_that_rests_is_forked_at_once(self) -> None:
        if self.isolated:
            raise SkipTest("its lane ends with it")
        session = self._begin(seconds=0.01, budget=3)
        session.run()
        forked, other, late = self._fork(session, ["b", "c"], at=None) + self._fork(session, ["d"], at=2)
        assert forked.checkpoint is not None and other.checkpoint is not None
        assert forked.checkpoint.iteration == other.checkpoint.iteration == 3 and late.is_past
        self._start(session, forked, iterations=1)
        session.run(lambda: session.ends().get("b") == "DONE")
        assert session.iterations("b") == [4] and session.iterations("a") == [1, 2, 3]

    def test_a_fork_of_a_saved_state_needs_neither_its_parent_nor_its_checkpoint(self) -> None:
        session = self._begin(seconds=0.02)
        session.run(lambda: len(session.iterations("a")) >= 2)
        for number, durable in enumerate((False, True)):
            saved = self._saved(session, durable=durable)
            child = f"b{number}"
            session.register(child, 0.02, Drawing)
            session.backend.execute([ForkSaved(child, "a", saved)])
            session.run(lambda child=child: child in self._answers(session))  # type: ignore[misc]
            forked = self._answers(session)[child]
            assert forked.checkpoint is not None and forked.lane_id is None, forked
            assert (forked.checkpoint.iteration, forked.checkpoint.host) == (saved.iteration, saved.host)
            if self.runs_code:
                shutil.rmtree(saved.path, ignore_errors=True)
            self._start(session, forked, iterations=2)
            session.run(lambda child=child: session.ends().get(child) == "DONE")  # type: ignore[misc]
            assert session.iterations(child) == [saved.iteration + 1, saved.iteration + 2]
            session.run(lambda saved=saved: len(session.iterations("a")) >= saved.iteration + 2)  # type: ignore[misc]
            self._are_alike(session, child, since=saved.iteration, files=False)  # The parent went on meanwhile.

    def test_what_is_gone_is_no_start(self) -> None:
        if not self.runs_code:
            raise SkipTest("no checkpoint is written")
        session = self._begin(seconds=0.02)
        session.run(lambda: len(session.iterations("a")) >= 3)
        saved = self._saved(session, durable=False)
        session.register("b", 0.01, Drawing)
        missing = Checkpoint(2, os.path.join(os.path.dirname(saved.path), "00000002-0-9"), saved.host, saved.in_memory)
        session.backend.execute([ForkSaved("b", "a", missing)])
        session.run(lambda: "b" in self._answers(session))
        forked = self._answers(session)["b"]
        assert forked.checkpoint is None and "iteration 2" in forked.problem, "no other iteration is taken"

    # -- what they have in common ----------------------------------------------------------------------------

    def _begin(self, *, seconds: float, budget: int = _ENDLESS) -> BackendSession:
        """A session in which trial "a" was submitted."""
        session = self.open()
        session.register("a", seconds, Drawing)
        session.tell(GroupSubmitted(session.backend.now(), "g", (session.spec("a", budget),)))
        session.run(lambda: session.engine.trials["a"].state == "RUNNING")
        return session

    def _fork(self, session: BackendSession, children: Sequence[str], at: int | None) -> list[TrialForked]:
        """Has trials start from trial "a", where it is; returns the answers."""
        trial = session.engine.trials["a"]
        lane = trial.placement.lanes[0] if trial.placement.lanes else trial.residence.lane
        assert lane is not None
        for child in children:
            session.register(child, 0.01, Drawing)
        session.backend.execute([Fork("a", (lane,), child=child, at=at) for child in children])
        session.run(lambda: set(children) <= self._answers(session).keys())
        return [self._answers(session)[child] for child in children]

    @staticmethod
    def _answers(session: BackendSession) -> dict[str, TrialForked]:
        return {forked.trial_id: forked for forked in session.heard(TrialForked)}

    @staticmethod
    def _start(session: BackendSession, forked: TrialForked, *, iterations: int) -> None:
        """Submits a fork."""
        assert forked.checkpoint is not None, forked
        at = forked.checkpoint.iteration
        spec = session.spec(forked.trial_id, at + iterations)
        history = TrialHistory(spec, budget=at + iterations, reported=at, checkpoint=forked.checkpoint)
        session.tell(GroupRecovered(session.backend.now(), f"of {forked.trial_id}", (history,)))

    def _saved(self, session: BackendSession, *, durable: bool) -> Checkpoint:
        """Saves trial "a" between two iterations; returns its checkpoint."""
        trial = session.engine.trials["a"]
        lanes = trial.placement.lanes or (trial.residence.lane,)
        before = len(session.heard(TrialSaved))

        def saved() -> list[Checkpoint]:
            new = [event.checkpoint for event in session.heard(TrialSaved)[before:]]
            return [checkpoint for checkpoint in new if checkpoint.in_memory is not durable]

        session.backend.execute([Save("a", lanes[:1], durable=durable)])  # type: ignore[arg-type]
        session.run(lambda: bool(saved()))
        return saved()[-1]

    @staticmethod
    def _draws(session: BackendSession, trial_id: str, *, files: bool = False) -> dict[int, object]:
        """What a trial reported of each iteration; with ``files``, what was in its own folder, too."""
        names = ["step", "draw", *["written"] * files]
        return {
            number: [metrics.decode()[name] for name in names]
            for report in session.told(Report)
            if report.trial_id == trial_id
            for number, _, _, metrics in report.iterations
        }

    def _are_alike(self, session: BackendSession, child: str, *, since: int, files: bool = True) -> None:
        """Checks that a fork did what its parent did, to the bit."""
        if not self.runs_code:
            return
        files &= len({device.host for device in session.backend.devices()}) == 1  # Each has own folders of its own.
        own, parents = (self._draws(session, name, files=files) for name in (child, "a"))
        assert min(own) == since + 1 and all(parents[number] == told for number, told in own.items()), (own, parents)

"""A session of the conformance suite of backends."""

from __future__ import annotations

from typing import Any

from fluid.backends.base import Backend
from fluid.engine.commands import Command, Report, ReportCall, ReportEnd
from fluid.engine.events import CallRequested, Checkpoint, Event, GroupSubmitted, TrialForked, TrialSaved, TrialSpec
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.testing.play import Session
from fluid.trainables.payload import payload_of
from fluid.trainables.pickling import dump_arguments
from fluid.trainables.trainable import can_save


class BackendSession(Session):
    """A session whose trials iterate for seconds that are given.

    Args:
        backend: with two devices or more.
        trainable: what trials run: ``config["seconds"]`` are those of an iteration.
        isolated: whether each trial has a lane of its own.
        patience_s: real seconds after which it gives up.

    Attributes:
        keep_last: whether the last state of trials that are submitted is saved for good.
    """

    def __init__(self, backend: Backend, trainable: Any, *, isolated: bool, patience_s: float) -> None:
        engine = EngineState(make_planner("portfolio"), max_packing=1, max_failures=1, spare_lanes=1)
        super().__init__(engine, backend, patience_s=patience_s)
        self._trainable, self._isolated, self._calls = trainable, isolated, 0
        self.keep_last = False

    def tell(self, *events: Event) -> list[Command]:
        """As of :class:`Session`; what is forked beside the engine, for trials that it does not know, is only heard."""
        unknown = {event.trial_id for event in events if isinstance(event, TrialForked)} - self.engine.trials.keys()
        beside = [event for event in events if isinstance(event, TrialForked) and event.trial_id in unknown]
        self.events += beside
        known = [event for event in events if event not in beside]
        return super().tell(*known) if known else []

    def warm_up(self) -> None:
        """Waits until the lanes have started, which takes longer on some hosts than on others."""
        self.run(lambda: all(lane.ready for lane in self.engine.lanes))

    def register(self, trial_id: str, seconds: float, trainable: Any = None) -> None:
        """Registers a trial whose iterations take so many seconds."""
        self.backend.register(trial_id, payload_of(trainable or self._trainable, {"seconds": seconds}))

    def spec(self, trial_id: str, budget: int, **fields: Any) -> TrialSpec:
        """Returns what the engine is told of a trial."""
        return TrialSpec(trial_id, budget, isolated=self._isolated, **fields)

    def submit(self, group_id: str, **trials: tuple[int, float]) -> None:
        """Submits trials, each of so many iterations of so many seconds."""
        for trial_id, (_, seconds) in trials.items():
            self.register(trial_id, seconds)
        fields = {"can_save": can_save(self._trainable), "keep_last": self.keep_last}
        specs = tuple(self.spec(trial_id, budget, **fields) for trial_id, (budget, _) in trials.items())
        self.tell(GroupSubmitted(self.backend.now(), group_id, specs))

    def call(self, trial_id: str, value: Any) -> int:
        """Asks for a call of ``tell``; returns its number."""
        self._calls += 1
        payload = dump_arguments((value,), {})
        self.tell(CallRequested(self.backend.now(), trial_id, call_id=self._calls, method="tell", payload=payload))
        return self._calls

    def iterations(self, trial_id: str) -> list[int]:
        """Returns the iterations of a trial that were reported, in order."""
        reports = [report for report in self.told(Report) if report.trial_id == trial_id]
        return [number for report in reports for number, _, _, _ in report.iterations]

    def answers(self) -> dict[int, ReportCall]:
        """Returns the answers to calls, by number."""
        return {answer.call_id: answer for answer in self.told(ReportCall)}

    def ends(self) -> dict[str, str]:
        """Returns how trials have ended."""
        return {end.trial_id: end.state for end in self.told(ReportEnd)}

    @property
    def kept(self) -> dict[str, Checkpoint]:
        """The newest checkpoint of each trial that outlives the session."""
        return {saved.trial_id: saved.checkpoint for saved in self.heard(TrialSaved) if saved.kept is not None}

    def kept_at(self, trial_id: str) -> int:
        """Returns the iteration of that checkpoint; 0 if there is none."""
        return self.kept[trial_id].iteration if trial_id in self.kept else 0

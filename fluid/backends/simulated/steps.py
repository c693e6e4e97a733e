"""Steps of virtual lanes: an iteration of one trial, or of several fused ones, and which trials take the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from fluid.engine.commands import Call, Fork, PrefetchCheckpoint
from fluid.engine.events import CheckpointPlaced, Event, Failure, IterationDone, PausePurpose, TrialCalled, TrialFailed
from fluid.lane.errors import describe
from fluid.lane.policy import SMOOTHING, SWITCH_SLACK_S, ResidentWork, choose, joining_service
from fluid.measure.runtime_model import FusedRates
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import NO_METRICS, EncodedMetrics


class PlayedIteration(NamedTuple):
    """An iteration of a trial whose course is known.

    Attributes:
        seconds: how long it takes at width 1, alone on a device of speed 1.
        metrics: what the trial reports, as a lane would send it.
        memory: what it needs of the device's memory; ``None`` if unknown.
        finished: whether the trial is done with it.
        failure: why the trial fails in it; ``None`` if it does not.
        report: makes the metrics, in place of ``metrics``, when the iteration ends, of the seconds that it took and
            the time, seconds; ``None`` if they are known before.
    """

    seconds: float
    metrics: EncodedMetrics = NO_METRICS
    memory: MemoryNeed | None = None
    finished: bool = False
    failure: Failure | None = None
    report: Callable[[float, float], EncodedMetrics] | None = None

    def reported(self, seconds: float, now: float) -> EncodedMetrics:
        """What the trial reports of it once it has taken so many seconds, and ends now."""
        return self.metrics if self.report is None else self.report(seconds, now)


#: Of a trial that has no iteration left.
NONE_LEFT = PlayedIteration(0.0, finished=True)


class Course(Protocol):
    """What one trial does, iteration by iteration. What it raises fails the trial."""

    def prepare(self, iterations: range) -> None:
        """Learns of iterations that the trial is given to do, before they are played."""
        ...

    def play(self, iteration: int) -> PlayedIteration | None:
        """Returns an iteration, numbered from 1; ``None`` if the trial has none left."""
        ...

    def call(self, method: str, payload: bytes) -> bytes | None:
        """Answers the call of a method of the trial: both sides are pickled."""
        ...


@dataclass(frozen=True)
class Truth:
    """How a trial really behaves.

    Attributes:
        seconds: seconds per iteration at width 1, alone on a device of speed 1; of no effect with a course.
        alpha, beta: its overheads.
        row: its number in the recorded segments.
        speeds: by device model, how fast it is there, beside the device's own speed; 1 for models left out.
        fusion_key: equal for trials that a lane can train in one step; ``None`` if it cannot be fused.
        fused: how long a step of several such trials takes; ``None`` if no less than one after another.
        course: its iterations; ``None`` if all take the same time and report nothing.

    Example:
        >>> from fluid.backends.simulated import Truth
        >>> from fluid.measure.runtime_model import stretch_of
        >>> truth = Truth(seconds=2.0, alpha=1.25)
        >>> truth.seconds * stretch_of(truth.alpha, truth.beta, 0.5)  # An iteration, with two trials on the device.
        2.5
    """

    seconds: float = 0.0
    alpha: float = 1.0
    beta: float = 1.0
    row: int = 0
    speeds: Mapping[str | None, float] = field(default_factory=dict)
    fusion_key: str | None = None
    fused: FusedRates | None = None
    course: Course | None = None


@dataclass(slots=True, eq=False)
class SimulatedTrial:
    """A trial in its lanes.

    Attributes:
        lanes: where it runs, or ran last; rank 0 first.
        done: iterations it has done.
        left: iterations it still has to run.
        busy: whether it holds its devices: it iterates, waits for its turn in a lane, or is being resized.
        step: the step or resize in flight that it takes part in; ``None`` between two steps.
        turn: the step of its lane in which it took part last.
        pace: seconds per iteration, as a lane would average them; ``None`` before the first.
        service: seconds it has run, as :mod:`fluid.lane.policy` counts them.
        pausing: why it is to pause at the end of the step; ``None`` if it is not.
        stopping: lanes that it is to leave then.
        keeping: whether it is saved for good before it leaves them.
        opened: when it began to hold these devices, seconds.
        pause: seconds of that time lost to a resize.
        company: most trials that ran there at once since then.
        played: the iteration in flight, or the last one, of a trial with a course.
        forks: what is to start from a state of it, and does not yet.
    """

    trial_id: str
    truth: Truth
    lanes: tuple[int, ...]
    done: int = 0
    left: int = 0
    busy: bool = False
    step: VirtualStep | None = None
    turn: int = 0
    pace: float | None = None
    service: float = 0.0
    pausing: PausePurpose | None = None
    stopping: tuple[int, ...] = ()
    keeping: bool = False
    opened: float = 0.0
    pause: float = 0.0
    company: int = 1
    played: PlayedIteration | None = None
    forks: list[Fork] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of the iteration in flight at width 1, alone on a device of speed 1."""
        return self.truth.seconds if self.played is None else self.played.seconds

    def record_iteration(self, seconds: float) -> None:
        """Updates pace and service after an iteration that took so many seconds."""
        self.pace = seconds if self.pace is None else self.pace + SMOOTHING * (seconds - self.pace)
        self.service += seconds

    def work(self) -> ResidentWork:
        """Its remaining work, for the policies of lanes."""
        remaining = None if self.pace is None else self.left * self.pace
        return ResidentWork(self.trial_id, remaining, self.service, self.turn)

    def next_iteration(self) -> None:
        """Begins an iteration."""
        if self.truth.course is not None:
            try:
                self.played = self.truth.course.play(self.done + 1) or NONE_LEFT
            except BaseException as error:  # Also SystemExit, as in a lane: it fails the trial.
                self.played = PlayedIteration(0.0, failure=describe(error))


@dataclass(slots=True, eq=False)
class VirtualStep:
    """An iteration in flight, a resize or a set-up.

    Attributes:
        trials: one, or several fused ones.
        version: changes whenever what was predicted for the step no longer holds; no number is used twice.
        work: seconds of work left at width 1 and speed 1, as of ``since``; 0 for a resize or a set-up.
        rate: work done per second.
        began: when it began, seconds.
        rows: trials that began it.
        settled: whether they are those of the lane's step before.
        ended: what is reported at its end, of a resize or a set-up; ``None`` for an iteration.
    """

    trials: list[SimulatedTrial]
    version: int = -1
    work: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    began: float = 0.0
    rows: int = 1
    settled: bool = True
    ended: Event | None = None

    def iteration_done(self, trial: SimulatedTrial, now: float) -> IterationDone | TrialFailed:
        """What is reported of a trial of this step, which ends now."""
        played = trial.played
        if played is not None and played.failure is not None:
            return TrialFailed(now, trial.trial_id, trial.lanes[0], played.failure)
        return IterationDone(
            now,
            trial.trial_id,
            trial.lanes[0],
            iteration=trial.done,
            seconds=now - self.began,
            metrics=NO_METRICS if played is None else played.reported(now - self.began, now),
            memory=None if played is None else played.memory,
            finished=played is not None and played.finished,
            rows=self.rows,
            settled=self.settled,
        )


@dataclass(slots=True)
class LaneRows:
    """The trials that run in a lane, and how they take turns.

    Attributes:
        limit: most trials in one step; ``None`` for no limit.
        policy: which trial comes first; ``None`` for the one that has waited longest.
        trials: those that hold the lane's devices, by id.
        steps: so far.
        latest: ids of those in the latest step.
    """

    limit: int | None = None
    policy: str | None = None
    trials: dict[str, SimulatedTrial] = field(default_factory=dict)
    steps: int = 0
    latest: frozenset[str] = frozenset()

    def next_step(self) -> list[SimulatedTrial]:
        """Returns the trials of the next step; none while a step is in flight, or where no trial has iterations left.

        With the trial that comes first, as many as may be of those take part that can be fused with it.
        """
        if any(trial.step is not None for trial in self.trials.values()):
            return []
        waiting = sorted((trial for trial in self.trials.values() if trial.left > 0), key=lambda trial: trial.turn)
        if not waiting:
            return []
        first = waiting[0] if self.policy is None else self._first(waiting, self.policy)
        if first.truth.fusion_key is None or len(first.lanes) > 1:
            return [first]
        alike = [trial for trial in waiting if trial.truth.fusion_key == first.truth.fusion_key]
        return [trial for trial in alike if len(trial.lanes) == 1][: self.limit]

    def _first(self, waiting: Sequence[SimulatedTrial], policy: str) -> SimulatedTrial:
        """The trial that the policy runs next."""
        last = max(waiting, key=lambda trial: trial.turn)
        current = last.trial_id if last.turn == self.steps > 0 else None
        chosen = choose(policy, [trial.work() for trial in waiting], current=current, slack=SWITCH_SLACK_S)
        return next(trial for trial in waiting if trial.trial_id == chosen.key)

    def join(self, trial: SimulatedTrial) -> None:
        """Adds a trial."""
        if self.trials:
            trial.service = joining_service([other.work() for other in self.trials.values()])
        self.trials[trial.trial_id] = trial

    def begin(self, trials: Sequence[SimulatedTrial]) -> bool:
        """Counts a step of these trials; returns whether it is settled: none has come or gone since the last one."""
        self.steps += 1
        for trial in trials:
            trial.turn = self.steps
        before, self.latest = self.latest, frozenset(trial.trial_id for trial in trials)
        return before == self.latest or max(len(before), len(trials)) < 2


def answer_to(call: Call, trial: SimulatedTrial, now: float) -> TrialCalled:
    """The answer to the call of a method of a trial."""
    answer, course = (
        partial(TrialCalled, now, trial.trial_id, call.lane_ids[0], call_id=call.call_id),
        trial.truth.course,
    )
    try:
        return answer(result=None if course is None else course.call(call.method, call.payload))
    except BaseException as error:
        return answer(failure=describe(error))


def placed_by(prefetch: PrefetchCheckpoint, now: float) -> CheckpointPlaced:
    """The answer to a prefetch, which is there at once: host memory has room for all."""
    checkpoint = replace(prefetch.checkpoint, host=prefetch.host, in_memory=True)
    return CheckpointPlaced(now, prefetch.trial_id, checkpoint)


def work_of(trials: Sequence[SimulatedTrial]) -> float:
    """Seconds of a step at width 1 and speed 1: those of its slowest trial alone, times T(k)/T(1) for k trials."""
    if len(trials) == 1:
        return trials[0].seconds
    slowest = max(trials, key=lambda trial: trial.seconds)
    fused = slowest.truth.fused
    return slowest.seconds * (len(trials) if fused is None else fused.stretch(len(trials)))

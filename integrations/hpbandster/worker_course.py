"""A HpBandSter worker in a rehearsal: each call of ``compute`` is replayed, as one iteration of its trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.rehearsal.course import ReplayedCourse
from fluid.rehearsal.replayable import Replayable, ReplayedIteration


class RehearsedWorker:
    """Says whether a worker can be replayed.

    Args:
        worker: a subclass of HpBandSter's ``Worker``.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def require_rehearsed_course(self, source: Replayable | None) -> None:
        """Refuses a worker that cannot: see :data:`fluid.rehearsal.backend.REQUIRE_COURSE`.

        Raises:
            InvalidFieldError: it cannot.
        """
        if source is None and not callable(getattr(self._worker, "replay", None)):
            reason = (
                "is a worker that cannot be rehearsed: give it a static method replay(config, budget), which returns a"
                " fluid.rehearsal.ReplayedIteration with the metrics loss and info, or rehearse it from a benchmark"
            )
            raise InvalidFieldError("trainable", self._worker, reason)


def course_of(config: Mapping[str, Any], source: Replayable | None) -> ReplayedCourse:
    """Makes the course of a worker's trial.

    Args:
        config: of a :class:`fluid.integrations.hpbandster.worker_trial.WorkerTrial`.
        source: in place of the worker: a budget is a number of its iterations, each of them from the first one on.
            ``None`` for the worker itself.
    """
    computes = WorkerReplay(config["worker"]) if source is None else SourceReplay(source)
    return ReplayedCourse(ComputedStages(computes, config["budgets"]), config["config"])


class WorkerReplay:
    """A worker replays its calls itself.

    Args:
        worker: the worker's class.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def compute(self, config: Mapping[str, Any], budget: float) -> ReplayedIteration:
        """Replays one call of ``compute``."""
        one = self._worker.replay(dict(config), budget)
        if not isinstance(one, ReplayedIteration) or "loss" not in one.metrics:
            raise InvalidFieldError("replay", one, "must return a ReplayedIteration whose metrics have loss")
        return one._replace(metrics={"loss": one.metrics["loss"], "info": one.metrics.get("info")})


class SourceReplay:
    """A benchmark replays the calls of a worker.

    Args:
        source: the benchmark.
    """

    def __init__(self, source: Replayable) -> None:
        self._source = source

    def compute(self, config: Mapping[str, Any], budget: float) -> ReplayedIteration:
        """Replays one call of ``compute``, as all iterations up to its budget."""
        played = self._source.replay(config, range(1, max(1, round(budget)) + 1))
        if not played or "loss" not in played[-1].metrics:
            reported = ", ".join(map(str, played[-1].metrics)) if played else "nothing"
            raise InvalidFieldError("source", reported, "must report loss, which is what a worker returns")
        last = played[-1]
        metrics = {"loss": last.metrics["loss"], "info": dict(last.metrics)}
        return last._replace(metrics=metrics, seconds=sum(one.seconds for one in played))


class ComputedStages:
    """The stages of a configuration as iterations.

    Args:
        computes: replays a call of ``compute``.
        budgets: of the stages, in order.
    """

    def __init__(self, computes: WorkerReplay | SourceReplay, budgets: Sequence[float]) -> None:
        self._computes = computes
        self._budgets = budgets

    def replay(self, config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        """Replays stages, the first of them being 1."""
        return [self._computes.compute(config, self._budgets[stage - 1]) for stage in iterations]

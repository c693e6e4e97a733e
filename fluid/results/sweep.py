"""A sweep: its trials, the best of them, and a table of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.keeping import value_of
from fluid.results.best import BestTrial, best_of, eligible
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, goals_of, is_number, known_goals, modes_of, pareto_front
from fluid.results.records import Result, TrialResult
from fluid.results.run_files import price_in, read_facts
from fluid.results.tables import dataframe, sweep_html, sweep_text
from fluid.trialgroup import TrialState
from fluid.user_calls import PeersNames

if TYPE_CHECKING:
    from fluid.reports.page.shown import RunPage
    from fluid.results.tables import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SweepResult(PeersNames):
    """The trials of a sweep or of a session, and the best of them. :func:`fluid.load` reads one from a run folder.

    Example:
        >>> import fluid
        >>> def train(config):
        ...     yield {"loss": (config["lr"] - 0.3) ** 2}
        >>> trials = [fluid.Trial(train, {"lr": lr}) for lr in (0.1, 0.2, 0.4)]
        >>> with fluid.FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     done = executor.submit_trialgroup(fluid.TrialGroup(trials, name="sweep")).wait()
        >>> result = fluid.load("run", metric="loss", mode="min")
        >>> len(result.trials), result.best.config, result.state
        (3, {'lr': 0.2}, 'DONE')
        >>> sorted(trial.config["lr"] for trial in result.trials if trial.metrics["loss"] > 0.02)
        [0.1]

    Attributes:
        trials: the trials, in order of submission.
        metric: what the sweep optimizes; several names for several metrics; ``None`` if unknown.
        mode: ``"min"`` or ``"max"``; one per metric; ``None`` if the metric is unknown, or no search says its mode and
            its name may mean either.
        run_dir: the run folder.
        name: the name of the sweep or session.
        state: ``"RUNNING"``; ``"DONE"`` if all trials have ended; ``"UNFINISHED"`` if the session ended before.
        notes: one sentence for each thing that could not be read, that ended the sweep early, or that has changed of
            the code of its trials.
    """

    trials: tuple[TrialResult, ...]
    metric: str | tuple[str, ...] | None = None
    mode: str | tuple[str | None, ...] | None = None
    run_dir: Path
    name: str = ""
    state: str = "DONE"
    notes: tuple[str, ...] = ()

    @classmethod
    def make(cls, trials: Sequence[TrialResult], metric: object, mode: object, **facts: Any) -> SweepResult:
        """Makes a sweep.

        Args:
            trials: the trials.
            metric: what it optimizes: a name, several, or ``None`` if unknown.
            mode: as for :func:`fluid.results.metrics.modes_of`.
            facts: the other fields.
        """
        known = modes_of(metric, mode)
        metrics, modes = tuple(name for name, _ in known), tuple(said for _, said in known)
        return cls(
            trials=tuple(trials),
            metric=metrics if len(known) > 1 else metrics[0] if known else None,
            mode=modes if len(known) > 1 else modes[0] if known else None,
            **facts,
        )

    def __repr__(self) -> str:
        return self._text()

    def _repr_html_(self) -> str:
        return sweep_html(self._text(), self.trials, self._best()[1])

    def _text(self) -> str:
        openly = [name for name, said in modes_of(self.metric, self.mode) if said is None]
        return sweep_text(self.name, f"{self.state}, in {self.run_dir}", self.trials, self._best()[0], openly)

    def _best(self) -> tuple[BestTrial | None, Goal | None]:
        """The best trial, and the goal, of one metric; ``None`` where there is none."""
        goals = known_goals(self.metric, self.mode)
        goal = goals[0] if len(goals) == 1 else None
        return None if goal is None else best_of(self.trials, goal), goal

    @property
    def best(self) -> BestTrial:
        """The trial with the best value of the metric at any of its iterations.

        A failed trial is best only if all have failed, an infeasible one never; one that still runs counts with what
        it has reported. A value that is not a finite number does not count. Of trials with equal values, the first one
        submitted is the best.

        Raises:
            InvalidFieldError: the metric is unknown, its mode is, or there are several.
            FluidError: no trial has reported the metric.
        """
        return self.best_by(self.metric, self.mode)

    def best_by(self, metric: object, mode: object = None) -> BestTrial:
        """The best trial by another metric.

        Args:
            metric: its name; nested names are joined by ``/``.
            mode: ``"min"`` or ``"max"``; ``None``, the default, for what the metric's name says.

        Raises:
            InvalidFieldError: the metric or the mode is no string of this kind; or there is no mode, and the name may
                mean either.
            FluidError: no trial has reported the metric.
        """
        if metric is None:
            raise InvalidFieldError("metric", None, f"name one, as no search does{_known(self.trials)}")
        wanted = modes_of(metric, mode)
        if len(wanted) != 1:
            raise InvalidFieldError("metric", metric, "must be one; for several, see pareto")
        ((name, said),) = wanted
        either = [Goal(name, less=True)]
        if said is None and next(_points(self.trials, either), None) is None:  # The name may be mistyped.
            raise _nothing_reported(self.trials, either)
        goals = goals_of(metric, mode)
        found = best_of(self.trials, goals[0])
        if found is None:
            raise _nothing_reported(self.trials, goals)
        return found

    @property
    def pareto(self) -> tuple[BestTrial, ...]:
        """The iterations that no other one beats in all metrics, in order of the first metric, the best first.

        A trial may be there with several of its iterations. Failed trials count only if all have failed, infeasible
        ones never.

        Raises:
            InvalidFieldError: a metric or its mode is unknown.
            FluidError: no trial has reported all metrics.
        """
        goals = goals_of(self.metric, self.mode)
        if not goals:
            raise InvalidFieldError("metric", None, f"name some, as no search does{_known(self.trials)}")
        points = list(_points(eligible(self.trials, attrgetter("state")), goals))
        if not points:
            raise _nothing_reported(self.trials, goals)
        names, modes = tuple(goal.metric for goal in goals), tuple(goal.mode for goal in goals)
        return tuple(
            BestTrial(
                trial=trial,
                metric=names,
                mode=modes,
                value=values,
                iteration=result.iteration,
                metrics=result.metrics,
            )
            for trial, result, values in (points[i] for i in pareto_front([values for _, _, values in points], goals))
        )

    @property
    def failures(self) -> dict[str, Failure]:
        """Why trials failed, by trial id."""
        return {trial.trial_id: trial.failure for trial in _failed(self.trials) if trial.failure is not None}

    @property
    def infeasible(self) -> dict[str, str]:
        """Why trials are infeasible, as their code says (:class:`fluid.Infeasible`), by trial id."""
        return {trial.trial_id: trial.infeasible for trial in self.trials if trial.infeasible is not None}

    def dataframe(self, every: str = "trial") -> DataFrame:
        """A table of the trials, as a pandas DataFrame.

        Columns are ``trial``, ``group`` (if there are several), ``state``, ``iteration``, ``seconds``,
        ``device_seconds`` that its iterations used, ``cost_usd``, what these cost, if the session has a price,
        ``parent`` and ``at``, from which trial's state it starts and after how many iterations, if any trial does, or
        of iterations ``source``, the trial that ran one for several, if any was run so, then
        ``config/lr`` for each hyperparameter and ``metrics/loss`` for each metric, with nested names joined by ``/``,
        then the trial's best value of the sweep's metric, ``best/loss``, and its iteration, ``best/iteration``, then
        ``checkpoint`` and ``error``.

        Args:
            every: ``"trial"``, the default, for a row per trial, with the metrics of its last iteration and the seconds
                of all; ``"iteration"`` for a row per iteration.

        Raises:
            InvalidFieldError: ``every`` is neither.
            MissingDependencyError: pandas is not installed.
        """
        goals = known_goals(self.metric, self.mode)
        price = price_in(read_facts(self.run_dir))
        return dataframe(self.trials, every, goals[0] if len(goals) == 1 else None, price)

    # -- plots. What draws is imported where it is used: it stands above this package, and few sweeps need it.

    def plot_history(self, metric: str | None = None, mode: str | None = None, *, backend: str | None = None) -> Any:
        """Plots the best value of each trial in order of submission, and the best so far.

        This plot and the others show the trials that have reported the metric and did not fail, or all if all have
        failed. An axis is logarithmic where the values span decades. matplotlib draws without pyplot and a display:
        a notebook shows the figure, and ``figure.savefig("history.png")`` saves it.

        Args:
            metric: the metric; ``None``, the default, for the sweep's, which must be one then.
            mode: ``"min"`` or ``"max"``; ``None``, the default, for the sweep's, else for what the metric's name says.
            backend: ``"matplotlib"`` or ``"plotly"``; ``None``, the default, for matplotlib, or plotly if only that is
                installed.

        Returns:
            A ``matplotlib.figure.Figure`` or a ``plotly.graph_objects.Figure``.

        Raises:
            InvalidFieldError: the metric, the mode or the backend cannot be used.
            FluidError: no trial has reported the metric.
            MissingDependencyError: what is to draw is not installed.
        """
        return self._plot("history", metric, mode, backend)

    def plot_parallel(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        parameters: Sequence[str] | None = None,
        backend: str | None = None,
    ) -> Any:
        """Plots a line per trial across an axis per hyperparameter, and one for the metric (parallel coordinates).

        Args:
            metric: as for :meth:`plot_history`.
            mode: as there.
            backend: as there.
            parameters: the hyperparameters, nested names joined by ``/``; ``None``, the default, for all in which the
                trials differ.

        Returns:
            A figure, as :meth:`plot_history` does.

        Raises:
            InvalidFieldError: as there; or trials do not differ in one of the hyperparameters.
            FluidError: as there; or trials differ in no hyperparameter.
            MissingDependencyError: as there.
        """
        return self._plot("parallel", metric, mode, backend, parameters)

    def plot_importance(self, metric: str | None = None, mode: str | None = None, *, backend: str | None = None) -> Any:
        """Plots how much each hyperparameter matters for the metric: the figures of ``fluid report`` (docs/cli.md).

        Args:
            metric: as for :meth:`plot_history`.
            mode: as there.
            backend: as there.

        Returns:
            A figure, as :meth:`plot_history` does.

        Raises:
            InvalidFieldError: as there.
            FluidError: as there; or there are no importances: there are too few trials, they do not differ enough, or
                Optuna and scikit-learn are not installed.
            MissingDependencyError: as there.
        """
        return self._plot("importance", metric, mode, backend)

    def plot_slice(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        parameters: Sequence[str] | None = None,
        backend: str | None = None,
    ) -> Any:
        """Plots the metric against each hyperparameter, side by side.

        Args:
            metric: as for :meth:`plot_history`.
            mode: as there.
            backend: as there.
            parameters: as for :meth:`plot_parallel`. A trial that does not have one is left out of its part.

        Returns:
            A figure, as :meth:`plot_history` does.

        Raises:
            InvalidFieldError, FluidError, MissingDependencyError: as for :meth:`plot_parallel`.
        """
        return self._plot("slices", metric, mode, backend, parameters)

    def plot_contour(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        parameters: Sequence[str] | None = None,
        backend: str | None = None,
    ) -> Any:
        """Plots how good trials are over two hyperparameters: their ranks by the metric, smoothed between them.

        Args:
            metric: as for :meth:`plot_history`.
            mode: as there.
            backend: as there.
            parameters: the two hyperparameters, across and up; ``None``, the default, for the most important ones, or
                the first ones where importances are unknown.

        Returns:
            A figure, as :meth:`plot_history` does.

        Raises:
            InvalidFieldError, FluidError, MissingDependencyError: as for :meth:`plot_parallel`; or there are not two.
        """
        return self._plot("contour", metric, mode, backend, parameters)

    def _plot(
        self,
        kind: str,
        metric: str | None,
        mode: str | None,
        backend: str | None,
        parameters: Sequence[str] | None = None,
    ) -> Any:
        from fluid.reports.plots.drawing import draw_plot

        if metric is None and isinstance(self.metric, tuple):
            raise InvalidFieldError("metric", None, f"name one of the sweep's: {', '.join(self.metric)}")
        own = dict(modes_of(self.metric, self.mode))
        name = self.metric if metric is None else metric
        best = self.best_by(name, own.get(str(name)) if mode is None else mode)
        return draw_plot(kind, self.trials, Goal(str(best.metric), best.mode == "min"), backend, parameters)

    def page(self, path: str | os.PathLike[str] | None = None) -> RunPage:
        """The page of ``fluid report`` as an object that a notebook shows in a frame; elsewhere it is a file's path.

        The page is of the run folder as it is now. It holds all of its data, so a notebook that is saved with it
        grows by that: about a megabyte for a thousand trials.

        Args:
            path: the file to write; ``None``, the default, for ``report.html`` in the run folder.

        Returns:
            The page: ``.path`` names the file, and ``.html`` is its text. ``webbrowser.open(f"file://{page.path}")``
            opens it, and ``open(page)`` reads it.

        Raises:
            InvalidFieldError: the run folder cannot be read, or the given file cannot be written.
        """
        from fluid.reports.page.shown import page_of

        goal = self._best()[1]
        return page_of(self.run_dir, goal, path)


def _failed(trials: Iterable[TrialResult]) -> list[TrialResult]:
    return [trial for trial in trials if trial.state == TrialState.FAILED]


def _points(
    trials: Iterable[TrialResult], goals: Sequence[Goal]
) -> Iterator[tuple[TrialResult, Result, tuple[float, ...]]]:
    for trial in trials:
        for result in trial.results:
            values = [goal.value_of(result) for goal in goals]
            known = tuple(value for value in values if value is not None)
            if len(known) == len(goals):
                yield trial, result, known


def _numeric(trials: Iterable[TrialResult]) -> list[str]:
    """Names of the metrics that are numbers."""
    names = (name for trial in trials for name, value in flat(trial.metrics).items() if is_number(value))
    return list(dict.fromkeys(names))


def _known(trials: Iterable[TrialResult]) -> str:
    names = _numeric(trials)
    return f"; there are {', '.join(names)}" if names else ""


def _nothing_reported(trials: Sequence[TrialResult], goals: Sequence[Goal]) -> FluidError:
    what = " and ".join(repr(goal.metric) for goal in goals)
    failed = _failed(trials)
    had_value = any(next(_points([trial], goals), None) for trial in trials)  # Then it was of one that does not count.
    sound = "" if not had_value else " that did not fail" if failed else " that is feasible"
    text = f"no trial{sound} has reported a number as {what}"
    reported = [value_of(trial.metrics, goal.metric) for trial in trials for goal in goals]
    if any(isinstance(value, float) and math.isnan(value) for value in reported):
        text += ", but NaN"
    names = _numeric(trials)
    if names:
        text += f"; there are {', '.join(names)}"
    if failed and failed[0].failure is not None:
        text += f"; {len(failed)} of {len(trials)} trials failed, the first with {failed[0].failure.message}"
    if unfit := [trial for trial in trials if trial.infeasible is not None]:
        text += f"; {len(unfit)} of {len(trials)} are infeasible, the first as it says: {unfit[0].infeasible}"
    return FluidError(text)

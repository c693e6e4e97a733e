"""MLflow: a run per trial, by MLflow's client."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluid._clock import wall_seconds
from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError, require_text
from fluid.loggers.left_out import LeftOut
from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.values import cut, hyperparameters, scalars, texts, writable
from fluid.results.records import Result

with try_import("mlflow", extra="mlflow") as _imports:
    import mlflow
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

#: The tag by which the run of a trial is found again.
_UID = "fluid.uid"
#: What MLflow takes at most: metrics, params or tags of one call (1000 of all), characters of a param and of a tag.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM, _LONGEST_TAG = 800, 100, 6000, 8000
#: Most characters of the name of an experiment, and of a run, a metric, a param or a tag.
_LONGEST_EXPERIMENT, _LONGEST_NAME = 500, 250
#: Characters that MLflow refuses in names.
_REFUSED = re.compile(r"[^\w./: -]")
#: Ids that MLflow's search can look for.
_SEARCHABLE = re.compile(r"[ !#-&(-\[\]^_a-~]{1,500}")
#: How MLflow says that it is the values of a call that it refuses.
_OF_VALUES = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE")


@dataclass(slots=True)
class _Run:
    """A run, and what it is to get with the next flush.

    Attributes:
        run_id: MLflow's.
        last: iterations up to this one are in the run.
        is_open: whether the trial has not ended.
        state: how the trial stands.
    """

    run_id: str
    last: int = 0
    is_open: bool = False
    state: str = "UNFINISHED"
    params: dict[str, str] = field(default_factory=dict)
    new_params: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


class MLflow(TrialLogger):
    """Logs a run per trial to MLflow.

    Numeric metrics are metrics, at the iteration as the step; the config is the params. Tags have other metrics, and
    the group, the trial, from which trial's state it starts, its state and its error. A trial that was stopped early is
    ``FINISHED``, one that had not ended when the executor was closed ``KILLED``.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.loggers import MLflow
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> trials = [Trial(train, {"lr": 0.5}, trial_id="a")]
        >>> loggers = [MLflow("sqlite:///mlflow.db")]
        >>> with FluidExecutor(backend="local", devices=1, verbose=0, loggers=loggers) as executor:
        ...     ended = executor.submit_trialgroup(TrialGroup(trials, name="sweep")).wait()
        >>> client = loggers[0].client
        >>> (run,) = client.search_runs([client.get_experiment_by_name("sweep").experiment_id])
        >>> run.info.run_name, run.info.status, run.data.params, run.data.metrics
        ('a', 'FINISHED', {'lr': '0.5'}, {'loss': 0.25})

    Args:
        tracking_uri: MLflow's server or store; ``None``, the default, for the one that MLflow uses:
            ``MLFLOW_TRACKING_URI`` or ``mlflow.set_tracking_uri``.
        experiment: name of the experiment of all runs; ``None``, the default, for one per group, of the group's name.
        tags: further tags of all runs; none by default.

    Attributes:
        client: the ``MlflowClient``.

    Raises:
        MissingDependencyError: neither mlflow nor mlflow-skinny is installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        _imports.check()
        if experiment is not None:
            require_text("experiment", experiment)
        if tags is not None and not isinstance(tags, Mapping):
            raise InvalidFieldError("tags", tags, "must be a dict of texts")
        self.client: Any = mlflow.MlflowClient(tracking_uri)
        self.destination = f"{self.client.tracking_uri} {experiment or ''}".rstrip()
        self._experiment = experiment
        self._left_out = LeftOut(self.key)
        self._tags = dict(tags or {})
        self._session: LoggedSession
        #: Ids by name.
        self._experiments: dict[str, str] = {}
        self._runs: dict[str, _Run] = {}

    def on_session(self, session: LoggedSession) -> None:
        self._session = session
        if self._experiment is not None:
            self._experiment_id(self._experiment)

    def on_trial(self, trial: LoggedTrial) -> None:
        try:
            run = self._runs.get(trial.trial_id) or self._find(trial) or self._create(trial)
        except MlflowException as error:
            if error.error_code in _OF_VALUES:
                raise ValueError(str(error)) from error
            raise
        self._runs[trial.trial_id] = run
        for name, value in hyperparameters(trial.config).items():
            name, text = _name(name), str(value)[:_LONGEST_PARAM]
            if name not in run.params:  # MLflow does not let a param change.
                run.new_params.append(Param(name, text))
            run.params[name] = text

    def on_start(self, trial_id: str) -> None:
        run = self._runs[trial_id]
        run.state = "UNFINISHED"
        if not run.is_open:
            run.is_open = True
            self.client.update_run(run.run_id, status="RUNNING")

    def on_result(self, result: Result) -> None:
        run = self._runs[result.trial_id]
        run.is_open = True
        if result.iteration > run.last:
            now = int(wall_seconds() * 1000)
            found = scalars(result.metrics).items()
            run.metrics += [Metric(_name(name), value, now, result.iteration) for name, value in found]
            run.tags |= {_name(f"metrics.{name}"): text for name, text in texts(result.metrics).items()}

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        run = self._runs[trial_id]
        run.state = run.tags["fluid.state"] = state
        if failure is not None:
            run.tags["fluid.error"] = f"{failure.message}\n{failure.traceback}"
        self._write(run)
        if state != "PAUSED":
            del self._runs[trial_id]
            self.client.set_terminated(run.run_id, "FAILED" if state == "FAILED" else "FINISHED")

    def on_broken(self, error: BaseException) -> None:
        for run in self._runs.values():
            if run.is_open:
                run.tags["fluid.state"] = run.state
                self.client.set_terminated(run.run_id, "KILLED")
            self._write(run)
        self._left_out.close()

    def flush(self) -> bool:
        for run in self._runs.values():
            self._write(run)
        return True

    def _write(self, run: _Run) -> None:
        params, run.new_params = run.new_params, []
        metrics, run.metrics = run.metrics, []
        tags, run.tags = [RunTag(name, text[:_LONGEST_TAG]) for name, text in run.tags.items()], {}
        while params or metrics or tags:
            self._log([*metrics[:_MOST_METRICS], *params[:_MOST_PARAMS], *tags[:_MOST_PARAMS]], run.run_id)
            metrics, params, tags = metrics[_MOST_METRICS:], params[_MOST_PARAMS:], tags[_MOST_PARAMS:]

    def _log(self, batch: list[Any], run_id: str) -> None:
        """Logs metrics, params and tags; one that MLflow refuses is left out."""
        kinds = {"metrics": Metric, "params": Param, "tags": RunTag}
        try:
            self.client.log_batch(
                run_id, **{name: [one for one in batch if type(one) is kind] for name, kind in kinds.items()}
            )
        except MlflowException as error:
            if error.error_code not in _OF_VALUES:
                raise
            if len(batch) == 1:
                self._left_out.add(f"{type(batch[0]).__name__} {batch[0].key!r}", error)
                return
            middle = len(batch) // 2
            self._log(batch[:middle], run_id)
            self._log(batch[middle:], run_id)

    def _experiment_id(self, name: str) -> str:
        if name not in self._experiments:
            known = self.client.get_experiment_by_name(name)
            made = self.client.create_experiment(name) if known is None else known.experiment_id
            self._experiments[name] = made
        return self._experiments[name]

    def _create(self, trial: LoggedTrial) -> _Run:
        tags = {
            **self._tags,
            _UID: _uid(trial),
            "fluid.group": trial.group[:_LONGEST_TAG],
            "fluid.trial": trial.trial_id[:_LONGEST_TAG],
            "fluid.run_dir": writable(str(self._session.run_dir))[:_LONGEST_TAG],
            **{f"fluid.{name}": str(fact)[:_LONGEST_TAG] for name, fact in trial.start_facts.items()},
        }
        experiment = self._experiment_id(self._experiment or cut(trial.group, _LONGEST_EXPERIMENT))
        made = self.client.create_run(experiment, run_name=cut(trial.trial_id, _LONGEST_NAME), tags=tags)
        return _Run(made.info.run_id, is_open=True)

    def _find(self, trial: LoggedTrial) -> _Run | None:
        """Finds the run that an earlier session has begun, or this one has ended."""
        experiment = self._experiment_id(self._experiment or cut(trial.group, _LONGEST_EXPERIMENT))
        found = self.client.search_runs([experiment], f'tags.`{_UID}` = "{_uid(trial)}"', max_results=1)
        if not found:
            return None
        data, run_id = found[0].data, found[0].info.run_id
        steps = [metric.step for name in data.metrics for metric in self.client.get_metric_history(run_id, name)]
        return _Run(run_id, max(steps, default=0), params=dict(data.params))


def _name(name: str) -> str:
    """The name of a metric, a param or a tag as MLflow takes it: a relative path in its shortest form."""
    parts = _REFUSED.sub("_", name).split("/")
    return cut("/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in parts), _LONGEST_NAME)


def _uid(trial: LoggedTrial) -> str:
    return trial.uid if _SEARCHABLE.fullmatch(trial.uid) else hashlib.sha256(trial.uid.encode()).hexdigest()

"""Weights & Biases: a run per trial, by its client."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError, require_one_of
from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.logger_files import Files
from fluid.loggers.values import cut, scalars, texts
from fluid.results.records import Result

with try_import("wandb", extra="wandb") as _imports:
    import wandb

_MODES = ("online", "offline", "disabled")
#: Most characters that its server takes of a run's name and a group's.
_LONGEST_NAME = 128
#: Arguments of ``wandb.init`` that the logger sets.
_OWN = ("config", "dir", "group", "id", "mode", "name", "project", "reinit", "resume")


class WandB(TrialLogger):
    """Logs a run per trial to Weights & Biases; the trial's group is the run's group.

    Example:
        >>> from pathlib import Path
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.loggers import WandB
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> loggers = [WandB("digits", mode="offline", folder=".")]
        >>> with FluidExecutor(backend="local", devices=1, verbose=0, loggers=loggers) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")], name="sweep")
        ...     ended = executor.submit_trialgroup(group).wait()
        >>> len(list(Path("wandb").glob("offline-run-*")))
        1

    Args:
        project: the project; ``None``, the default, for the one that wandb uses: ``WANDB_PROJECT``.
        mode: ``"online"``; ``"offline"``, for ``wandb sync`` to upload later; ``"disabled"``; or ``None``, the default,
            for ``WANDB_MODE``.
        folder: where wandb writes its folder ``wandb``; ``None``, the default, for the run folder.
        options: further arguments of ``wandb.init``, such as ``entity``, ``tags`` and ``settings``.

    Raises:
        InvalidFieldError: an option is one that the logger sets.
        MissingDependencyError: wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        mode: str | None = None,
        folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        _imports.check()
        if mode is not None:
            require_one_of("mode", mode, _MODES)
        for name in options:
            if name in _OWN:
                raise InvalidFieldError(name, options[name], "is set for each trial")
        self._project = project
        self._folder = None if folder is None else str(Path(folder).expanduser().absolute())
        # One process has many runs: what it prints, and the machine's load, are of no single one.
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._options: dict[str, Any] = {"mode": mode, "settings": quiet, **options}
        self.destination = "/".join(filter(None, (options.get("entity"), project, mode, self._folder)))
        self._files: Files
        self._runs: dict[str, Any] = {}
        #: How the trials of the open runs stand, once they have started.
        self._states: dict[str, str] = {}

    def on_session(self, session: LoggedSession) -> None:
        self._folder = self._folder or str(session.run_dir)
        # wandb makes its files for all to read; its folder keeps others out until they are closed.
        self._files = Files(Path(self._folder), session.run_dir)
        self._files.make_folder(Path(self._folder) / "wandb")

    def on_trial(self, trial: LoggedTrial) -> None:
        run = self._runs.get(trial.trial_id)
        if run is None:
            self._runs[trial.trial_id] = wandb.init(
                project=self._project,
                dir=self._folder,
                id=hashlib.sha256(trial.uid.encode()).hexdigest()[:16],
                resume="allow",
                name=cut(trial.trial_id, _LONGEST_NAME),
                group=cut(trial.group, _LONGEST_NAME),
                config=dict(trial.config),
                reinit="create_new",
                **self._options,
            )
            for name, fact in trial.start_facts.items():
                self._runs[trial.trial_id].summary[f"fluid/{name}"] = fact
            return
        run.config.update(dict(trial.config), allow_val_change=True)
        if self._has_ended(trial.trial_id):
            self._finish(trial.trial_id)  # It waited for its config.

    def on_start(self, trial_id: str) -> None:
        self._states[trial_id] = "UNFINISHED"

    def on_result(self, result: Result) -> None:
        values = {**scalars(result.metrics), **texts(result.metrics)}
        self._runs[result.trial_id].log(values, step=result.iteration)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        run = self._runs[trial_id]
        self._states[trial_id] = run.summary["fluid/state"] = state
        if failure is not None:
            run.summary["fluid/error"] = f"{failure.message}\n{failure.traceback}"
        if self._has_ended(trial_id) and dict(run.config):
            self._finish(trial_id)

    def on_broken(self, error: BaseException) -> None:
        for trial_id, run in list(self._runs.items()):
            if trial_id in self._states:
                run.summary["fluid/state"] = self._states[trial_id]
            self._finish(trial_id)
        if self._folder is not None:
            self._files.close(Path(self._folder) / "wandb")

    def _has_ended(self, trial_id: str) -> bool:
        return self._states.get(trial_id, "UNFINISHED") not in ("PAUSED", "UNFINISHED")

    def _finish(self, trial_id: str) -> None:
        state = self._states.pop(trial_id, "")
        self._runs.pop(trial_id).finish(exit_code=int(state == "FAILED"))

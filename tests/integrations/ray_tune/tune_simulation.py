"""A simulated controller that treats Tune's own schedulers, stoppers and trials as Tune's controller does.

It has no actors: a trial "trains" by receiving a number. The caller says which trial is next.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from ray.train._internal.session import _FutureTrainingResult, _TrainingResult
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    TrialScheduler,
)
from ray.tune.stopper import NoopStopper

try:
    from ray.tune import Checkpoint, CheckpointConfig
except ImportError:  # Before Ray 2.43.
    from ray.train import Checkpoint, CheckpointConfig

METRIC = "score"
#: Arguments of schedulers whose decisions can be foreseen.
TIMED = {"time_attr": "training_iteration", "metric": METRIC, "mode": "max"}


class Saved(_FutureTrainingResult):
    """A checkpoint that exists already; the original waits for an actor."""

    def __init__(self, result: _TrainingResult) -> None:
        self.result = result

    def resolve(self, block: bool = True) -> _TrainingResult:
        return self.result


class Controller:
    """The part of the controller that Tune's schedulers use.

    Attributes:
        saves: the iterations at which each trial was told to save.
    """

    def __init__(self, scheduler: Any, stopper: Any = None) -> None:
        self._tune_controller = self
        self.scheduler = scheduler
        self._stopper = stopper or NoopStopper()
        told = SimpleNamespace(on_pause=lambda _: None, on_unpause=lambda _: None, on_trial_result=lambda *_: None)
        self.search_alg = SimpleNamespace(searcher=told, is_finished=lambda: False, total_samples=0)
        self.trials: list[Trial] = []
        self.saves: dict[Trial, list[int]] = {}

    def get_trials(self) -> list[Trial]:
        return self.trials

    def get_live_trials(self) -> set[Trial]:
        return {trial for trial in self.trials if not trial.is_finished()}

    def add(self, **options: Any) -> Trial:
        """Adds a trial; ``every`` and ``at_end`` say when it saves, the other options go to Tune's Trial."""
        checkpoints = CheckpointConfig(
            checkpoint_frequency=options.pop("every", 0), checkpoint_at_end=options.pop("at_end", False)
        )
        trial = Trial("stub", stub=True, checkpoint_config=checkpoints, config={"a": 0.5, "b": 0.5}, **options)
        self.trials.append(trial)
        self.saves[trial] = []
        self.scheduler.on_trial_add(self, trial)
        return trial

    def goes_on_from(self, trial: Trial) -> int:
        """Returns the iteration of the checkpoint from which a trial continues; 0 if it has none."""
        latest = trial.run_metadata.checkpoint_manager._latest_checkpoint_result
        return 0 if latest is None else int(latest.metrics["training_iteration"])

    def process(self, trial: Trial, result: dict[str, Any]) -> str:
        """Processes a result as ``TuneController._process_trial_result`` does, with what follows from it."""
        if self._stopper(trial.trial_id, result) or trial.should_stop(result):
            decision = TrialScheduler.STOP
        else:
            decision = self.scheduler.on_trial_result(self, trial, result)
        if decision == TrialScheduler.STOP:
            result.update(done=True)
        trial.update_last_result(result)
        if decision == TrialScheduler.PAUSE:
            self.pause_trial(trial)
        elif trial.should_checkpoint():
            self._schedule_trial_save(trial, result)
        if decision == TrialScheduler.STOP:
            self.stop_trial(trial)
        return str(decision)

    def fail(self, trial: Trial, recovers: bool) -> None:
        """Fails a trial as Tune does; the scheduler is not told of a trial that is tried again."""
        if recovers:
            trial.set_status(Trial.PENDING)
        else:
            self.scheduler.on_trial_error(self, trial)
            trial.set_status(Trial.ERROR)

    # --- Called by schedulers

    def stop_trial(self, trial: Trial) -> None:
        if trial.status in (Trial.PENDING, Trial.PAUSED):
            self.scheduler.on_trial_remove(self, trial)
        elif trial.status == Trial.RUNNING:
            self.scheduler.on_trial_complete(self, trial, trial.last_result)
        trial.set_status(Trial.TERMINATED)

    def pause_trial(self, trial: Trial, should_checkpoint: bool = True) -> None:
        if should_checkpoint:
            self._schedule_trial_save(trial, trial.last_result)
        trial.set_status(Trial.PAUSED)

    def _set_trial_status(self, trial: Trial, status: str) -> None:
        trial.set_status(status)

    def _mark_trial_to_checkpoint(self, trial: Trial) -> None:
        pass

    def _schedule_trial_save(self, trial: Trial, result: dict[str, Any] | None = None) -> Saved | None:
        if trial.status != Trial.RUNNING:
            return None
        saved = dict(result or trial.last_result)
        iteration = saved["training_iteration"]
        if iteration not in self.saves[trial]:
            self.saves[trial].append(iteration)
        trained = _TrainingResult(Checkpoint(f"/{trial.trial_id}/{iteration}"), saved)
        trial.run_metadata.checkpoint_manager._latest_checkpoint_result = trained
        return Saved(trained)


class Sweep:
    """Trials that come, train in turn, fail and end by themselves, in an order that a seed decides.

    Args:
        controller: holds the scheduler; it has no trials yet.
        random: decides everything.
        trials: number of trials.
        options: of the next trial, as for ``Controller.add``.
        on_start: called with a trial and the iteration from which it continues, before it does.
        on_result: called with a trial, its iteration, whether the trial ends there by itself, and a function that
            processes the result and returns the decision.
        failures: probability that a trial fails, at every iteration.
        length: a trial that reaches this iteration ends by itself.
    """

    def __init__(
        self,
        controller: Controller,
        random: Random,
        *,
        trials: int,
        options: Callable[[], dict[str, Any]],
        on_start: Callable[[Trial, int], None],
        on_result: Callable[[Trial, int, bool, Callable[[], str]], None],
        failures: float = 0.0,
        length: int = 60,
    ) -> None:
        self.controller = controller
        self.random = random
        self.to_come = trials
        self.options = options
        self.on_start = on_start
        self.on_result = on_result
        self.failures = failures
        self.length = length
        self.slots = random.randint(1, trials)
        self.iteration: dict[Trial, int] = {}

    def run(self) -> None:
        """Runs until no trial is left, or none may continue."""
        for _ in range(self.random.randint(1, self.to_come)):
            self._add()
        while self._start() or self.iteration or self.to_come:
            if self.to_come and (not self.iteration or self.random.random() < 0.1):
                self._add()
            elif self.iteration:
                self._train(self.random.choice(list(self.iteration)))

    def _add(self) -> None:
        self.to_come -= 1
        self.controller.add(**self.options())

    def _start(self) -> bool:
        if len(self.iteration) >= self.slots:
            return False
        trial = self.controller.scheduler.choose_trial_to_run(self.controller)
        if trial is None:
            return False
        self.iteration[trial] = self.controller.goes_on_from(trial)
        trial.set_status(Trial.RUNNING)
        self.on_start(trial, self.iteration[trial])
        return True

    def _train(self, trial: Trial) -> None:
        if self.random.random() < self.failures:
            self.controller.fail(trial, recovers=self.random.random() < 0.5)
        else:
            self.iteration[trial] += 1
            iteration = self.iteration[trial]
            # Few different values, so that some trials are equally good.
            result = {"training_iteration": iteration, METRIC: float(self.random.randint(0, 9))}
            result["done"] = iteration >= self.length
            self.on_result(trial, iteration, iteration >= self.length, lambda: self.controller.process(trial, result))
        if trial.status != Trial.RUNNING:
            del self.iteration[trial]


# --- Schedulers


class Fickle(ASHAScheduler):
    """Has its own deciding method, which may stop a trial at any iteration."""

    def on_trial_result(self, controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        return super().on_trial_result(controller, trial, result) if result[METRIC] else TrialScheduler.STOP


def a_population(**options: Any) -> PopulationBasedTraining:
    options = {"perturbation_interval": 5, "hyperparam_mutations": {"a": [0.1, 0.2]}, "log_config": False, **options}
    return PopulationBasedTraining(**{**TIMED, **options})


def replay(folder: Path, steps: list[int]) -> PopulationBasedTrainingReplay:
    lines = [json.dumps(["tag", "tag", step, step, {"a": 0}, {"a": step}]) for step in steps]
    policy = folder / "policy.txt"
    policy.write_text("\n".join(lines), encoding="utf-8")
    return PopulationBasedTrainingReplay(str(policy))

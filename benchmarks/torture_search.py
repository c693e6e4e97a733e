"""Sessions of torture.py under Ray Tune and Optuna: their drivers, which continue what the driver before has left."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from torture_trials import Chain, link

from fluid import FluidExecutor

#: Iterations of a trial that is not stopped.
BUDGET = 12
#: Schedulers of Ray Tune's that are drawn.
SCHEDULERS = ("fifo", "asha", "hyperband")


class ScoredChain(Chain):
    """A chain whose trial is found by a number in its config, with a score that schedulers and pruners compare."""

    def setup(self, config: dict[str, Any]) -> None:
        seed = f"{config['session']}/t{config['number']}"
        super().setup({**config, "seed": seed, "nasty": config["nasties"].get(str(config["number"]), {})})

    def step(self) -> dict[str, Any]:
        metrics = super().step()
        return {**metrics, "score": score(metrics["value"]), "number": self.config["number"], "step": self.done}


def score(value: str) -> float:
    """Returns a number that follows from a value, exact as a double."""
    return int(value[:8], 16) / 2**32


def base_config(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns what the trials of a sweep have in common."""
    (trials,) = plan["groups"].values()
    nasties = {str(index): trial["config"]["nasty"] for index, trial in enumerate(trials)}
    facts = {"session": plan["seed"], "seconds": 0.05, "padding": 20_000, "notes": str(folder / "notes")}
    return {**facts, "nasties": nasties}


# -- Ray Tune -------------------------------------------------------------------------------------------------


def run_tune(plan: dict[str, Any], folder: Path, executor: FluidExecutor, told: Any) -> None:
    """Runs the sweep of a plan, or restores it."""
    import ray
    from ray.tune import CheckpointConfig, FailureConfig
    from ray.tune.logger import LoggerCallback
    from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler

    from fluid import tune

    class TuneChain(ScoredChain, ray.tune.Trainable):  # type: ignore[misc]
        """The chain as a class of Ray Tune's."""

    class Teller(LoggerCallback):  # type: ignore[misc]
        def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
            told.write(
                trial=f"t{result['number']}", iteration=result["training_iteration"], step=result["step"],
                value=result["value"], way="tune",
            )  # fmt: skip

    ray.init(address=plan["ray_address"], log_to_driver=False, logging_level="ERROR")
    how = {"metric": "score", "mode": "max", "time_attr": "training_iteration"}
    scheduler = {
        "fifo": lambda: None,
        "asha": lambda: ASHAScheduler(**how, max_t=BUDGET, grace_period=3, reduction_factor=2),
        "hyperband": lambda: HyperBandScheduler(**how, max_t=BUDGET, reduction_factor=2),
    }[plan["scheduler"]]()
    (trials,) = plan["groups"].values()
    sweep = folder / "storage" / "sweep"
    if sweep.exists() and is_whole(sweep):
        tuner = tune.Tuner.restore(str(sweep), TuneChain, executor=executor, resume_errored=True, param_space=None)
    else:
        shutil.rmtree(sweep, ignore_errors=True)
        told.write(begun=True)
        tuner = tune.Tuner(
            TuneChain,
            param_space={**base_config(plan, folder), "number": tune.grid_search(list(range(len(trials))))},
            tune_config=tune.TuneConfig(scheduler=scheduler),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=str(folder / "storage"),
                stop={"training_iteration": BUDGET},
                checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
                failure_config=FailureConfig(max_failures=50),
                callbacks=[Teller()],
                verbose=0,
            ),
            executor=executor,
        )
    grid = tuner.fit()
    for trial in grid._experiment_analysis.trials:
        told.write(trial=f"t{trial.config['number']}", status=trial.status, last=trial.last_result.get("step"))


def is_whole(sweep: Path) -> bool:
    """Whether Tune's own state of a sweep can be read: Tune writes it in place, so a killed driver may leave a half."""
    notes = [path.read_text(errors="replace") for path in sweep.glob("experiment_state-*.json")]
    try:
        return bool(notes) and all(json.loads(note) for note in notes)
    except ValueError:
        return False


# -- Optuna ---------------------------------------------------------------------------------------------------


def open_study(plan: dict[str, Any], folder: Path) -> Any:
    """Opens the study of a plan, or makes it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2) if plan["scheduler"] == "asha" else None
    return optuna.create_study(
        study_name="study", storage=f"sqlite:///{folder}/study.db", load_if_exists=True, direction="maximize",
        sampler=optuna.samplers.RandomSampler(), pruner=pruner or optuna.pruners.NopPruner(),
    )  # fmt: skip


def wanted_trials(plan: dict[str, Any]) -> int:
    """Returns how many trials the study of a plan must have finished."""
    (trials,) = plan["groups"].values()
    return 2 + 2 * len(trials)


def run_optuna(plan: dict[str, Any], folder: Path, executor: FluidExecutor, draws: random.Random) -> None:
    """Continues the study of a plan until it has enough trials."""
    from optuna.study import MaxTrialsCallback
    from optuna.trial import TrialState

    from fluid.integrations.optuna import optimize

    study = open_study(plan, folder)
    wanted = wanted_trials(plan)
    base = base_config(plan, folder)

    def space(trial: Any) -> dict[str, Any]:
        return {**base, "number": trial.suggest_int("number", 100, 10**6)}

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    is_enough = False
    while not is_enough:  # Once at least: what a killed driver has left running in the study is ended by the next call.
        optimize(
            study, ScoredChain, n_trials=3 * wanted, executor=executor, space=space, metric="score", budget=BUDGET,
            batch_size=draws.choice([None, 3]), catch=Exception, callbacks=[MaxTrialsCallback(wanted, states=ended)],
        )  # fmt: skip
        is_enough = len(study.get_trials(deepcopy=False, states=ended)) >= wanted


def check_study(plan: dict[str, Any], folder: Path) -> tuple[int, list[str], list[str], list[str]]:
    """Checks a study: the values checked, those that are lost, those that are wrong, and what else is amiss."""
    from optuna.trial import TrialState

    checked, lost, wrong, others, finished = 0, [], [], [], 0
    for trial in open_study(plan, folder).trials:
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            if trial.state is TrialState.RUNNING:
                others.append(f"trial {trial.number} is still running")
            continue
        values, value = {}, ""
        for step in range(BUDGET):
            value = link(f"{plan['seed']}/t{trial.params.get('number')}", step + 1, value)
            values[step] = score(value)
        told = trial.intermediate_values
        checked += len(told)
        wrong += [f"trial {trial.number}, step {step}: {told[step]}" for step in told if told[step] != values.get(step)]
        lost += [f"trial {trial.number}, step {step}" for step in range(max(told, default=-1)) if step not in told]
        if trial.state is TrialState.COMPLETE and (len(told) != BUDGET or trial.value != values[BUDGET - 1]):
            lost.append(f"trial {trial.number}: {trial.value} after {len(told)} values")
        finished += trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    if finished < wanted_trials(plan):
        others.append(f"{finished} trials have finished, of {wanted_trials(plan)}")
    return checked, lost, wrong, others

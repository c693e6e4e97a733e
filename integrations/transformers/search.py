"""The function that users call instead of ``trainer.hyperparameter_search``, and the checks of its arguments."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fluid._given_executor import closes_executor
from fluid._imports import try_import
from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.executor import FluidExecutor, executor_in_force, executor_scope
from fluid.integrations.options import require_options
from fluid.integrations.transformers.direction import direction_said
from fluid.integrations.transformers.trial import Objective, PackedTrainer, set_hyperparameters, train_trial
from fluid.results.sweep import SweepResult
from fluid.search import BOHB, loguniform, make_sampler, make_space, randint
from fluid.session.options import OBJECTS
from fluid.sweep import run
from fluid.sweeping.algorithms import LEARNING, named
from fluid.trainables.import_scan import can_be_imported, imports_of
from fluid.user_calls import user_call

with try_import("transformers", extra="transformers") as _imports:
    from transformers import Trainer
    from transformers.trainer_utils import BestRun, default_compute_objective, number_of_arguments

_MODES = {"minimize": "min", "maximize": "max"}
#: Arguments of the Trainer's own search, and of ``fluid.run``, that cannot be given, and why.
_NOT_HERE = {
    "backend": "belongs to the search of the Trainer itself; here trials run on Fluid: leave it out",
    "hp_name": "names the trials of the Trainer's own search; here name= names the search, and Fluid its trials",
    "metric": "follows from compute_objective",
    "mode": "follows from direction",
    "samples": "follows from n_trials",
}
#: Configs that are drawn to see how long trials may get, where those that will be tried are not known before.
_DRAWS = 1000


@user_call
@closes_executor
def hyperparameter_search(
    trainer: Trainer,
    hp_space: Callable[[Any], Mapping[str, Any]] | Mapping[str, Any] | None = None,
    compute_objective: Callable[[dict[str, float]], float | Sequence[float]] | None = None,
    n_trials: int = 20,
    direction: str | Sequence[str] | None = None,
    *,
    algorithm: str | BOHB | None = None,
    budget: int | None = None,
    seed: int | None = 0,
    executor: FluidExecutor | None = None,
    **options: Any,
) -> BestRun | list[BestRun]:
    """Searches hyperparameters as ``trainer.hyperparameter_search`` does, with the trials on Fluid.

    A trial is a training run; an iteration of it is an evaluation, as ``args.eval_strategy`` says. The trainer is sent
    to the trials' processes without its model, which ``model_init`` makes there. It is not changed. Trials show no
    progress bars, report to no logger, and leave no files in ``args.output_dir``: Fluid keeps the checkpoint of the
    best one in its run folder.

    Args:
        trainer: made with ``model_init``, a ``train_dataset`` and an ``eval_dataset``.
        hp_space: a function of an Optuna trial, one that returns domains of Ray Tune, both as for the Trainer; or a
            space of :func:`fluid.run`. Names are those of training arguments, or what ``model_init`` looks up in its
            argument. ``None``, the default, for the Trainer's default space.
        compute_objective: what to optimize, from the metrics of an evaluation; several numbers for several directions.
            ``None``, the default, for the loss, or the sum of what ``compute_metrics`` returns.
        n_trials: number of trials; 20 by default.
        direction: ``"minimize"`` or ``"maximize"``; one for each objective. ``None``, the default, for what the
            trainer's ``greater_is_better`` says of the objective's metric, else for what the metric's name does.
        algorithm: as for :func:`fluid.run`; ``None``, the default, for ``"asha"``, or ``"random"`` for several
            objectives.
        budget: most evaluations of a trial; ``None``, the default, for as many as the longest trial makes.
        seed: of the hyperparameters; ``None`` for others in each call.
        executor: as for :func:`fluid.run`.
        options: further arguments of :func:`fluid.run`.

    Returns:
        The best trial: its id, its best objective, its hyperparameters, and the :class:`fluid.SweepResult` as
        ``run_summary``. With several objectives, a list of those that no other one beats.

    Raises:
        InvalidFieldError: an argument, or an attribute of the trainer, cannot be used.
        SweepFailedError: all trials have failed.
        MissingDependencyError: transformers is not installed.

    Example:
        >>> import fluid, torch
        >>> from fluid.integrations.transformers import hyperparameter_search
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> text = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8) % 16]
        >>> def model_init():
        ...     return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8))
        >>> args = TrainingArguments("out", num_train_epochs=3, eval_strategy="epoch", use_cpu=True)
        >>> trainer = Trainer(model_init=model_init, args=args, train_dataset=text, eval_dataset=text)
        >>> space = {"learning_rate": fluid.search.loguniform(1e-4, 1e-1)}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     best = hyperparameter_search(trainer, space, n_trials=3)
        >>> list(best.hyperparameters), best.objective < 3.0, len(best.run_summary.trials)
        (['learning_rate'], True, 3)
        >>> model = GPT2LMHeadModel.from_pretrained(best.run_summary.best.checkpoint)
    """
    _imports.check()
    _require_trainer(trainer)
    require_options(run, options, _NOT_HERE)
    if executor is not None and not isinstance(executor, FluidExecutor):
        raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
    trials = require_integer("n_trials", n_trials, at_least=1)
    if direction is None:
        direction = direction_said(trainer, compute_objective)
    directions = [direction] if isinstance(direction, str) else list(direction)
    modes = [_MODES[require_one_of("direction", one, _MODES)] for one in directions]
    names = ("objective",) if len(modes) == 1 else tuple(f"objective_{number}" for number in range(len(modes)))
    space, suggests = _read_space(hp_space)
    algorithm = algorithm or ("asha" if len(modes) == 1 else "random")
    configs = _likely_configs(space, algorithm, seed, trials, options.get("points", ()))
    _require_usable(trainer, configs)
    packed = PackedTrainer(trainer, Objective(compute_objective or default_compute_objective, names), suggests=suggests)
    trainable = functools.partial(train_trial, packed)
    arguments = {
        "metric": names if len(names) > 1 else names[0],
        "mode": modes if len(modes) > 1 else modes[0],
        "samples": trials,
        "algorithm": algorithm,
        "budget": max(_evaluations(trainer, config) for config in configs) if budget is None else budget,
        "seed": seed,
        "name": f"{type(trainer).__name__}-{named(algorithm)}",
        **options,
    }
    result = _run(trainable, space, executor, _modules_of(trainer), arguments)
    found = result.pareto if len(names) > 1 else (result.best,)
    runs = [BestRun(best.trial_id, best.value, dict(best.config), result) for best in found]
    return runs if len(names) > 1 else runs[0]


#: Arguments of :func:`fluid.run` that a new executor takes.
_OF_EXECUTORS = (*OBJECTS, "devices", "run_dir", "join", "if_exists", "loggers", "metrics_port", "deadline")


def _run(
    trainable: Any, space: Any, executor: FluidExecutor | None, modules: Sequence[str], arguments: dict[str, Any]
) -> SweepResult:
    if arguments.get("resume") or arguments.get("if_exists") == "resume":
        return run(trainable, space, executor=executor, **arguments)  # The executor is made there, from the folder.
    is_new = executor is None and executor_in_force() is None
    new = {name: arguments.pop(name) for name in _OF_EXECUTORS if is_new and name in arguments}
    with executor_scope(executor, **new) as chosen:
        chosen.session.preload(trainable, modules)
        return run(trainable, space, executor=chosen, **arguments)


def _modules_of(trainer: Trainer) -> list[str]:
    """What lanes import for a trainer: loaded before they are forked, it costs them nothing."""
    used = [trainer, trainer.model, trainer.train_dataset, trainer.eval_dataset, trainer.data_collator]
    used += [trainer.processing_class, trainer.args]
    names = {type(value).__module__ for value in used}
    names.update(*(imports_of(value) for value in (trainer.model_init, trainer.compute_metrics) if value is not None))
    return sorted(name for name in names - {"__main__", "builtins"} if can_be_imported(name))


# -- checks --------------------------------------------------------------------------------------------------


def _require_trainer(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise InvalidFieldError("trainer", trainer, "must be a Trainer of transformers")
    if trainer.model_init is None:
        reason = "must be given to the Trainer, as each trial makes a model of its own: Trainer(model_init=...)"
        raise InvalidFieldError("trainer.model_init", None, reason)
    if trainer.train_dataset is None and _has_own(trainer, "get_train_dataloader"):
        raise InvalidFieldError("trainer.train_dataset", None, "must be given to the Trainer: trials train on it")
    if trainer.eval_dataset is None and _has_own(trainer, "get_eval_dataloader", "evaluate"):
        reason = "must be given to the Trainer: the objective is computed from what evaluate() returns"
        raise InvalidFieldError("trainer.eval_dataset", None, reason)


def _has_own(trainer: Trainer, *methods: str) -> bool:
    """Whether methods are those of the Trainer itself, which use its data sets."""
    return all(getattr(type(trainer), name) is getattr(Trainer, name) for name in methods)


def _read_space(hp_space: Any) -> tuple[Any, bool]:
    """Returns a space as :func:`fluid.run` takes it, and whether it is a function of an Optuna trial."""
    if hp_space is None:
        return {
            "learning_rate": loguniform(1e-6, 1e-4),
            "num_train_epochs": randint(1, 6),
            "seed": randint(1, 41),
            "per_device_train_batch_size": [4, 8, 16, 32, 64],
        }, False
    if isinstance(hp_space, Mapping):
        return hp_space, False
    if not callable(hp_space):
        raise InvalidFieldError("hp_space", hp_space, "must be a function or a dict")
    try:
        found = hp_space(None)
    except AttributeError:  # None suggests nothing.
        return hp_space, True
    if not isinstance(found, Mapping):
        raise InvalidFieldError("hp_space", hp_space, f"must return a dict of hyperparameters, not {found!r:.80}")
    return found, False


def _likely_configs(space: Any, algorithm: str | BOHB, seed: Any, trials: int, points: Any) -> list[Mapping[str, Any]]:
    """Configs as the sweep will try them; where that depends on its results, many that it may try."""
    is_known = named(algorithm) not in LEARNING and seed is not None
    kind = "grid" if algorithm == "grid" else "random"
    sampler = make_sampler(kind, make_space(space), seed=seed, points=points)
    drawn = (sampler.ask() for _ in range(trials if is_known else max(trials, _DRAWS)))
    return [suggestion.config for suggestion in drawn if suggestion is not None]


def _require_usable(trainer: Trainer, configs: Sequence[Mapping[str, Any]]) -> None:
    """Refuses hyperparameters that a trial cannot train with."""
    for config in configs:
        set_hyperparameters(copy.copy(trainer.args), config)
        for name, value in config.items():
            # A model_init with an argument may look up any name.
            if not hasattr(trainer.args, name) and not number_of_arguments(trainer.model_init):
                reason = f"is no field of {type(trainer.args).__name__}, and model_init takes no trial to find it in"
                raise InvalidFieldError(f"hp_space[{name!r}]", value, reason)


def _evaluations(trainer: Trainer, config: Mapping[str, Any]) -> int:
    """How often a trial of these hyperparameters evaluates, if nothing stops it."""
    args = copy.copy(trainer.args)
    set_hyperparameters(args, config)
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if strategy == "no":
        return 1
    steps: float = args.max_steps
    per_epoch: int | None = None
    with contextlib.suppress(TypeError):  # The data set, or the trainer's own loader, has no length.
        batches = math.ceil(len(trainer.train_dataset) / args.per_device_train_batch_size)
        per_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    if steps <= 0 and per_epoch is not None:
        steps = math.ceil(args.num_train_epochs * per_epoch)
    if steps <= 0 or (strategy == "epoch" and per_epoch is None):
        reason = "must be given, the most evaluations of a trial: the train_dataset has no length"
        raise InvalidFieldError("budget", None, reason)
    if strategy == "epoch" and per_epoch is not None:
        return math.ceil(steps / per_epoch)
    every: float = args.eval_steps if args.eval_steps >= 1 else math.ceil(steps * args.eval_steps)
    return math.ceil(steps / every)

"""What a lane runs for one trial: the user's trainer, with the hyperparameters of the trial."""

from __future__ import annotations

import copy
import functools
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import cloudpickle

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.integrations.transformers.callback import FluidTrainerCallback
from fluid.trainables.driver_link import driver_link
from fluid.trainables.json_form import message_of
from fluid.trainables.reporting import get_checkpoint

with try_import("transformers", extra="transformers"):
    from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_callback import CallbackHandler
    from transformers.trainer_utils import TrainerMemoryTracker, number_of_arguments

#: What a trainer makes anew in a lane.
_MADE_ANEW = ("model", "model_wrapped", "optimizer", "lr_scheduler", "accelerator", "gather_function", "deepspeed")
#: What each trial has for itself; the rest, such as the data, is shared by the trials of a lane.
_OWN = ("args", "callback_handler", "control", "state")


class Objective:
    """What :func:`hyperparameter_search` optimizes, as metrics of an iteration.

    Args:
        compute: from the metrics of an evaluation, a number, or several for several names.
        names: of the metrics.
    """

    def __init__(self, compute: Any, names: tuple[str, ...]) -> None:
        self._compute = compute
        self._names = names

    def __call__(self, metrics: dict[str, float]) -> dict[str, Any]:
        computed = self._compute(metrics)
        return dict(zip(self._names, [computed] if len(self._names) == 1 else computed, strict=True))


class PackedTrainer:
    """A trainer on its way to lanes: pickled once, and unpickled once in each.

    Args:
        trainer: the user's. It is as it was afterwards.
        objective: what is optimized.
        suggests: whether its ``model_init`` expects an Optuna trial rather than a dict.

    Raises:
        InvalidFieldError: an attribute of the trainer cannot be pickled.
    """

    def __init__(self, trainer: Trainer, objective: Objective, *, suggests: bool) -> None:
        self.objective = objective
        self._suggests = suggests
        before = dict(vars(trainer))
        try:
            vars(trainer).update(_what_lanes_need(trainer))  # In place, as callbacks may refer to their trainer.
            self._payload = _dump(trainer)
        finally:
            vars(trainer).clear()
            vars(trainer).update(before)

    @functools.cached_property
    def _loaded(self) -> Trainer:
        payload, self._payload = self._payload, b""
        return pickle.loads(payload)

    def trainer_of(self, config: Mapping[str, Any], trial_id: str) -> Trainer:
        """Makes the trainer of a trial.

        Args:
            config: its hyperparameters.
            trial_id: its id.
        """
        shared = self._loaded
        trainer = copy.copy(shared)
        known: dict[int, Any] = {id(value): value for name, value in vars(shared).items() if name not in _OWN}
        known[id(shared)] = trainer
        for name in _OWN:
            setattr(trainer, name, copy.deepcopy(getattr(shared, name), known))
        set_hyperparameters(trainer.args, config)
        trainer.args.output_dir = os.path.join(trainer.args.output_dir, f"run-{trial_id}")
        if number_of_arguments(trainer.model_init):
            trainer.model_init = functools.partial(trainer.model_init, self._trial_of(config))
        assert trainer.args.device is not None  # Found out now: that resets what accelerators share.
        trainer.create_accelerator_and_postprocess()
        trainer._train_batch_size = trainer.args.train_batch_size
        return trainer

    def _trial_of(self, config: Mapping[str, Any]) -> Any:
        """The hyperparameters, in the form that a ``model_init`` expects."""
        if not self._suggests:
            return dict(config)
        from optuna.trial import FixedTrial

        return FixedTrial(dict(config))


def train_trial(packed: PackedTrainer, config: dict[str, Any]) -> None:
    """Trains one trial, from its checkpoint if it has one.

    Args:
        packed: the user's trainer.
        config: the hyperparameters of the trial.
    """
    trainer = packed.trainer_of(config, driver_link().trial_id)
    callback = FluidTrainerCallback(trainer, packed.objective)
    trainer.add_callback(callback)
    checkpoint = get_checkpoint()
    trainer.train(resume_from_checkpoint=checkpoint)
    if checkpoint is None and not callback.has_reported:
        trainer.evaluate()
        callback.report_evaluation()


def set_hyperparameters(args: TrainingArguments, config: Mapping[str, Any]) -> None:
    """Sets training arguments, in the type of the value that is there if it is the same value in it, else as declared.

    The Trainer's own search knows the former only, by which 0.1 becomes 0 where a 0 was.

    Args:
        args: the arguments.
        config: the hyperparameters; those that are no training arguments are left out.

    Raises:
        InvalidFieldError: a value would be another one in its argument's type.
    """
    kind: Any = type(args)
    kinds = _kinds_of_arguments(kind)
    for name, value in config.items():
        if hasattr(args, name):
            setattr(args, name, _of_kinds(name, value, kinds.get(name, ()), getattr(args, name)))


@functools.cache
def _kinds_of_arguments(kind: type) -> dict[str, tuple[Any, ...]]:
    """The classes of which a value of each argument may be; none if that is not known."""
    hints: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        with suppress(NameError, TypeError):  # Of names that only a function of the user's knows.
            hints |= get_type_hints(one)
    found = {}
    for name, hint in hints.items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = tuple(get_origin(part) or part for part in parts)
        found[name] = kinds if all(isinstance(each, type) for each in kinds) else ()
    return found


def _of_kinds(name: str, value: Any, kinds: tuple[Any, ...], before: Any) -> Any:
    if not kinds:
        return value
    choices = next((kind for kind in kinds if issubclass(kind, Enum)), None)
    for kind in (choices,) if choices else (type(before), *kinds):
        if isinstance(value, kind):
            return value
        with suppress(TypeError, ValueError):
            cast = kind(value)
            if choices or cast == value or (isinstance(value, str) and kind in (int, float)):
                return cast
    if choices:
        reason = f"must be one of {', '.join(repr(each.value) for each in choices)}"
    else:
        known = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        reason = f"must be of type {known}: no other number or text is as TrainingArguments declare {name}"
    raise InvalidFieldError(f"hp_space[{name!r}]", value, reason)


def _what_lanes_need(trainer: Trainer) -> dict[str, Any]:
    """The attributes of a trainer that are others in lanes: no model, nothing of this process, no output."""
    args = copy.copy(trainer.args)
    for name in ("_setup_devices", "_n_gpu"):
        vars(args).pop(name, None)  # What devices there are, the lane finds out.
    args.distributed_state = None
    args.output_dir = os.path.abspath(args.output_dir)
    args.save_strategy = type(args.save_strategy)("no")
    args.report_to, args.push_to_hub, args.disable_tqdm, args.skip_memory_metrics = [], False, True, True
    args.restore_callback_states_from_checkpoint = True  # Such as the patience of early stopping.
    silent = (PrinterCallback, ProgressCallback, FluidTrainerCallback, *INTEGRATION_TO_CALLBACK.values())
    callbacks = [one for one in trainer.callback_handler.callbacks if not isinstance(one, silent)]
    return {
        **{name: None for name in _MADE_ANEW if name in vars(trainer)},
        "args": args,
        "callback_handler": CallbackHandler(callbacks, None, trainer.callback_handler.processing_class, None, None),
        "_memory_tracker": TrainerMemoryTracker(skip_memory_metrics=True),
    }


def _dump(trainer: Trainer) -> bytes:
    try:
        return bytes(cloudpickle.dumps(trainer))
    except Exception as error:
        for name, value in vars(trainer).items():
            try:
                cloudpickle.dumps(value)
            except Exception as reason:
                problem = f"cannot be pickled for the processes of the trials: {message_of(reason)}"
                raise InvalidFieldError(f"trainer.{name}", value, problem) from error
        raise

"""The callback that ends an iteration of a trial after each evaluation of its trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.trainables.reporting import report

with try_import("transformers", extra="transformers") as _imports:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

#: A metric that the Trainer logs once: when it has trained, and has not loaded the best model yet.
_AT_END = "train_runtime"


class FluidTrainerCallback(TrainerCallback if _imports.available else object):  # type: ignore[misc]
    """Reports each evaluation of a trainer as an iteration of the trial whose function made the trainer.

    When Fluid saves the trial, the trainer writes a checkpoint of its own: the model, the optimizer, the schedule and
    the random numbers. ``trainer.train(resume_from_checkpoint=fluid.get_checkpoint())`` goes on from it. Outside a
    trial the callback does nothing.

    An evaluation is reported when the trainer is done with it, just before the next step or epoch. Evaluations before
    the first step and after the training are not reported.

    Args:
        trainer: the trainer, to which the callback is added.
        compute_objective: further metrics of an iteration, from those of the evaluation; ``None``, the default, for
            none.

    Raises:
        MissingDependencyError: transformers is not installed.

    Attributes:
        has_reported: whether an evaluation was reported.

    Example:
        >>> import fluid, torch
        >>> from fluid.integrations.transformers import FluidTrainerCallback
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> text = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8) % 16]
        >>> def train(config):
        ...     model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8))
        ...     args = TrainingArguments("out", learning_rate=config["lr"], num_train_epochs=3, eval_strategy="epoch",
        ...                              save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True)
        ...     trainer = Trainer(model, args, train_dataset=text, eval_dataset=text)
        ...     trainer.add_callback(FluidTrainerCallback(trainer))
        ...     trainer.train(resume_from_checkpoint=fluid.get_checkpoint())
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     trial = fluid.Trial(train, {"lr": 0.01}, budget=2)
        ...     handle = executor.submit_trialgroup(fluid.TrialGroup([trial]))
        ...     [result.metrics["epoch"] for result in handle.results()]
        [1.0, 2.0]
    """

    def __init__(
        self, trainer: Trainer, compute_objective: Callable[[dict[str, float]], Mapping[str, Any]] | None = None
    ) -> None:
        _imports.check()
        self.has_reported = False
        self._trainer = trainer
        self._compute_objective = compute_objective
        #: Of the evaluation that is not reported yet, on all its data sets.
        self._metrics: dict[str, float] = {}
        self._first_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._metrics = {}
        self._first_step = state.global_step

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        # The trainer still compares the metrics with its best ones, and may change the learning rate by them.
        if state.global_step > self._first_step:
            self._metrics |= metrics

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.report_evaluation()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.report_evaluation()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.report_evaluation()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **_: Any,
    ) -> None:
        if _AT_END in logs:
            self.report_evaluation()

    def report_evaluation(self) -> None:
        """Reports the evaluation that was made last, unless that has been done."""
        if not self._metrics:
            return
        metrics, self._metrics = self._metrics, {}
        further = {} if self._compute_objective is None else self._compute_objective(dict(metrics))
        trainer = self._trainer
        self.has_reported = True
        try:
            report({**metrics, "step": trainer.state.global_step, **further}, save=self._save)
        except BaseException:  # The trial has ended: as the Trainer does where Optuna prunes.
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise

    def _save(self, folder: Path) -> None:
        """Lets the trainer write a checkpoint, whose files go right into the folder."""
        with _saving_to(folder, self._trainer.args), _without_progress_bars():
            self._trainer._save_checkpoint(self._trainer.model_wrapped, None)
        inner = folder / f"{PREFIX_CHECKPOINT_DIR}-{self._trainer.state.global_step}"
        for file in inner.iterdir():
            file.rename(folder / file.name)
        inner.rmdir()


@contextlib.contextmanager
def _saving_to(folder: Path, args: TrainingArguments) -> Iterator[None]:
    """Sets what a whole checkpoint in this folder needs, whatever else the trainer is told to save."""
    wanted = {
        "output_dir": str(folder),
        "save_only_model": False,
        "push_to_hub": False,
        "save_total_limit": None,
        "save_strategy": type(args.save_strategy)("no"),  # Else the trainer may load its best model from there.
    }
    before = {name: getattr(args, name) for name in wanted}
    vars(args).update(wanted)
    try:
        yield
    finally:
        vars(args).update(before)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

"""A tiny language model on scikit-learn's digits: pixels of an image, row by row, are a text of 17 different tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fluid
from fluid.integrations.transformers import FluidTrainerCallback


class Digits(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Images as texts."""

    def __init__(self, first: int, last: int) -> None:
        self._images = torch.as_tensor(load_digits().data[first:last, 16:32]).long()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._images[index], "labels": self._images[index]}


def language_model(width: int = 16) -> GPT2LMHeadModel:
    """Makes a model with dropout, so that its losses depend on the state of the random number generators."""
    tokens = {"vocab_size": 17, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=1, n_head=1, n_positions=16, **tokens))


def usual_model() -> GPT2LMHeadModel:
    return language_model()


def model_of_trial(trial: dict[str, Any] | None) -> GPT2LMHeadModel:
    return language_model(16 if trial is None else trial["width"])


class Diary(TrainerCallback):
    """Writes down which trials came to the end of ``train()``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        with open(self._folder / Path(args.output_dir).name, "a", encoding="utf-8") as file:
            file.write(f"{state.global_step}\n")


class TrainerWithCard(Trainer):
    """Also writes a file beside its checkpoints, as trainers of TRL do."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        assert self.args.output_dir is not None
        Path(self.args.output_dir, "README.md").write_text("A model.")


def make_trainer(
    folder: Path, *, kind: type[Trainer] = Trainer, model_init: Any = usual_model, train: int = 48, **options: Any
) -> Trainer:
    """Makes a trainer that evaluates after each epoch of three steps, unless told otherwise."""
    other = {name: options.pop(name) for name in ("eval_dataset", "callbacks", "compute_metrics") if name in options}
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": 4.0,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 16,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    other.setdefault("eval_dataset", Digits(1000, 1016))
    return kind(model_init=model_init, args=TrainingArguments(**settings), train_dataset=Digits(0, train), **other)


def losses_alone(trainer: Trainer) -> list[float]:
    """Trains without Fluid; returns the losses of the evaluations."""
    trainer.train()
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def train_by_hand(config: dict[str, Any]) -> None:
    """A function that makes a trainer itself, as users write it."""
    trainer = config["make_trainer"]()
    trainer.add_callback(FluidTrainerCallback(trainer))
    trainer.train(resume_from_checkpoint=fluid.get_checkpoint())

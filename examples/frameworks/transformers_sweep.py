"""Tunes a small GPT-2 on text, character by character, with Hugging Face's Trainer; an epoch is an iteration.

    python examples/frameworks/transformers_sweep.py [--text FILE] [--samples 8] [--epochs 4] [--devices N]

The text is by default what scikit-learn says of its data sets. The model begins with random weights: nothing is
downloaded. Needs ``pip install '.[transformers,sklearn]'``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fluid
from fluid.integrations.transformers import hyperparameter_search
from fluid.search import loguniform

LENGTH = 64


def describe() -> str:
    """Returns a real text that every installation has."""
    loaders = (datasets.load_breast_cancer, datasets.load_wine, datasets.load_iris, datasets.load_digits)
    return "\n".join(load().DESCR for load in loaders)


def pieces_of(text: str) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Cuts a text in pieces of 64 characters; returns them as the Trainer takes them, and the number of characters."""
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    rows = torch.tensor([numbers[character] for character in text[: len(text) // LENGTH * LENGTH]]).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows], len(numbers)


def main() -> None:
    """Runs the sweep, and writes a text with its best model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text, such as that of WikiText-2")
    parser.add_argument("--samples", type=int, default=8, help="number of trials")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of a trial that is not pruned")
    parser.add_argument("--devices", type=int, help="how many devices to use; by default all")
    parser.add_argument("--algorithm", default="asha", help="as fluid.run has it")
    options = parser.parse_args()

    pieces, characters = pieces_of(options.text.read_text(encoding="utf-8") if options.text else describe())
    tenth = max(1, len(pieces) // 10)

    def model_init(trial: dict[str, Any] | None) -> GPT2LMHeadModel:
        layers = 1 if trial is None else trial["layers"]
        tokens = {"vocab_size": characters, "bos_token_id": None, "eos_token_id": None}
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=layers, n_head=2, n_positions=LENGTH, **tokens))

    args = TrainingArguments(
        "trainer",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model_init=model_init, args=args, train_dataset=pieces[tenth:], eval_dataset=pieces[:tenth])
    with fluid.FluidExecutor(devices=options.devices):
        best = hyperparameter_search(
            trainer,
            {"learning_rate": loguniform(1e-4, 1e-1), "weight_decay": loguniform(1e-4, 1e-1), "layers": [1, 2]},
            n_trials=options.samples,
            algorithm=options.algorithm,
        )
    model = GPT2LMHeadModel.from_pretrained(best.run_summary.best.checkpoint)
    print(f"best: {best.hyperparameters}")
    print(f"loss {best.objective:.3f} per character, {model.num_parameters()} parameters, from {best.run_id}")


if __name__ == "__main__":
    main()

"""Measures a search with a Hugging Face Trainer on Fluid against the Trainer's own backends, in one run.

    python benchmarks/transformers_search.py [--runs 3] [--peer fluid|ray|optuna] [--json FILE]

Sixteen learning rates of a small GPT-2 on scikit-learn's digits (pixels of an image are a text), four epochs each, an
evaluation after each epoch, on two CPU cores: ``hyperparameter_search(trainer, ...)`` of Fluid and
``trainer.hyperparameter_search`` with ``backend="ray"``, both with one core for a trial, and with
``backend="optuna"``, whose trials run one after another. Each measurement is a process of its own; its
imports and the making of the trainer are left out. Fluid also keeps the best trial's checkpoint, the others keep none.
All must find the same learning rate. Needs scikit-learn, transformers, Ray and Optuna.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import machine, run_apart

CORES = 2
RATES = [3e-4 * 1.4**number for number in range(16)]
EPOCHS = 4
#: Seconds after which a measurement is given up.
LIMIT_S = 600.0


def make_trainer(folder: str) -> Any:
    import torch
    from sklearn.datasets import load_digits
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    texts = torch.as_tensor(load_digits().data[:, 16:48]).long()
    data = [{"input_ids": text, "labels": text} for text in texts]

    def model_init() -> Any:
        tokens = {"vocab_size": 17, "bos_token_id": None, "eos_token_id": None}
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32, **tokens))

    args = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model_init=model_init, args=args, train_dataset=data[:1024], eval_dataset=data[1024:1280])


def search_on_fluid(trainer: Any) -> Any:
    from fluid import FluidExecutor
    from fluid.integrations.transformers import hyperparameter_search

    executor = FluidExecutor(backend="local", devices=CORES, keep="best:1", verbose=0)
    return hyperparameter_search(
        trainer, {"learning_rate": RATES}, n_trials=len(RATES), algorithm="grid", executor=executor
    )


def search_on_ray(trainer: Any) -> Any:
    import ray
    from ray import tune

    ray.init("local", num_cpus=CORES, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    return trainer.hyperparameter_search(
        lambda _: {"learning_rate": tune.grid_search(RATES)},
        n_trials=1,
        backend="ray",
        resources_per_trial={"cpu": 1, "gpu": 0},
        verbose=0,
    )


def search_on_optuna(trainer: Any) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", RATES)},
        n_trials=len(RATES),
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": RATES}),
        pruner=optuna.pruners.NopPruner(),
    )


PEERS = {"fluid": search_on_fluid, "ray": search_on_ray, "optuna": search_on_optuna}


def measure(name: str) -> dict[str, Any]:
    """Runs one search, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        begun = time.perf_counter()
        found = PEERS[name](trainer)
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "objective": found.objective, "rate": found.hyperparameters["learning_rate"]}


def main() -> None:
    """Measures all in turns, and prints ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", choices=tuple(PEERS), help="run this one search only, in this process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(measure(options.peer)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PEERS}
    for _, name in itertools.product(range(options.runs), PEERS):
        apart = run_apart(__file__, ["--peer", name], what=name, timeout=LIMIT_S)
        if apart is not None:
            found[name].append({**apart.figures, "process_seconds": apart.seconds})
    figures = {
        name: {field: statistics.median(each[field] for each in measured) for field in measured[0]}
        for name, measured in found.items()
        if measured
    }
    for name, each in figures.items():
        ratio = each["seconds"] / figures["fluid"]["seconds"]
        print(
            f"{name:8} {each['seconds']:7.2f} s {ratio:6.2f}x   best loss {each['objective']:.4f} at {each['rate']:g}"
        )
    rates = {each["rate"] for measured in found.values() for each in measured}
    print("all found the same learning rate" if len(rates) == 1 else f"they found different learning rates: {rates}")
    if options.json:
        from importlib import metadata

        versions = {name: metadata.version(name) for name in ("transformers", "optuna")}
        about = {"date": time.strftime("%Y-%m-%d"), **machine(), **versions}
        text = json.dumps({"machine": about, "medians": figures, "runs": found}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()

# needs: torch pandas
"""What the fragments of docs/first_sweep.md take from the script before them: a model of one weight."""

import torch

import fluid


def train(config, state):
    weight = torch.ones(1) if state is None else state[0]
    for _ in range(2):
        weight = weight * config["lr"]
        yield {"accuracy": float(weight)}, (weight, None)


result = fluid.run(train, {"lr": [0.1, 0.2]}, metric="accuracy", mode="max", algorithm="grid", budget=2)

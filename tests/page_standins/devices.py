# needs: torch safetensors
"""What the fragments of docs/devices.md leave to the reader: a fused trainable, and a model to adapt."""

import torch
from torch import nn

from fluid.fused import SGD, TensorData


def pretrained():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Net:
    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def optimizer(self, config):
        return SGD(lr=config["lr"])

    def data(self, config, seed):
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        return TensorData([x, (x[:, 0] > 0).long()], batch_size=20, seed=seed)

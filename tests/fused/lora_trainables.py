"""Trainables of the tests of fused LoRA: a small transformer, made here."""

from __future__ import annotations

from typing import Any

import torch
from fused.trainables import OPTIMIZERS
from torch import nn

from fluid.fused import LoraSpec, LoraTrainable, TensorData
from fluid.fused.optimizers import OptimizerSpec


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).unflatten(-1, (2, -1)).mT for part in (self.q_proj, self.k_proj, self.v_proj))
        weights = (query.mT @ key / key.shape[-1] ** 0.5).softmax(-1)
        return self.o_proj((weights @ value.mT).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Classifies sequences of tokens; a buffer is what its loss is scaled with."""

    def __init__(self, width: int = 8, tokens: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.classifier = nn.Linear(width, 3)
        self.register_buffer("factor", torch.tensor(1.0, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(self.embed(tokens)).mean(1)) * self.factor


class Adapted(LoraTrainable):
    """Adapters of :class:`Transformer` in float64; ``lora`` in its config has further values of the spec."""

    made = 0

    def base(self, config: dict[str, Any]) -> nn.Module:
        Adapted.made += 1
        return Transformer().double()

    def lora(self, config: dict[str, Any]) -> LoraSpec:
        rank = config.get("rank", 4)
        given = {"rank": rank, "alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"], **config.get("lora", {})}
        return LoraSpec(**given)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return nn.functional.cross_entropy(model(tokens), labels)

    def optimizer(self, config: dict[str, Any]) -> OptimizerSpec:
        return OPTIMIZERS[config.get("kind", "adamw")](**config.get("optimizer", {"lr": 0.01}))

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        tokens = torch.randint(11, (24, 5), generator=torch.Generator().manual_seed(0))
        labels = (tokens.sum(1) % 3).long()
        return TensorData([tokens, labels], [tokens, labels], batch_size=6, seed=seed)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        tokens, labels = batch
        return {"accuracy": (model(tokens).argmax(-1) == labels).double().mean()}


def matrices(trial: LoraTrainable) -> dict[str, torch.Tensor]:
    """The tensors in a trial's state dict, as copies."""
    state = trial.model.state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}

"""Fused trials: several trials of one shape trained as one batched model, in one process.

Users write a :class:`FusedTrainable`, which runs alone like any trainable. A :class:`FusedPack` trains several of them
together. Names are loaded on first use, as they need PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fluid._imports import try_import

if TYPE_CHECKING:
    from fluid.fused.check import why_not_fused
    from fluid.fused.data import Data, TensorData
    from fluid.fused.dropout import Dropout
    from fluid.fused.key import FusionKey, fusion_key
    from fluid.fused.lora import LoraSpec, LoraTrainable
    from fluid.fused.lora_files import load_adapter, save_adapter
    from fluid.fused.obstacles import FusionError
    from fluid.fused.optimizers import SGD, Adam, AdamW, OptimizerSpec
    from fluid.fused.pack import FusedPack
    from fluid.fused.trainable import FusedTrainable

_HOME = {
    "SGD": "fluid.fused.optimizers",
    "Adam": "fluid.fused.optimizers",
    "AdamW": "fluid.fused.optimizers",
    "Data": "fluid.fused.data",
    "Dropout": "fluid.fused.dropout",
    "FusedPack": "fluid.fused.pack",
    "FusedTrainable": "fluid.fused.trainable",
    "FusionError": "fluid.fused.obstacles",
    "FusionKey": "fluid.fused.key",
    "LoraSpec": "fluid.fused.lora",
    "LoraTrainable": "fluid.fused.lora",
    "OptimizerSpec": "fluid.fused.optimizers",
    "TensorData": "fluid.fused.data",
    "fusion_key": "fluid.fused.key",
    "load_adapter": "fluid.fused.lora_files",
    "save_adapter": "fluid.fused.lora_files",
    "why_not_fused": "fluid.fused.check",
}

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Data",
    "Dropout",
    "FusedPack",
    "FusedTrainable",
    "FusionError",
    "FusionKey",
    "LoraSpec",
    "LoraTrainable",
    "OptimizerSpec",
    "TensorData",
    "fusion_key",
    "load_adapter",
    "save_adapter",
    "why_not_fused",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fluid.fused' has no attribute {name!r}")
    with try_import("PyTorch", extra="elastic") as imports:
        home = importlib.import_module(_HOME[name])
    imports.check()
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__

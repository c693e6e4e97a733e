"""What keeps a trial from being fused and can be seen without training it."""

from __future__ import annotations

import torch

from fluid.elastic.trainable import ElasticTrainable
from fluid.fused.data import TensorData
from fluid.fused.refusal import FusionError
from fluid.fused.trainable import FusedTrainable

#: Methods that Fluid's loop consists of. A pack does what they do for all rows at once, so it cannot call others.
_LOOP = (
    *("setup", "step", "train_iteration", "train_batch", "end_iteration", "extra_state", "load_extra_state"),
    *("elastic_state", "load_elastic_state", "save_checkpoint", "load_checkpoint"),
)


def require_fusible(trial: FusedTrainable) -> None:
    """Refuses a trial that cannot be fused with any other.

    Raises:
        FusionError: says why.
    """
    cls = type(trial)
    for name in _LOOP:
        ours = FusedTrainable if name in vars(FusedTrainable) else ElasticTrainable
        if getattr(cls, name) is not getattr(ours, name):
            raise FusionError(f"{cls.__name__} defines {name}(), which belongs to the loop that fused trials share")
    if cls.batch_state:
        raise FusionError(f"{cls.__name__}.batch_state: state per sample cannot be fused")
    if trial.size > 1:
        raise FusionError(f"the trial trains on {trial.size} devices")
    for name, module in trial.model.named_modules():
        if _draws(module):
            shown = f"{name or 'the model'} ({type(module).__name__})"
            raise FusionError(f"{shown} draws random numbers: only fluid.fused.Dropout can be fused")
    state = trial._fused
    data = state.data
    if isinstance(data, TensorData) and data.is_ragged and state.iteration_batches % len(data):
        raise FusionError(
            "iteration_batches is no whole number of epochs, and the last batch of an epoch is smaller than the "
            "others, so rows would differ: set drop_last=True in TensorData"
        )


def _draws(module: torch.nn.Module) -> bool:
    """Whether a module of PyTorch's own draws random numbers in training."""
    nn = torch.nn
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return bool(module.dropout > 0)
    return isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))

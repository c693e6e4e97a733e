"""What keeps a trial from being fused and can be seen without training it."""

from __future__ import annotations

import torch

from fluid.elastic.trainable import ElasticTrainable
from fluid.errors import FluidError
from fluid.fused.data import TensorData
from fluid.fused.trainable import FusedTrainable

# -- refusal -------------------------------------------------------------------------------------
#
# The error that says why trials are not fused.


class FusionError(FluidError):
    """Trials cannot be trained in one pack; the message says why, in one line. They can still train alone.

    Example:
        >>> import torch
        >>> from fluid.fused import SGD, FusedPack, FusedTrainable, FusionError, TensorData
        >>> class Net(FusedTrainable):
        ...     def build(self, config):
        ...         return torch.nn.Linear(config["width"], 1)
        ...     def loss(self, model, batch):
        ...         return model(batch[0]).square().mean()
        ...     def optimizer(self, config):
        ...         return SGD(lr=0.1)
        ...     def data(self, config, seed):
        ...         return TensorData([torch.ones(4, config["width"])], batch_size=2, seed=seed)
        >>> try:
        ...     FusedPack.of(Net, [{"width": 2}, {"width": 3}])
        ... except FusionError as error:
        ...     print(error)
        the trials differ in their modules: the model ...Linear(in_features=2...; the model ...Linear(in_features=3...
    """


def one_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- obstacles -----------------------------------------------------------------------------------


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

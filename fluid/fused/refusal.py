"""The error that says why trials are not fused."""

from __future__ import annotations

from fluid.errors import FluidError


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

"""Batch normalization over the whole global batch, for every process group.

PyTorch's own SyncBatchNorm works on GPUs and in a default process group only, and assumes parts of equal size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fluid.elastic.group import Group


class WeightedGroup(Protocol):
    """A process group, and the weight of this process's part of the batch."""

    @property
    def group(self) -> Group:
        """The processes that share the batch."""
        ...

    @property
    def weight(self) -> float:
        """The weight of this rank's mean in the mean over the batch."""
        ...


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    """The sum of a tensor over the ranks.

    The loss is the weighted mean of the ranks' losses, and each rank's gradients are multiplied by its weight later. So
    the other ranks' gradients with respect to this rank's summand are divided by that weight here.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, members: WeightedGroup) -> torch.Tensor:
        ctx.members = members
        total = tensor.clone().contiguous()
        members.group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = ctx.members.weight
        total = (gradient * weight).contiguous()
        ctx.members.group.all_reduce(total)
        return (total / weight if weight else torch.zeros_like(total)), None


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Batch normalization of any dimension over the global batch; at size 1 it is PyTorch's own.

    Every device must run it equally often, and run ``backward`` through it. Made by :meth:`convert`, which
    :meth:`ElasticTrainable.sync_batch_norm` calls.

    Example:
        >>> import torch
        >>> from fluid.elastic import SyncBatchNorm
        >>> from fluid.elastic.runtime import Runtime  # Here of one process.
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> model = SyncBatchNorm.convert(model, Runtime())
        >>> type(model[1]).__name__
        'SyncBatchNorm'
        >>> model(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    def __init__(self, members: WeightedGroup, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._members = members

    @classmethod
    def convert(cls, module: torch.nn.Module, members: WeightedGroup) -> torch.nn.Module:
        """Replaces a module's batch normalization layers in place, with the same parameters and buffers; returns it."""
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            layer = cls(
                members,
                module.num_features,
                eps=module.eps,
                momentum=module.momentum,
                affine=module.affine,
                track_running_stats=module.track_running_stats,
            )
            layer._parameters, layer._buffers = module._parameters, module._buffers
            layer.training = module.training
            return layer
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child, members))
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes ``(batch, channels, ...)`` by its channels' means and variances over the global batch."""
        if self._members.group.size == 1 or not (self.training or self.running_mean is None):
            return super().forward(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        # A rank without samples of its own works on another's, which must not count twice.
        counted = 1.0 if self._members.weight else 0.0
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        number = exact.new_full((1,), counted * x.numel() / x.shape[1])
        sums = _Sum.apply(torch.cat([exact.sum(axes) * counted, number]), self._members)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = exact - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(axes) * counted, self._members) / total
        self._track(mean.detach(), variance.detach(), total)
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(x.dtype)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, batch and channels, and got {x.dim()}")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        if self.running_mean is None or not self.training:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            # As in PyTorch: the biased variance normalizes, and the running variance is the unbiased one.
            unbiased = variance * (total / (total - 1.0).clamp(min=1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

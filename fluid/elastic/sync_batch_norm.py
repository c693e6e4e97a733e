"""Batch normalization over the whole global batch, for every process group.

PyTorch's own SyncBatchNorm works on GPUs and in a default process group only, and assumes parts of equal size. On GPUs
its kernels are used here, too: they read activations in the precision that these have, once for each of the statistics,
the output, the sums of the backward pass and its result.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from fluid.elastic.groups.group import Group


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


class _Statistics(NamedTuple):
    """Of each channel over the global batch: mean and biased variance; and the number of values."""

    mean: torch.Tensor
    variance: torch.Tensor
    total: torch.Tensor


@torch.no_grad()  # type: ignore[untyped-decorator]
def _statistics(x: torch.Tensor, members: WeightedGroup, eps: float) -> _Statistics:
    """Computes the statistics with one exchange, from the ranks' own means and variances."""
    channels, precision = x.shape[1], _precision(x)
    # By rank: count, means and variances. A rank's zeros leave the others' values as they are.
    table = x.new_zeros(members.group.size, 1 + 2 * channels, dtype=precision)
    if members.weight:  # A rank without samples of its own works on another's, which must not count twice.
        mean, variance = _own_statistics(x, eps)
        count = mean.new_full((1,), x.numel() / channels)
        torch.cat([count, mean, variance], out=table[members.group.rank])
    members.group.all_reduce(table)
    counts, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return _Statistics(mean, variance, total)


def _own_statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    if _has_kernels(x):
        mean, factor = torch.batch_norm_stats(x, eps)
        return mean, (factor.pow(-2) - eps).clamp_(min=0.0)
    exact = _exact(x)
    mean = exact.mean(_axes(x))  # Not by torch.var_mean, which is 20 times slower on CPUs.
    return mean, (exact - mean.view(_shape(x))).square_().mean(_axes(x))


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    """Normalizes by statistics of the global batch, which depend on this rank's values, too.

    The loss is the weighted mean of the ranks' losses, and each rank's gradients are multiplied by its weight later. So
    the other ranks' gradients with respect to this rank's values are divided by that weight here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        shift: torch.Tensor | None,
        statistics: _Statistics,
        layer: SyncBatchNorm,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale, *statistics)
        ctx.layer = layer
        if _has_kernels(x):
            factor = torch.rsqrt(statistics.variance + layer.eps)
            affine = (None if parameter is None else parameter.to(factor.dtype) for parameter in (scale, shift))
            output: torch.Tensor = torch.batch_norm_elemt(x, *affine, statistics.mean, factor, layer.eps)
            return output
        return _normal(x, statistics, layer.eps, scale, shift).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, *rest = ctx.saved_tensors
        statistics, members = _Statistics(*rest), ctx.layer._members
        if _has_kernels(x):
            return _backward_by_kernels(_dense(gradient), x, scale, statistics, ctx.layer)
        gradient, normal = _exact(gradient), _normal(x, statistics, ctx.layer.eps)
        own = torch.stack([gradient.sum(_axes(x)), (gradient * normal).sum(_axes(x))])
        of_shift, of_scale = own
        weight = members.weight
        sums = own * weight if weight else torch.zeros_like(own)
        members.group.all_reduce(sums)
        if weight:
            first, second = (sums / (statistics.total * weight)).view(2, *_shape(x))
            of_x = torch.sub(gradient, normal.mul_(second).add_(first), out=normal)
        else:
            of_x = gradient.clone()
        factor = torch.rsqrt(statistics.variance + ctx.layer.eps)
        if scale is not None:
            factor = factor * scale
        of_x = of_x.mul_(factor.view(_shape(x))).to(x.dtype)
        if scale is None:
            return of_x, None, None, None, None
        return of_x, of_scale.to(scale.dtype), of_shift.to(scale.dtype), None, None


def _backward_by_kernels(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, statistics: _Statistics, layer: SyncBatchNorm
) -> tuple[torch.Tensor | None, ...]:
    members, mean, factor = layer._members, statistics.mean, torch.rsqrt(statistics.variance + layer.eps)
    exact = None if scale is None else scale.to(mean.dtype)
    needs = scale is not None
    *own, of_scale, of_shift = torch.batch_norm_backward_reduce(gradient, x, mean, factor, exact, True, needs, needs)
    weight = members.weight
    # Of the gradients, and of their products with the deviations from the mean.
    sums = torch.stack(own).mul_(weight) if weight else torch.zeros_like(torch.stack(own))
    members.group.all_reduce(sums)
    first, second = sums.div_(weight) if weight else sums.zero_()
    count = statistics.total.to(torch.int32).view(1)
    of_x = torch.batch_norm_backward_elemt(gradient, x, mean, factor, exact, first, second, count)
    if scale is None:
        return of_x, None, None, None, None
    return of_x, of_scale.to(scale.dtype), of_shift.to(scale.dtype), None, None


def _has_kernels(x: torch.Tensor) -> bool:
    """Whether PyTorch has kernels for the parts of a synchronized normalization of such a tensor."""
    return bool(x.is_cuda)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in one of the layouts for which the kernels are made."""
    is_last = any(x.is_contiguous(memory_format=each) for each in (torch.channels_last, torch.channels_last_3d))
    return x if is_last else x.contiguous()


def _normal(x: torch.Tensor, statistics: _Statistics, eps: float, *affine: torch.Tensor | None) -> torch.Tensor:
    exact = _exact(x)
    parameters = [None if parameter is None else parameter.to(exact.dtype) for parameter in affine]
    return torch.nn.functional.batch_norm(exact, statistics.mean, statistics.variance, *parameters, eps=eps)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.to(_precision(x))


def _precision(x: torch.Tensor) -> torch.dtype:
    """Returns at least single precision."""
    return torch.promote_types(x.dtype, torch.float32)


def _shape(x: torch.Tensor) -> list[int]:
    """The shape in which a number per channel is applied to ``(batch, channels, ...)``."""
    return [1, -1] + [1] * (x.dim() - 2)


def _axes(x: torch.Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


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
        if _has_kernels(x):
            x = _dense(x)
        statistics = _statistics(x, self._members, self.eps)
        self._track(*statistics)
        normal: torch.Tensor = _Normalize.apply(x, self.weight, self.bias, statistics, self)
        return normal

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, batch and channels, and got {x.dim()}")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        if self.running_mean is None or not self.training:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:  # Computed on the device: the host would wait to read the number.
                momentum = self.num_batches_tracked.double().reciprocal().to(self.running_mean.dtype)
            # As in PyTorch: the biased variance normalizes, and the running variance is the unbiased one.
            unbiased = variance * (total / (total - 1.0).clamp(min=1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

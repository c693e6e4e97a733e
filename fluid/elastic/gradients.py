"""Averages gradients over the ranks, in buckets as DistributedDataParallel does, if possible in the backward pass.

A bucket may be summed as soon as its last gradient is there, while the backward pass computes the next ones. All ranks
must start the same operations in the same order, and no gradient may change after it was sent. So an averager first
watches some steps: between the first gradient and :meth:`GradientAverager.average`, each parameter must get its
gradient once, none may change, and nothing else may be exchanged. If that holds on all ranks, buckets are sent early
from then on. If it fails later, the generation breaks, and the iteration is repeated without early sending: at once if
the host sees it, and at the iteration's end if only values show it, see :mod:`fluid.elastic.gradients`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fluid.elastic.groups.generation import GenerationBrokenError
from fluid.elastic.groups.group import Group
from fluid.errors import FluidError

# -- overlap -------------------------------------------------------------------------------------
#
# Whether gradients that were sent during the backward pass have changed since, found without a wait in each step.
#
# A GPU runs behind the host. A host that reads a value in a step waits for the step's backward pass, and cannot queue
# the next step meanwhile. So comparisons are made and collected on the device. The host reads them once per iteration,
# before the iteration counts.


SENT_TOO_EARLY = "gradients were sent before they were final; the iteration is repeated"


class Changes:
    """Whether one of several comparisons has found a change; kept on the devices that compare."""

    def __init__(self) -> None:
        self._found: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def note(self, changed: torch.Tensor) -> None:
        """Adds a comparison's result: a boolean without dimensions, which this object may write to."""
        found = self._found.setdefault(changed.device, changed)
        if found is not changed:
            found.logical_or_(changed)

    def read(self) -> bool:
        """Returns whether there was a change; waits for the devices."""
        return any(found.item() for found in self._found.values())


class Overlap:
    """What a rank knows, in one generation, of the gradients that are sent during the backward pass.

    Args:
        is_allowed: whether this rank agrees to it.

    Attributes:
        is_used: whether gradients have been sent in this way; the same on all ranks at the end of an iteration.
        failed: whether some are known to have been sent before they were final.
        changes: of values, after they were sent.
    """

    def __init__(self, is_allowed: bool = True) -> None:
        self.is_allowed = is_allowed
        self.is_used = False
        self.failed = False
        self.changes = Changes()

    def has_failed(self) -> bool:
        """Returns whether this rank's gradients were sent before they were final; waits for the devices."""
        self.failed = self.failed or self.changes.read()
        return self.failed

    def confirm(self, group: Group) -> None:
        """Returns if no gradient was sent too early; all ranks call this before an iteration's result counts.

        Raises:
            GenerationBrokenError: some rank's gradients were, or a member failed.
        """
        if not self.is_used:
            return
        failures = torch.tensor([float(self.has_failed())])
        group.all_reduce(failures)
        if failures.item():
            self.failed = True
            raise GenerationBrokenError(SENT_TOO_EARLY)


# -- gradients -----------------------------------------------------------------------------------


#: Bytes of gradients that are summed together, and of the first bucket, which is small so that it is sent soon.
_BUCKET, _FIRST_BUCKET = 25 * 2**20, 2**20
#: Steps that an averager watches before its rank votes for early sending.
_WATCHED_STEPS = 2


class GradientBucket:
    """Gradients of one type on one device, in one flat buffer with a flag per parameter: whether it has a gradient."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        #: Parameters without a gradient in this step so far; counted down by the averager.
        self.missing = len(parameters)
        first = parameters[0]
        total = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.empty(total + len(parameters), dtype=first.dtype, device=first.device)
        self._values, self._flags = self.flat[:total], self.flat[total:]
        parts = self._values.split([parameter.numel() for parameter in parameters])
        self._views = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
        self._is_complete = False
        #: The norm of each gradient when all were there.
        self._norms: torch.Tensor | None = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def remember(self) -> None:
        """Notes the norms of the gradients, all of which are there.

        Versions do not tell of every change: one of ``gradient.data``, or by a ``GradScaler``, leaves them as they are.
        """
        self._norms = self._current_norms()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def has_changed(self) -> torch.Tensor:
        """Returns whether a gradient has another norm than was noted: a boolean without dimensions, on their device."""
        return torch.ne(self._current_norms(), self._norms).any()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def pack(self, weight: float) -> torch.Tensor:
        """Copies the weighted gradients into the buffer; returns it.

        Raises:
            FluidError: a gradient is sparse.
        """
        present = [parameter.grad is not None for parameter in self.parameters]
        self._is_complete = all(present)
        if any(gradient.layout != torch.strided for gradient in self._gradients()):
            raise FluidError("averaging sparse gradients is not supported: make the embedding with sparse=False")
        if weight == 0.0 or not self._is_complete:
            self._values.zero_()
        if weight != 0.0:  # Else not multiplied by zero: a gradient from another rank's samples may not be finite.
            views = [view for view, is_there in zip(self._views, present, strict=True) if is_there]
            if views:
                torch._foreach_copy_(views, list(self._gradients()))
            self._values.mul_(weight)
        self._flags.fill_(1.0)  # A copy from the host would wait for the backward pass.
        if not self._is_complete:
            torch._foreach_zero_([flag for flag, is_there in zip(self._flags, present, strict=True) if not is_there])
        return self.flat

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def unpack(self) -> None:
        """Copies the sums into the gradients, except of parameters that have a gradient on no rank."""
        means = self._views
        if not self._is_complete:  # Reading values from a GPU makes the host wait.
            means = []
            for parameter, mean, ranks in zip(self.parameters, self._views, self._flags.tolist(), strict=True):
                if ranks:
                    means.append(mean)
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
        if means:
            torch._foreach_copy_(list(self._gradients()), means)

    def _current_norms(self) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(list(self._gradients()))).nan_to_num()

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (parameter.grad.detach() for parameter in self.parameters if parameter.grad is not None)


class GradientAverager:
    """Averages the gradients of some parameters in one generation.

    Args:
        group: all its members make the same averagers, in the same order.
        parameters: in the same order on every rank, none twice.
        weight: returns the weight of this rank's gradients; the ranks' weights sum to 1.
        overlap: of this rank's averagers in this generation; by default one of its own.
    """

    def __init__(
        self,
        group: Group,
        parameters: Iterable[torch.Tensor],
        weight: Callable[[], float],
        overlap: Overlap | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        #: Whether buckets are sent during the backward pass.
        self.overlaps = False
        self._group = group
        self._weight = weight
        self._buckets = list(_buckets(self.parameters))
        self._hooks: list[Any] = []
        self._overlap = Overlap() if overlap is None else overlap
        self._is_simple = self._overlap.is_allowed
        self._watched = -1  # Without the step that made this averager.
        #: Of gradients in the steps that are watched.
        self._watched_changes = Changes()
        #: The gradients of this step that are there, with their versions, by parameter.
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        #: The sums of this step that were started.
        self._started: list[Callable[[], None]] = []
        self._started_weight = 0.0
        if self._buckets and all(group.can_overlap(bucket.flat) for bucket in self._buckets):
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    hook = partial(self._arrived, bucket)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        _warn_of_cpu(self._buckets)

    def average(self) -> None:
        """Replaces the gradients by their means over the ranks; all ranks call this.

        A missing gradient counts as zero. A parameter that has no gradient on any rank keeps none, as in a single
        process.

        Raises:
            FluidError: a gradient is sparse.
            GenerationBrokenError: a member failed, or the host sees that buckets were sent too early.
        """
        weight = self._weight()
        if self._group.on_operation not in (None, self._disturb):
            self._group.on_operation()
        if self._started and weight != self._started_weight:
            self._disturb()
        watches = bool(self._hooks) and not self.overlaps
        if watches and self._is_simple:
            self._check_final(self._buckets, self._watched_changes)
        else:
            self._check_final(self._buckets[: len(self._started)], self._overlap.changes)
        for bucket in self._buckets[len(self._started) :]:
            self._started.append(self._group.start_all_reduce(bucket.pack(weight)))
        for bucket, finish in zip(self._buckets, self._started, strict=True):
            finish()
            bucket.unpack()
        self._end_step()
        if watches:
            self._count_step()

    def is_for(self, parameters: list[torch.Tensor]) -> bool:
        """Whether it averages these parameters' gradients.

        Raises:
            GenerationBrokenError: it does not, and has sent some already.
        """
        same = len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))
        if not same and self._started:
            self._disturb()
        return same

    def close(self) -> None:
        """Stops watching the parameters, and sends no bucket early any more."""
        self._end_step()
        self.overlaps = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _arrived(self, bucket: GradientBucket, parameter: torch.Tensor) -> None:
        """Called in the backward pass once a parameter has its gradient."""
        group = self._group
        if group.on_operation is None:
            group.on_operation = self._disturb
        elif group.on_operation != self._disturb:  # Between another averager's first gradient and its step.
            group.on_operation()
            self._disturb()
        if id(parameter) in self._seen:
            self._disturb()
        if parameter.grad is None:
            return
        self._seen[id(parameter)] = (parameter.grad, parameter.grad._version)
        bucket.missing -= 1
        if not bucket.missing:
            bucket.remember()
        while self.overlaps and len(self._started) < len(self._buckets):
            following = self._buckets[len(self._started)]
            if following.missing:
                return
            self._started_weight = self._weight()
            self._started.append(group.start_all_reduce(following.pack(self._started_weight)))

    def _disturb(self) -> None:
        """Called if buckets cannot be sent early in this step."""
        self._is_simple = False
        if self.overlaps:
            self._overlap.failed = True
            raise GenerationBrokenError(SENT_TOO_EARLY)

    def _check_final(self, buckets: list[GradientBucket], changes: Changes) -> None:
        """Checks that all gradients of some buckets are there, and are as they were in the backward pass.

        Whether their values have changed is noted, to be read later.
        """
        for bucket in buckets:
            for parameter in bucket.parameters:
                gradient, version = self._seen.get(id(parameter), (None, 0))
                if gradient is None or parameter.grad is not gradient or gradient._version != version:
                    self._disturb()
                    return
            changes.note(bucket.has_changed())

    def _count_step(self) -> None:
        """Counts a step that was watched; after the last one all ranks agree on whether to overlap."""
        self._watched += 1
        if self._watched == 0:
            self._is_simple = self._overlap.is_allowed  # The hooks were made after this step's backward pass.
        if self._watched < _WATCHED_STEPS:
            return
        votes = torch.tensor([float(self._is_simple and not self._watched_changes.read())])
        self._group.all_reduce(votes)
        self.overlaps = votes.item() == self._group.size
        if self.overlaps:
            self._overlap.is_used = True
        else:
            self.close()

    def _end_step(self) -> None:
        if self._group.on_operation == self._disturb:
            self._group.on_operation = None
        self._seen.clear()
        self._started.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


def _buckets(parameters: list[torch.Tensor]) -> Iterator[GradientBucket]:
    """Yields buckets in about the order in which a backward pass computes gradients: the last parameter's first."""
    kinds: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for parameter in reversed(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    limit = _FIRST_BUCKET
    for alike in kinds.values():
        bucket: list[torch.Tensor] = []
        held = 0
        for parameter in alike:
            bucket.append(parameter)
            held += parameter.numel() * parameter.element_size()
            if held >= limit:
                yield GradientBucket(bucket)
                bucket, held, limit = [], 0, _BUCKET
        if bucket:
            yield GradientBucket(bucket)


def _warn_of_cpu(buckets: list[GradientBucket]) -> None:
    if torch.cuda.is_available() and any(bucket.flat.device.type == "cpu" for bucket in buckets):
        warnings.warn(
            "a model is trained on the CPU although there is a GPU: in build(), move it with .to(self.device)",
            stacklevel=2,
        )

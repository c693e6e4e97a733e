"""Makes process groups by the name of their backend."""

from __future__ import annotations

from typing import Any

from fluid.elastic.groups.group import Group
from fluid.errors import require_one_of

BACKENDS = ("torch", "gloo", "nccl", "horovod")


def make_group(backend: str, device: Any) -> Group:
    """Makes a process's group.

    Args:
        backend: ``"gloo"`` or ``"nccl"`` of torch.distributed; ``"torch"`` takes NCCL where every member has a GPU
            of its own, else memory that members share where all are on one machine, else gloo; ``"horovod"``.
        device: the device that this process trains on.

    Raises:
        InvalidFieldError: the backend is unknown.
        MissingDependencyError: Horovod is not installed; the message names the command that builds it.
    """
    require_one_of("backend", backend, BACKENDS)
    if backend == "horovod":
        from fluid.elastic.groups.horovod_group import HorovodGroup

        return HorovodGroup()
    from fluid.elastic.groups.torch_group import TorchGroup

    return TorchGroup(device, "auto" if backend == "torch" else backend)

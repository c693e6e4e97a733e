"""Elastic data-parallel training: the number of devices of a trial changes between two iterations.

Users write an :class:`ElasticTrainable`. In each process an :class:`ElasticMember` drives it; the driver coordinates
the members with an :class:`ElasticController`, which needs neither PyTorch nor a device. :class:`ElasticRun` combines
the three on one machine, without an executor.

Names are loaded on first use, so that the controller's side does not load PyTorch; nothing here imports Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fluid._imports import try_import

if TYPE_CHECKING:
    from fluid.elastic.groups.generation import GenerationBrokenError
    from fluid.elastic.groups.group import Group
    from fluid.elastic.loader import ElasticLoader
    from fluid.elastic.members.controller import ElasticController
    from fluid.elastic.members.member import ElasticMember
    from fluid.elastic.run import ElasticRun
    from fluid.elastic.sync_batch_norm import SyncBatchNorm
    from fluid.elastic.trainable import ElasticTrainable
    from fluid.elastic.tune import as_tune_trainable

_HOME = {
    "ElasticController": "fluid.elastic.members.controller",
    "ElasticLoader": "fluid.elastic.loader",
    "ElasticMember": "fluid.elastic.members.member",
    "ElasticRun": "fluid.elastic.run",
    "ElasticTrainable": "fluid.elastic.trainable",
    "GenerationBrokenError": "fluid.elastic.groups.generation",
    "Group": "fluid.elastic.groups.group",
    "SyncBatchNorm": "fluid.elastic.sync_batch_norm",
    "as_tune_trainable": "fluid.elastic.tune",
}

__all__ = [
    "ElasticController",
    "ElasticLoader",
    "ElasticMember",
    "ElasticRun",
    "ElasticTrainable",
    "GenerationBrokenError",
    "Group",
    "SyncBatchNorm",
    "as_tune_trainable",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fluid.elastic' has no attribute {name!r}")
    with try_import("PyTorch", extra="elastic") as imports:
        home = importlib.import_module(_HOME[name])
    imports.check()
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__

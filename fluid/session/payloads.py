"""How a session pickles trials."""

from __future__ import annotations

from fluid.backends.base import Backend
from fluid.backends.virtual import ReplayingBackend
from fluid.shared_data.parameters import dump_with_parameters
from fluid.trainables.payload import PayloadCache


def payload_cache(backend: Backend) -> PayloadCache:
    """Returns what pickles the trials of a session that has this backend."""
    require = backend.require_replayable if isinstance(backend, ReplayingBackend) else None
    return PayloadCache(require, dumps=dump_with_parameters)

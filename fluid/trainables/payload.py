"""Pickled trials, as they are sent to a lane and written to the run folder.

A trial is pickled once, in the submitter's thread, so that one that cannot be pickled is refused before it reaches
the engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluid.trainables.import_scan import imports_of
from fluid.trainables.pickling import dump_config, dump_trainable
from fluid.trainables.trainable import elastic_class_of, is_elastic, kind_of

#: Most trainables in the cache. A search submits one trainable many times; a loop may make one for each trial.
_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainablePayload:
    """A trainable, pickled.

    Attributes:
        pickled: the trainable, by cloudpickle.
        imports: modules that it imports, for lanes to load ahead of its first trial.
        elastic: whether its trials can span several devices.
    """

    pickled: bytes
    imports: tuple[str, ...] = ()
    elastic: bool = False


@dataclass(frozen=True, slots=True)
class TrialPayload:
    """A trial's trainable and config, pickled."""

    trainable: TrainablePayload
    config: bytes


def payload_of(trainable: Any, config: Mapping[str, Any]) -> TrialPayload:
    """Pickles a trial.

    Raises:
        InvalidFieldError: the trainable or the config cannot be used or pickled.
        MissingDependencyError: the trainable needs a package that is not installed.
    """
    return TrialPayload(_trainable_payload(trainable), dump_config(config))


class PayloadCache:
    """Pickles trials, and each of the latest trainables only once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By id(); keeping the trainable with its payload keeps its id from being reused.
        self._known: OrderedDict[int, tuple[Any, TrainablePayload]] = OrderedDict()

    def payload_of(self, trainable: Any, config: Mapping[str, Any]) -> TrialPayload:
        """Pickles a trial: see :func:`payload_of`."""
        with self._lock:
            known = self._known.get(id(trainable))
        made = _trainable_payload(trainable) if known is None else known[1]
        payload = TrialPayload(made, dump_config(config))
        with self._lock:
            self._known[id(trainable)] = (trainable, made)
            self._known.move_to_end(id(trainable))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return payload


def _trainable_payload(trainable: Any) -> TrainablePayload:
    sent = elastic_class_of(trainable) or trainable
    kind_of(sent)
    pickled = dump_trainable(sent)
    return TrainablePayload(pickled=pickled, imports=tuple(imports_of(sent)), elastic=is_elastic(sent))

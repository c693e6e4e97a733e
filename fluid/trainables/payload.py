"""Trials pickled, as they travel to a lane and into the run folder.

A trial is pickled once, in the thread of the submitter, so that one that cannot be pickled is refused before the
engine hears of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluid.trainables.pickling import dump_config, dump_trainable, imports_of
from fluid.trainables.trainable import is_elastic, kind_of

#: Trainables whose pickles are kept. A search submits one trainable over and over; a loop may make one per trial.
_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainablePayload:
    """A trainable, pickled.

    Attributes:
        pickled: the trainable, by cloudpickle.
        imports: modules that it imports, for lanes to load before they are asked for.
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
    """Pickles trials, and each of the latest trainables only once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By identity; the trainable is kept with its payload, so that its identity stays its own.
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
    sent = getattr(trainable, "fluid_elastic_class", trainable)  # A lane needs no Ray Tune to train it.
    kind_of(sent)
    pickled = dump_trainable(sent)
    return TrainablePayload(pickled=pickled, imports=tuple(imports_of(sent)), elastic=is_elastic(sent))

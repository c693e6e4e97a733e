"""What the trials are: their pickled trainables and configs, each trainable under a key of its own."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fluid.lane.messages import ShipTrainable
from fluid.trainables.payload import TrainablePayload, TrialPayload

#: Most trainables that are kept though no trial uses them: more trials of one are often to come.
_KEPT = 64


@dataclass(slots=True)
class _Known:
    """A trainable, and the number of trials that use it."""

    payload: TrainablePayload
    trials: int = 0


class Registry:
    """Keeps what lanes are to be sent.

    Args:
        preload: called with the modules that a new trainable imports.
    """

    def __init__(self, preload: Callable[[Sequence[str]], None]) -> None:
        self._preload = preload
        self._trials: dict[str, tuple[int, bytes]] = {}
        #: Key of each trainable, by its digest. A key is not used again.
        self._keys: dict[bytes, int] = {}
        self._next_key = 0
        self._trainables: dict[int, _Known] = {}
        #: Keys of those that no trial uses, in the order in which they fell idle.
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._trials

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes in a trial, which is new."""
        key = self._key_of(payload.trainable)
        self._trainables[key].trials += 1
        self._idle.pop(key, None)
        self._trials[trial_id] = (key, payload.config)

    def forget(self, trial_id: str) -> int | None:
        """Drops a trial.

        Returns:
            The key of a trainable that was dropped, as no trial has used it for long; ``None`` if none was.
        """
        trial = self._trials.pop(trial_id, None)
        if trial is None:
            return None
        known = self._trainables[trial[0]]
        known.trials -= 1
        if not known.trials:
            self._idle[trial[0]] = None
        if len(self._idle) <= _KEPT:
            return None
        dropped, _ = self._idle.popitem(last=False)
        del self._keys[self._trainables.pop(dropped).payload.digest]
        return dropped

    def look_up(self, trial_id: str) -> tuple[int, bytes]:
        """Returns the key of a trial's trainable, and its pickled config."""
        return self._trials[trial_id]

    def is_elastic(self, trial_id: str) -> bool:
        """Whether a trial can span several devices."""
        return trial_id in self._trials and self._trainables[self._trials[trial_id][0]].payload.elastic

    def shipment(self, key: int) -> ShipTrainable:
        """Returns the message that makes a trainable known to a lane."""
        return ShipTrainable(key, self._trainables[key].payload.pickled, tuple(sys.path))

    def _key_of(self, trainable: TrainablePayload) -> int:
        key = self._keys.setdefault(trainable.digest, self._next_key)
        if key == self._next_key:
            self._next_key += 1
            self._trainables[key] = _Known(trainable)
            self._preload(trainable.imports)
        return key

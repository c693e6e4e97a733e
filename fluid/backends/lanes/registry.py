"""What the trials are: their pickled trainables and configs, each trainable under a key of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fluid.lane.messages import ShipTrainable
from fluid.trainables.payload import TrainablePayload, TrialPayload


class Registry:
    """Keeps what lanes are to be sent.

    Args:
        preload: called with the modules that a new trainable imports.
    """

    def __init__(self, preload: Callable[[Sequence[str]], None]) -> None:
        self._preload = preload
        self._trials: dict[str, tuple[int, bytes]] = {}
        #: Key of each trainable, by its pickle.
        self._keys: dict[bytes, int] = {}
        self._payloads: list[bytes] = []
        #: Keys of those whose trials can span several devices.
        self._elastic: set[int] = set()

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._trials

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes in a trial."""
        self._trials[trial_id] = (self._key_of(payload.trainable), payload.config)

    def forget(self, trial_id: str) -> None:
        """Drops a trial; its trainable stays for others."""
        self._trials.pop(trial_id, None)

    def look_up(self, trial_id: str) -> tuple[int, bytes]:
        """Returns the key of a trial's trainable, and its pickled config."""
        return self._trials[trial_id]

    def is_elastic(self, trial_id: str) -> bool:
        """Whether a trial can span several devices."""
        return trial_id in self._trials and self._trials[trial_id][0] in self._elastic

    def shipment(self, key: int) -> ShipTrainable:
        """Returns the message that makes a trainable known to a lane."""
        return ShipTrainable(key, self._payloads[key], tuple(sys.path))

    def _key_of(self, trainable: TrainablePayload) -> int:
        key = self._keys.setdefault(trainable.pickled, len(self._payloads))
        if key == len(self._payloads):
            self._payloads.append(trainable.pickled)
            self._preload(trainable.imports)
            if trainable.elastic:
                self._elastic.add(key)
        return key

"""What the trials are: trainables and configs, pickled when they are submitted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fluid.lane.messages import ShipTrainable
from fluid.trainables.pickling import dump_config, dump_trainable, imports_of
from fluid.trainables.trainable import is_elastic, kind_of


class Registry:
    """Keeps what lanes are to be sent.

    Args:
        preload: told what each new trainable imports.
    """

    def __init__(self, preload: Callable[[Sequence[str]], None]) -> None:
        self._preload = preload
        self._trials: dict[str, tuple[int, bytes]] = {}
        #: By identity; the object is kept so that its identity stays its own.
        self._keys: dict[int, tuple[Any, int]] = {}
        self._keys_by_payload: dict[bytes, int] = {}
        self._payloads: list[bytes] = []
        #: Keys of those whose trials can span several devices.
        self._elastic: set[int] = set()

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._trials

    def register(self, trial_id: str, trainable: Any, config: Mapping[str, Any]) -> None:
        """Takes in a trial.

        Raises:
            InvalidFieldError: trainable or config cannot be used or pickled.
            MissingDependencyError: the trainable needs a package that is not installed.
        """
        trainable = getattr(trainable, "fluid_elastic_class", trainable)  # From which it was made for Ray Tune.
        known = self._keys.get(id(trainable))
        key = self._add(trainable) if known is None else known[1]
        self._trials[trial_id] = (key, dump_config(config))

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

    def _add(self, trainable: Any) -> int:
        kind_of(trainable)
        payload = dump_trainable(trainable)
        key = self._keys_by_payload.setdefault(payload, len(self._payloads))
        if key == len(self._payloads):
            self._payloads.append(payload)
            self._preload(imports_of(trainable))
            if is_elastic(trainable):
                self._elastic.add(key)
        self._keys[id(trainable)] = (trainable, key)
        return key

"""The backend of ``FluidExecutor(backend="simulated")``: trials are replayed on a virtual clock."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.errors import InvalidFieldError, require_integer
from fluid.rehearsal.course import ReplayedCourse
from fluid.rehearsal.overheads import FREE, Overheads
from fluid.rehearsal.replayable import Replayable
from fluid.resources import Device, DeviceChoice
from fluid.trainables.payload import TrialPayload

#: The static method of a trainable of Fluid's own that makes the course of a trial of another library: it takes the
#: trial's config and the source in place of the trainable, or ``None``.
MAKE_COURSE = "rehearsed_course"


class RehearsalBackend(SimulatedBackend):
    """Replays trials on virtual devices. The session's clock stands still while a submitter acts.

    Args:
        devices: how many devices, or a list of :class:`fluid.Device`; ``None`` for one.
        source: replays all trials; ``None`` for their trainables themselves.
        overheads: what packing, scaling and moves cost.

    Raises:
        InvalidFieldError: the devices are none.
    """

    def __init__(
        self, devices: DeviceChoice = None, *, source: Replayable | None = None, overheads: Overheads = FREE
    ) -> None:
        super().__init__(
            self._truth_of, _virtual_devices(devices), epsilon=overheads.epsilon, saves=False, record=False, held=True
        )
        self.overheads = overheads
        self._source = source
        self._payloads: dict[str, TrialPayload] = {}
        #: Trainables, unpickled, by the digest of their payload.
        self._trainables: dict[bytes, Any] = {}

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes what a trial is.

        Raises:
            InvalidFieldError: it cannot be replayed.
        """
        super().register(trial_id, payload)
        self._payloads[trial_id] = payload

    def forget(self, trial_id: str) -> None:
        """Drops a trial that no command will name again."""
        super().forget(trial_id)
        self._payloads.pop(trial_id, None)

    def _truth_of(self, trial_id: str, config: Mapping[str, Any]) -> Truth:
        payload = self._payloads[trial_id].trainable
        trainable = self._trainables.get(payload.digest)
        if trainable is None:
            trainable = self._trainables[payload.digest] = pickle.loads(payload.pickled)
        make = getattr(trainable, MAKE_COURSE, None)
        if make is not None:
            course = make(config, self._source)
        else:
            course = ReplayedCourse(replayable_of(trainable, self._source), config)
        return Truth(alpha=self.overheads.alpha, beta=self.overheads.beta, course=course)


def replayable_of(trainable: Any, source: Replayable | None) -> Replayable:
    """Returns what replays trials of a trainable.

    Args:
        trainable: the user's.
        source: in place of it; ``None`` for the trainable itself.

    Raises:
        InvalidFieldError: it cannot be replayed.
    """
    if source is not None:
        return source
    if not callable(getattr(trainable, "replay", None)):
        reason = "has no method replay(config, iterations); without one, rehearse it from a run folder or a benchmark"
        raise InvalidFieldError("trainable", trainable, reason)
    replayable: Replayable = trainable
    return replayable


def _virtual_devices(devices: DeviceChoice) -> list[Device]:
    if devices is None:
        return [Device(0)]
    if isinstance(devices, int):
        return [Device(index) for index in range(require_integer("devices", devices, at_least=1))]
    listed = [] if isinstance(devices, str) else [device for device in devices if isinstance(device, Device)]
    if not listed:
        raise InvalidFieldError("devices", devices, "must be a number of devices, or a list of Device, in a rehearsal")
    return listed

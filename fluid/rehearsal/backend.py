"""The backend of ``FluidExecutor(backend="simulated")``: trials are replayed on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.backends.simulated.steps import Course, SimulatedTrial
from fluid.engine.commands import Save, StartLane, StartTrial
from fluid.engine.events import LaneReady
from fluid.errors import InvalidFieldError, require_integer
from fluid.rehearsal.course import FailedCourse, ReplayedCourse
from fluid.rehearsal.overheads import FREE, Overheads
from fluid.rehearsal.replayable import Replayable
from fluid.resources import Device, DeviceChoice
from fluid.trainables.parted_pickle import load_pickled
from fluid.trainables.payload import TrialPayload
from fluid.trainables.trainable import is_fusible, kind_of

#: The static method of a trainable of Fluid's own that makes the course of a trial of another library: it takes the
#: trial's config and the source in place of the trainable, or ``None``.
MAKE_COURSE = "rehearsed_course"
#: A static method of such a trainable that takes the source, or ``None``, and refuses what cannot be replayed.
REQUIRE_COURSE = "require_rehearsed_course"


class RehearsalBackend(SimulatedBackend):
    """Replays trials on virtual devices. The session's clock stands still while a submitter acts.

    Example:
        >>> from fluid.rehearsal import Overheads, RehearsalBackend
        >>> backend = RehearsalBackend(4, overheads=Overheads(alpha=1.2))
        >>> len(backend.devices()), backend.overheads.alpha
        (4, 1.2)

    Args:
        devices: how many GPUs of speed 1 on one host, with memory enough, or a list of :class:`fluid.Device`; ``None``
            for one.
        source: replays all trials; ``None`` for their trainables themselves.
        overheads: what packing, scaling and moves cost.
        lane_policy: which trial a lane runs next if several are in it; see :mod:`fluid.lane.policy`. ``None``, the
            default, for the one that has waited longest.

    Raises:
        InvalidFieldError: the devices are none.
    """

    replays = True

    def __init__(
        self,
        devices: DeviceChoice = None,
        *,
        source: Replayable | None = None,
        overheads: Overheads = FREE,
        lane_policy: str | None = None,
    ) -> None:
        super().__init__(
            self._truth_of,
            _virtual_devices(devices),
            epsilon=overheads.epsilon,
            saves=False,
            record=False,
            held=True,
            lane_policy=lane_policy,
        )
        self.overheads = overheads
        self._source = source
        self._payloads: dict[str, TrialPayload] = {}
        #: Of trials that have started: one that moves goes on in its course.
        self._truths: dict[str, Truth] = {}
        #: Trainables, unpickled, by the digest of their payload.
        self._trainables: dict[bytes, Any] = {}
        #: When each host can start lanes, from its first one on, seconds.
        self._serves_at: dict[str, float] = {}

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
        self._truths.pop(trial_id, None)

    def require_replayable(self, trainable: Any) -> None:
        """Refuses a trainable whose trials cannot be replayed.

        Raises:
            InvalidFieldError: it is one, or with a source in its place, no trainable at all.
        """
        require = getattr(trainable, REQUIRE_COURSE, None)
        if require is not None:
            require(self._source)
        elif getattr(trainable, MAKE_COURSE, None) is None and not callable(getattr(trainable, "replay", None)):
            replayable_of(trainable, self._source)
            kind_of(trainable)

    @property
    def facts(self) -> dict[str, Any]:
        """What ``session.json`` says of a rehearsal."""
        return {"rehearsed": True, "overheads": asdict(self.overheads)}

    @property
    def pays_to_pack(self) -> bool:
        """Whether it is known what packing costs, and that it is less than to take turns."""
        return 1.0 < self.overheads.alpha < 2.0

    # -- what takes time -----------------------------------------------------------------------------------

    def _start_lane(self, command: StartLane) -> None:
        now, lane_id = self.now(), command.lane_id
        self._devices.start_lane(lane_id, command.device_ids)
        host = self._devices.host_of(lane_id)
        ready_at = max(now, self._serves_at.setdefault(host, now + self.overheads.server_s)) + self.overheads.lane_s
        ready = LaneReady(ready_at, lane_id, seconds=ready_at - now)
        if ready_at > now:
            self._timers.at(ready_at, lambda: self._lane_ready(ready))
        else:
            self._ready.append(ready)

    def _lane_ready(self, ready: LaneReady) -> None:
        if self._devices.has_lane(ready.lane_id):  # It was not stopped as it started.
            self._ready.append(ready)

    def _setup_seconds(self, command: StartTrial) -> float:
        return self.overheads.start_s if command.checkpoint is None else self.overheads.restore_s

    def _save(self, command: Save) -> None:
        seconds = self.overheads.save_s
        if seconds == 0.0:
            super()._save(command)
        else:
            self._timers.at(self.now() + seconds, lambda: self._saved(command))

    def _saved(self, command: Save) -> None:
        if self._devices.has_lane(command.lane_ids[0]):
            super()._save(command)

    def _fork_seconds(self) -> float:
        return self.overheads.save_s

    def _fail(self, trial: SimulatedTrial) -> None:
        super()._fail(trial)
        self._truths.pop(trial.trial_id, None)  # Tried again, it is replayed anew.

    def _truth_of(self, trial_id: str, config: Mapping[str, Any]) -> Truth:
        if (known := self._truths.get(trial_id)) is not None:
            return known
        payload = self._payloads[trial_id].trainable
        trainable = self._trainables.get(payload.digest)
        if trainable is None:
            trainable = self._trainables[payload.digest] = load_pickled(payload.pickled)
        make = getattr(trainable, MAKE_COURSE, None)
        course: Course
        try:
            if make is not None:
                course = make(config, self._source)
            else:
                course = ReplayedCourse(replayable_of(trainable, self._source), config)
            fusion = getattr(course, "fusion", None) if is_fusible(trainable) else None
        except BaseException as error:  # It fails the trial, as what its set-up raises in a lane.
            return Truth(course=FailedCourse(error))
        truth = Truth(
            alpha=self.overheads.alpha,
            beta=self.overheads.beta,
            course=course,
            fusion_key=None if fusion is None else fusion.key,
            fused=None if fusion is None else fusion.rates,
        )
        self._truths[trial_id] = truth
        return truth


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
        reason = (
            "cannot be rehearsed, as it has no replay(config, iterations): give it one, see fluid.rehearsal.Replayable,"
            " or rehearse it from a run folder or a benchmark, see fluid rehearse --help"
        )
        raise InvalidFieldError("trainable", trainable, reason)
    replayable: Replayable = trainable
    return replayable


def _virtual_devices(devices: DeviceChoice) -> list[Device]:
    if devices is None:
        devices = 1
    if isinstance(devices, int):
        return [Device(index, kind="gpu") for index in range(require_integer("devices", devices, at_least=1))]
    listed = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else []
    if not listed or not all(isinstance(device, Device) for device in listed):
        raise InvalidFieldError("devices", devices, "must be a number of devices, or a list of Device, in a rehearsal")
    return [device for device in listed if isinstance(device, Device)]

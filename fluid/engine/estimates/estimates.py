"""Estimates: the work, speed and memory to expect of a trial, from its profile key's measurements and its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from statistics import median_low

from fluid.devices.idle import fastest_part
from fluid.devices.models import ByModel, OnModel, Speeds, speeds_of_all
from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.engine.estimates.key_estimates import KeyEstimate
from fluid.engine.estimates.pace import PaceBeliefs
from fluid.engine.estimates.running import RunningTable
from fluid.engine.events import IterationDone
from fluid.engine.records import TrialRecord
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState

# -- needs ---------------------------------------------------------------------------------------
#
# Needs: the device memory to reserve for a trial, from its key's measurements, its config and its own.


class Needs:
    """Says how much device memory trials need.

    Args:
        occupancy: which trial holds which device.
        of_key: the estimate of a trial's profile key, on the device model that it holds or is planned for.
        on_model: the estimate of a profile key on a device model.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        of_key: Callable[[TrialRecord], KeyEstimate],
        on_model: Callable[[str, str | None], KeyEstimate],
    ) -> None:
        self._occupancy = occupancy
        self._of_key = of_key
        self._on_model = on_model

    def of(self, trial: TrialRecord) -> MemoryNeed | None:
        """Device memory, as specified, predicted or measured, scaled down to the largest device; ``None``: unknown."""
        of_row = self._of_key(trial).row_memory if trial.is_fused else None
        return trial.spec.memory or self._as_fits(of_row or trial.pace.expected_need or self._of_trials_key(trial))

    def on(self, trial: TrialRecord, estimate: KeyEstimate) -> MemoryNeed | None:
        """The same on a device model of which this is the estimate."""
        of_row = estimate.row_memory if trial.is_fused else None
        known = of_row or trial.pace.expected_need or estimate.memory or self._of_trials_key(trial)
        return trial.spec.memory or self._as_fits(known)

    def most_of(self, key: str) -> MemoryNeed | None:
        """The most that was measured of a key's trials on any device model."""
        models = self._occupancy.models or (None,)
        known = [need for model in models if (need := self._on_model(key, model).memory) is not None]
        return MemoryNeed.most(*known) if known else None

    def most_usable(self) -> float:
        """Bytes that trials may fill on the device with the most memory."""
        rooms = [self._occupancy.memory.usable_bytes(index) for index in self._occupancy.residents]
        return max((math.inf if room is None else room for room in rooms), default=math.inf)

    def _of_trials_key(self, trial: TrialRecord) -> MemoryNeed | None:
        """What was measured on the device model that the trial holds; else the most that was on any."""
        models = self._occupancy.models
        if len(models) <= 1 or trial.row in self._occupancy.held:
            need = self._of_key(trial).memory
            if need is not None or len(models) <= 1:
                return need
        return self.most_of(trial.spec.profile_key)

    def _as_fits(self, need: MemoryNeed | None) -> MemoryNeed | None:
        if need is None or (usable := self.most_usable()) >= need.peak_bytes:
            return need
        persistent = float(math.floor(need.persistent_bytes / need.peak_bytes * usable))
        return MemoryNeed(persistent, usable - persistent, min(persistent, need.shared_bytes))


# -- model speeds --------------------------------------------------------------------------------
#
# Model speeds: how fast the trials of each profile key are on each device model, as measured.


class ModelSpeeds:
    """Iterations per second by profile key and device model, relative to the model that was there first.

    Devices of one model, and devices whose speed the user gave, have no measured speeds.

    Args:
        profile: what was measured.
        occupancy: knows the devices.
    """

    def __init__(self, profile: Profile, occupancy: Occupancy) -> None:
        self._profile = profile
        self._occupancy = occupancy
        self._by_key: dict[str, Speeds] = {}
        self._seen: tuple[object, ...] = ()

    def pop_changed(self) -> bool:
        """Whether devices of another model came, or the last of a model went, since the last call."""
        before, self._seen = self._seen, (*self._occupancy.models, self._occupancy.models.has_given_speeds)
        return before != self._seen

    def of(self, key: str) -> Speeds | None:
        """The speeds of a key by device model; ``None`` if the devices' own speeds hold."""
        if not self._are_used:
            return None
        known = self._by_key.get(key)
        if known is None:
            known = self._by_key[key] = self._measured(key)
        return known

    def update(self, key: str) -> Speeds | None:
        """Learns a key's speeds anew; returns the factor by which each has changed, or ``None`` if hardly any has."""
        if not self._occupancy.models:
            return None
        before, now = self._by_key.get(key, {}), self._measured(key)
        factors = {model: speed / before.get(model, 1.0) for model, speed in now.items()}
        # Once the devices' own speeds are used, a difference of any size is told: planners have to see the same speeds.
        exact: Collection[str | None] = () if self._are_used else self._occupancy.models
        most = {model: 0.0 if model in exact else tuning.SPEED_CHANGE for model in factors}
        if all(abs(factor - 1.0) <= most[model] for model, factor in factors.items()):
            self._by_key[key] = {**now, **before}
            return None
        self._by_key[key] = now
        return factors

    @property
    def _are_used(self) -> bool:
        """Whether these speeds are used, not the devices' own."""
        return self._occupancy.models.are_several and not self._occupancy.models.has_given_speeds

    def is_measured(self, key: str, model: str | None) -> bool:
        """Whether a key's trials ran alone on a device of that model often enough."""
        return not self._profile.needs_measuring(key, model)

    def _measured(self, key: str) -> Speeds:
        models = list(self._occupancy.models)
        if self._occupancy.models.has_given_speeds:
            return dict.fromkeys(models, 1.0)
        return self._profile.speeds(key, [*models, *(gone for gone in self._profile.models(key) if gone not in models)])


# -- estimates -----------------------------------------------------------------------------------


class Estimates:
    """Estimates what a trial needs and how long it takes.

    Args:
        profile: what was measured.
        occupancy: which trial holds which device.
        table: has a copy of every key's estimate.
        max_packing: most processes on one device, whatever the profile says; 1 switches packing them off.
        max_fused: most trials fused on one device; 1 switches fusing off.
        insists_on_fusing: whether trials that can be fused are, though it was not measured to pay.
        turns: most trials on one device that take turns in its lanes; 1 if each is to have a lane of its own.
        max_width: most devices for one trial.
    """

    def __init__(
        self,
        profile: Profile,
        occupancy: Occupancy,
        table: RunningTable,
        *,
        max_packing: int,
        max_width: int,
        max_fused: int = 1,
        insists_on_fusing: bool = False,
        turns: int = 1,
    ) -> None:
        self.turns = turns
        self._profile = profile
        self._occupancy = occupancy
        self._table = table
        self.max_packing = max_packing
        self._max_width = max_width
        self._max_fused = max_fused
        self._insists_on_fusing = insists_on_fusing
        #: Keys of which a trial has come that can be fused, and the key that its trials had before.
        self._fusible: dict[str, str] = {}
        #: Cohorts, and the key of which each is a part.
        self._whole: dict[str, str] = {}
        self._speeds = ModelSpeeds(profile, occupancy)
        self._beliefs = PaceBeliefs(profile)
        self._needs = Needs(occupancy, self.of_key, self.on_model)
        #: By profile key, then by device model.
        self._by_key: dict[str, dict[str | None, KeyEstimate]] = {}

    # -- by key and device model ---------------------------------------------------------------------------

    def of_key(self, trial: TrialRecord) -> KeyEstimate:
        """The estimate of the trial's profile key, on the device model that it holds, or is planned for."""
        key, models = trial.spec.profile_key, self._occupancy.models
        if models.are_several:
            held = self._occupancy.held.get(trial.row)
            return self._to_plan(key) if held is None else self.on_model(key, self.slowest_model(key, held))
        return self.on_model(key, models.first)

    def on_model(self, key: str, model: str | None) -> KeyEstimate:
        """The estimate of a profile key on a device model."""
        by_model = self._by_key.get(key)
        if by_model is None:
            by_model = self._by_key[key] = {}
        estimate = by_model.get(model)
        if estimate is None:
            known = self._profile.measured_packing(key, model) > 0
            estimate = KeyEstimate(key, self.max_packing, self._max_width, model, busy_known=known)
            if key in self._fusible:
                if self._fusible[key] != key:
                    estimate.inherited = self.on_model(self._fusible[key], model).memory
                estimate.fusing.begin(self._max_fused, self.max_packing, insists=self._insists_on_fusing)
                estimate.processes = estimate.packing = estimate.fusing.rows
            if key in self._whole:
                estimate.inherit(self.on_model(self._whole[key], model))
            estimate.begin_turns(self.turns, is_bounded=self._occupancy.memory.is_bounded)
            by_model[model] = estimate
            self.update(estimate)
        return estimate

    @property
    def fuses(self) -> bool:
        """Whether trials may be fused."""
        return self._max_fused > 1

    def mark_fusible(self, key: str, before: str) -> None:
        """Lets the trials of a profile key be fused, which had another key, or the same, before."""
        if key not in self._fusible:
            self._fusible[key] = before
            self._by_key.pop(key, None)

    def mark_cohort(self, cohort: str, key: str) -> bool:
        """Lets the trials of a profile key begin with what is known of another one, of which they are a part.

        Returns:
            Whether that is new.
        """
        is_new = cohort not in self._whole
        self._whole[cohort] = key
        return is_new

    def is_cohort(self, key: str) -> bool:
        """Whether a profile key is a part of another one."""
        return key in self._whole

    def speeds_of(self, key: str) -> Speeds:
        """How fast device models are for a key; empty if that is the same on all."""
        return self._speeds.of(key) or {}

    def pace_of_key(self, key: str) -> float | None:
        """Seconds per iteration of a key's trials, at width 1 and speed 1; ``None`` if unknown."""
        models = self._occupancy.models
        return (self._to_plan(key) if models else self.on_model(key, None)).pace

    def fusing_is_over(self, key: str) -> bool:
        """Whether the trials of a key are fused on no device model, so that each has a lane of its own."""
        return all(self.on_model(key, model).fusing.is_over for model in self._occupancy.models or (None,))

    def _to_plan(self, key: str) -> KeyEstimate:
        """The estimate by which trials are planned: of the device model on which most of them can be packed."""
        known = [self.on_model(key, model) for model in self._occupancy.models]
        # Where speeds are given, no device has a packing limit of its own: the plan's holds for all.
        sign = -1 if self._occupancy.models.has_given_speeds else 1
        return max(known, key=lambda each: (each.pace is not None, not each.is_rough, sign * each.packing))

    def by_model(self, trial: TrialRecord) -> ByModel | None:
        """How fast a trial is, and how far it is packed, on each device model; ``None`` if that is the same on all."""
        key, cap = trial.spec.profile_key, trial.packing_cap
        speeds = self._speeds.of(key)
        if speeds is None:
            return None
        found = {}
        for model in self._occupancy.models:
            estimate = self.on_model(key, model)
            c = estimate.packing if cap is None else min(estimate.packing, cap)
            found[model] = OnModel(speeds[model], c, self._needs.on(trial, estimate))
        return found

    def all_of(self, key: str) -> list[KeyEstimate]:
        """The estimates of a profile key, on each device model that it was asked for."""
        return list(self._by_key.get(key, {}).values())

    def update(self, estimate: KeyEstimate, *, work: float = math.inf) -> bool:
        """Brings a key's estimate up to date with the profile; returns whether c or d changed."""
        speeds = self._speeds.of(estimate.key)
        estimate.speed = 1.0 if speeds is None else speeds.get(estimate.model, 1.0)
        estimate.scaling_model = self._scaling_model(estimate.key)
        changed = estimate.update(self._profile, work=work)
        self._table.set_key(estimate)
        return changed

    def update_speeds(self, profile_key: str | None = None) -> dict[str, Speeds]:
        """Learns how fast device models are for a key and, if that has changed, for all keys.

        Args:
            profile_key: the key; ``None`` if devices came or went.

        Returns:
            By profile key, the factor by which the speed of each device model changed; keys without changes are left
            out.
        """
        changed: dict[str, Speeds] = {}
        if profile_key is not None:
            factors = self._speeds.update(profile_key)
            if factors is None:
                return {}
            changed[profile_key] = factors
        elif not self._speeds.pop_changed():
            return {}
        # The other keys' speeds on models that they were not measured on follow from it.
        for key in self._by_key:
            if key != profile_key and (factors := self._speeds.update(key)) is not None:
                changed[key] = factors
        return changed

    @property
    def epsilon(self) -> float:
        """Seconds that a resize costs."""
        return self._profile.epsilon

    def usual_pace(self) -> float:
        """Seconds per iteration to assume for unmeasured keys: the median of the measured ones, or 1."""
        known = chain.from_iterable(by_model.values() for by_model in self._by_key.values())
        paces = [estimate.pace for estimate in known if estimate.pace is not None]
        return median_low(paces) if paces else 1.0

    # -- work and speed ------------------------------------------------------------------------------------

    def is_measured(self, trial: TrialRecord) -> bool:
        """Whether the trial's seconds per iteration were measured, on it or on its key."""
        return trial.pace.expected is not None or self._pace_of_key(trial) is not None

    def height(self, trial: TrialRecord) -> float:
        """Predicted seconds of work left at width 1 and speed 1."""
        return trial.progress.left * self.pace(trial)

    def pace(self, trial: TrialRecord) -> float:
        """Predicted seconds per iteration at width 1 and speed 1."""
        pace = trial.pace.expected
        if pace is None:
            pace = self._pace_of_key(trial)
        return pace if pace is not None else self.usual_pace()

    def sigma(self, trial: TrialRecord, iterations: int | None = None) -> float:
        """Standard deviation of the logarithm of true over predicted seconds, of all or so many iterations left."""
        return self._beliefs.sigma(trial, self.of_key(trial).model, iterations)

    def observe_pace(self, trial: TrialRecord, done: IterationDone, stretch: float, model: str | None) -> None:
        """Learns the pace of a trial from iterations that took so many times the seconds at width 1 and speed 1.

        Args:
            trial: the trial.
            done: its iteration, or a run of them.
            stretch: above 0.
            model: the device model.
        """
        seconds = done.typical_seconds / stretch
        one = done.seconds / stretch if done.seconds > 0.0 else None
        self._beliefs.observe(trial, seconds, done.count, one)
        trial.pace.observe(seconds, model, done.count)

    def log_paces(self, key: str) -> Sequence[float]:
        """Logarithms of the seconds per iteration, at width 1 and speed 1, of the newest trials of a key."""
        return self._beliefs.paces(key)

    def _pace_of_key(self, trial: TrialRecord) -> float | None:
        pace = self.of_key(trial).pace
        return self._to_plan(trial.spec.profile_key).pace if pace is None and self._occupancy.models else pace

    def speed(self, trial: TrialRecord, devices: Sequence[int]) -> float:
        """Speed of the slowest of these devices, for this trial: as given by the user, or else as measured."""
        several = self._occupancy.models.are_several
        speeds = self._speeds.of(trial.spec.profile_key) if several else None
        if speeds is None:
            return self._occupancy.speed(devices)
        return min(speeds[self._occupancy.device(index).model] for index in devices)

    def speed_held(self, trial: TrialRecord) -> float:
        """Speed of the slowest device that a trial holds, for this trial."""
        return self.speed(trial, self._occupancy.held[trial.row])

    def speeds_of_all(self, work: Mapping[str, float]) -> Speeds | None:
        """How fast device models are for trials of several keys together; ``None`` if the devices' own speeds hold.

        Args:
            work: seconds of work at speed 1, above 0, by profile key.
        """
        measured = {key: speeds for key in work if (speeds := self._speeds.of(key)) is not None}
        return speeds_of_all(work, measured) if measured else None

    def slowest_model(self, key: str, devices: Sequence[int]) -> str | None:
        """The model of the slowest of these devices for a key; of equally slow ones, of the first."""
        models, speeds = [self._occupancy.device(index).model for index in devices], self._speeds.of(key)
        return models[0] if speeds is None else min(models, key=speeds.__getitem__)

    def seconds_left(self, trial: TrialRecord) -> float:
        """Predicted seconds of running at the width that the trial has, or is to have."""
        if trial.row in self._occupancy.held:
            return self.height(trial) * self.stretch(trial)
        return self.seconds_at_speed_1(trial)

    def seconds_at_speed_1(self, trial: TrialRecord) -> float:
        """Predicted seconds of running at its width on devices of speed 1, whatever devices it holds."""
        return self.height(trial) * (1.0 if trial.spec.gang else self.of_key(trial).stretch(trial.width))

    def fastest_part(self, trial: TrialRecord, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Those of some devices on which an elastic trial alone there ends first; all while speeds are unknown."""
        if len(devices) < 2 or not self._occupancy.is_unlike or not self.compares(trial.spec.profile_key, devices):
            return devices
        speeds = [self.speed(trial, (index,)) for index in devices]
        return tuple(devices[position] for position in fastest_part(speeds, self.of_key(trial).stretch))

    def stretch(self, trial: TrialRecord) -> float:
        """h(w)/h(1) at the trial's present width and co-residency, device speed included."""
        devices = self._occupancy.held[trial.row]
        width = trial.width
        if width < 1.0:
            width = 1.0 / len(self._occupancy.residents[devices[0]])
        elif trial.spec.gang:
            width = 1.0  # its runtime is measured as it is, on all of its devices
        estimate = self.of_key(trial)
        return estimate.stretch(width) / self.speed(trial, devices)

    def seconds_gained(self, trial: TrialRecord, width: float, devices: Sequence[int] | None = None) -> float:
        """Predicted seconds by which a running trial ends earlier at another width of at least 1, after a resize.

        The iteration in flight still runs at its present width. Negative if the trial ends later.

        Args:
            trial: the trial.
            width: its new width.
            devices: its new devices; ``None`` for some that are as fast as those that it has.
        """
        estimate = self.of_key(trial)
        speed = self.speed(trial, self._occupancy.held[trial.row] if devices is None else devices)
        after = self._height_after_iteration(trial)
        moved = self.epsilon + after * estimate.stretch(width) / speed
        return after * self.stretch(trial) - moved

    def seconds_gained_on(self, trial: TrialRecord, device: int) -> float:
        """Predicted seconds by which a running trial ends earlier if it goes to an idle device, at the same width.

        Taken off are the pause, which is that of a resize or of a save and a start, whichever was measured to be
        longer, and what a start in an unused lane takes in all, as the trial compiles and loads anew there. Speeds are
        followed to a share of ``tuning.SPEED_CHANGE``: so much less is counted on.
        """
        key, there = self.of_key(trial), self.on_model(trial.spec.profile_key, self._occupancy.device(device).model)
        near = self._occupancy.device(self._occupancy.held[trial.row][0]).host == self._occupancy.device(device).host
        pause = max(self.epsilon, key.interruption(near=near), there.interruption(near=near))
        cost = pause + max(key.warm_up, there.warm_up)
        stretch = (1.0 + tuning.SPEED_CHANGE) / self.speed(trial, (device,))
        return self._height_after_iteration(trial) * (self.stretch(trial) - stretch) - cost

    def _height_after_iteration(self, trial: TrialRecord) -> float:
        return self.height(trial) * (1.0 - 1.0 / max(1, trial.progress.left))

    def compares(self, key: str, devices: Sequence[int]) -> bool:
        """Whether it is known how fast these devices are for a key: it was measured on each, or the user said so."""
        if self._speeds.of(key) is None:
            return True
        return all(self._speeds.is_measured(key, self._occupancy.device(index).model) for index in devices)

    def scaling_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Seconds that a wide iteration would have taken on devices of the model on which beta is measured.

        ``None`` if that cannot be said: the key's speed on a device of the trial was not measured.
        """
        key, devices = trial.spec.profile_key, self._occupancy.held[trial.row]
        speeds, model = self._speeds.of(key), self._scaling_model(key)
        models = {self._occupancy.device(index).model for index in devices}
        if speeds is None or models == {model}:
            return seconds
        if not all(self._speeds.is_measured(key, each) for each in {*models, model}):
            return None
        return seconds * min(speeds[each] for each in models) / speeds[model]

    def _scaling_model(self, key: str) -> str | None:
        """The device model on which a key's beta is measured: the first of those present that the key ran on."""
        models = self._occupancy.models
        if not models.are_several:
            return models.first
        return next((model for model in self._profile.models(key) if model in models), models.first)

    # -- packing and width ---------------------------------------------------------------------------------

    def co_residents(self, trial: TrialRecord) -> int:
        """Trials on the trial's device, itself included; 1 for a wide one. During a resize, on its old device."""
        move = trial.placement.move
        devices = move.old_devices if move is not None else self._occupancy.held[trial.row]
        return len(self._occupancy.residents[devices[0]])

    def packing(self, trial: TrialRecord) -> int:
        """c for a trial: that of its key, at most the cap that its own failures, or its submitter, set."""
        c, cap = self.of_key(trial).packing, trial.packing_cap
        return c if cap is None else min(c, cap)

    def widest(self, trial: TrialRecord) -> int:
        """d for a trial: that of its key if trying it pays, at most what the trial can use."""
        estimate = self.of_key(trial)
        width = estimate.width if self.may_try(trial, estimate.width) else estimate.tried
        return 1 if trial.pinned else min(width, trial.max_width)

    def may_try(self, trial: TrialRecord, width: float) -> bool:
        """Whether a width was measured, or a trial of a known pace has enough iterations left to repay measuring it.

        A trial whose state is kept in a lane resumes there at once: it tries while it runs, and need not wait for
        further lanes.
        """
        if width <= self.of_key(trial).tried:
            return True
        if trial.pace.own is None:
            return False  # Whether it is the width that makes it slow, or the trial that is, could not be told.
        at_that_width = trial.progress.left - (trial.state is TrialState.RUNNING)
        return at_that_width >= tuning.LEAST_TO_TRY and trial.residence.lane is None

    # -- memory --------------------------------------------------------------------------------------------

    def need(self, trial: TrialRecord) -> MemoryNeed | None:
        """Device memory, as specified, predicted or measured; ``None`` if unknown.

        What was measured on a device fits there, even above the watermark: it is scaled down to the largest device.
        """
        return self._needs.of(trial)

    def need_on(self, trial: TrialRecord, device: int) -> MemoryNeed | None:
        """The same on a device, where it may differ from that on others of another model."""
        by_model = self.by_model(trial)
        return self.need(trial) if by_model is None else by_model[self._occupancy.device(device).model].need

    def typical_need(self, trial: TrialRecord) -> MemoryNeed | None:
        """The same, with the trial's part of what it shares with as many trials as are fused with it."""
        need = self.need(trial)
        return self._occupancy.groups.typical(trial.sharing_group, need) if trial.is_fused and need else need

    def most_need_of(self, key: str) -> MemoryNeed | None:
        """The most that was measured of a key's trials on any device model."""
        return self._needs.most_of(key)

    def kept_bytes(self, trial: TrialRecord) -> float:
        """Device memory that the trial's state takes between iterations; 0 if unknown."""
        need = self.need(trial)
        return 0.0 if need is None else self._occupancy.groups.typical(trial.sharing_group, need).persistent_bytes

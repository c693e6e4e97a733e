"""Which trials share a lane: fused ones, which it trains in one step, and those that take turns there.

Trials are fused that are of one group: their fusion keys are expected to be equal, by their profile key and those
fields of the config that were seen to decide (:class:`fluid.policies.fusing.groups.FusionGroups`). The group becomes
the trial's profile key, as trials of another shape take other times.

``benchmarks/fusion.py`` measures what it gains; docs/benchmarks.md has figures of a GPU and of whole sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from msgspec import structs

from fluid.devices.memory import TURNS
from fluid.engine.commands import LimitRows
from fluid.engine.core import SessionState
from fluid.engine.events import Event, FusionLimited, IterationDone, TrialStarted
from fluid.engine.placing.lanes import Fusion
from fluid.engine.policy import Check, Handler, Policy, Preempt, Proposal
from fluid.engine.records import LaneRecord, TrialRecord
from fluid.policies.fusing.groups import FusionGroups
from fluid.policies.turns import Joining, Turns
from fluid.trialgroup import TrialState


class Fusing(Policy):
    """Decides which trials share a lane, and tells lanes how many to fuse in one step.

    Args:
        core: the state of the session.
        turns: has the trials that take turns.
    """

    def __init__(self, core: SessionState, turns: Turns) -> None:
        self._core = core
        self._all = core.trials
        self._lanes = core.lanes
        self._estimates = core.estimates
        self._allocations = core.allocations
        self._measuring = core.measuring
        self._turns = turns
        self._groups = FusionGroups()
        #: submitted profile key -> row -> trial that can be fused.
        self._trials: dict[str, dict[int, TrialRecord]] = {}
        #: row -> the profile key with which it was submitted.
        self._submitted: dict[int, str] = {}

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """How many trials a lane can train in one step."""
        return {FusionLimited: (None, self.fusion_limited)}

    # -- groups --------------------------------------------------------------------------------------------

    def submitted(self, trial: TrialRecord) -> None:
        """Finds the group of a new trial, if it is to share a lane; one that asks for a share of a device has none."""
        if trial.spec.isolated:
            return
        if self._turns.takes(trial):
            trial.sharing_group = TURNS
        if not trial.spec.fusible or trial.spec.devices is not None or not self._estimates.fuses:
            return
        key = self._submitted[trial.row] = trial.spec.profile_key
        self._trials.setdefault(key, {})[trial.row] = trial
        self._set_group(trial)

    def forgotten(self, trial: TrialRecord) -> None:
        """Drops a trial that was forgotten."""
        key = self._submitted.pop(trial.row, None)
        if key is not None:
            del self._trials[key][trial.row]

    def started(self, trial: TrialRecord, event: TrialStarted) -> None:
        """Learns the fusion key of a trial that a lane has set up alone; others may have another group then."""
        key = self._submitted.get(trial.row)
        if key is None or len(trial.placement.lanes) != 1:
            return
        if event.fusion_key is None:
            self.limit(trial, 1)
            return
        if not self._groups.learn(key, trial.spec.config, event.fusion_key):
            return
        changed = [other for other in self._trials[key].values() if self._set_group(other)]
        for other in changed:
            self._core.plan_again(other)

    def _set_group(self, trial: TrialRecord) -> bool:
        """Gives a trial its group as it is expected to be now; returns whether that is another one."""
        name = self._groups.name(self._submitted[trial.row], trial.spec.config)
        self._estimates.mark_fusible(name, trial.spec.profile_key)
        changed = name != trial.spec.profile_key
        if changed:
            trial.spec = structs.replace(trial.spec, profile_key=name)
            self._allocations.rekey(trial)
        self._book(trial)
        return changed

    def _book(self, trial: TrialRecord) -> None:
        """Books with which trials a trial shares a lane: with those of its group, until fusing them is over.

        Trials that take turns on a device go on so until they leave it.
        """
        group = self._group_of(trial)
        if trial.takes_turns and group != TURNS and self._allocations.has_company(trial):
            return
        trial.sharing_group = group
        if not trial.state.holds_devices:
            return
        self._allocations.update_group(trial)
        self.placed(trial)
        for lane_id in trial.placement.lanes:
            lane = self._lanes.get(lane_id)
            if lane is not None and len(lane.holders) == 1:
                lane.sharing_group = trial.sharing_group

    def _group_of(self, trial: TrialRecord) -> str | None:
        if not self._estimates.fusing_is_over(key := trial.spec.profile_key):
            return key
        return TURNS if self._turns.takes(trial) else None

    def left(self, trial: TrialRecord) -> None:
        """Lets a trial that has left its devices share others with those of its group."""
        if trial.takes_turns and trial.row in self._submitted:
            trial.sharing_group = self._group_of(trial)

    def company(self, trial: TrialRecord, devices: Sequence[int]) -> Fusion | Joining | None:
        """With which trials a trial may share a lane of the devices that it was given; ``None`` for none."""
        if trial.sharing_group is None:
            return None
        if trial.takes_turns:
            return self._turns.lane_for(trial, devices[0]) if len(devices) == 1 else None
        return Fusion(trial.sharing_group, self._estimates.of_key(trial).fusing.rows)

    def propose(self) -> list[Proposal]:
        """Trials that wait for their turn though a further lane of their device is idle, or to be started."""
        why = "leaves its lane for another one of its device, which is idle"
        return [Preempt(trial, why=why) for trial in self._turns.uneven()]

    def placed(self, trial: TrialRecord) -> None:
        """Books the lane that a trial was given, whose other trials it takes turns with."""
        if trial.takes_turns:
            self._turns.placed(trial)

    # -- rows ----------------------------------------------------------------------------------------------

    def fusion_limited(self, event: FusionLimited) -> None:
        """Fuses no more trials like this one in one step than its lane can."""
        trial = self._core.holder(event.trial_id, event.lane_id)
        if trial is not None:
            self.limit(trial, event.rows)
            self._core.note(trial, f"at most {event.rows} like it in one step: {event.reason}")

    def limit(self, trial: TrialRecord, rows: int) -> None:
        """Bounds the rows of a trial's group on the device model that the trial holds."""
        estimate = self._estimates.of_key(trial)
        if rows < estimate.fusing.most:
            estimate.fusing.limit(rows)
            self._measuring.estimate_changed(estimate)

    def estimates_changed(self, keys: Set[str]) -> None:
        """Books what was learnt about fusing the trials of these profile keys."""
        for trials in self._trials.values():
            for trial in trials.values():
                if trial.spec.profile_key in keys:
                    self._book(trial)
                    self._lanes.rows_due.update(trial.placement.lanes)

    def at_end(self) -> None:
        """Tells lanes that other trials hold, or of whose trials more was learnt, how many to train in one step."""
        due = self._lanes.rows_due
        for lane_id in sorted(due):
            lane = self._lanes.get(lane_id)
            if lane is not None and not lane.ready:
                continue
            due.discard(lane_id)
            if lane is None or not lane.holders:
                continue
            trial = self._all[next(iter(lane.holders))]
            rows = self._estimates.of_key(trial).fusing.rows
            if lane.rows != rows and (trial.sharing_group is not None or lane.rows is not None):
                lane.rows = rows
                self._core.commands.append(LimitRows(lane_id, rows))

    # -- measuring -----------------------------------------------------------------------------------------

    def observes(self, trial: TrialRecord, event: IterationDone) -> bool:
        """Learns from an iteration of a trial that shares its lane; returns whether it has.

        All rows of a step report the same seconds: the profile learns from the first of them. It learns from the first
        iteration of a trial alone, too, where the lane has trained its like before: in a sweep whose trials run one
        iteration each at first, nothing would be measured otherwise.
        """
        if trial.takes_turns:
            return self._turns.observe(trial, event)
        lane = self._lanes.get(event.lane_id)
        if lane is None:
            return False
        key = trial.spec.profile_key
        has_trained_like, lane.trained_key = lane.trained_key == key, key
        if event.rows == 1 and len(lane.holders) <= 1:
            is_alone = trial.sharing_group is not None and len(trial.placement.lanes) == 1
            if not is_alone or trial.placement.settled or not has_trained_like:
                return False
        is_first, lane.step_at = event.at != lane.step_at, event.at
        self._measuring.observe_step(trial, event, is_first=is_first, packs=self._packs(lane, event.rows))
        return True

    def _packs(self, lane: LaneRecord, rows: int) -> int | None:
        """How many lanes run trials on a lane's device; ``None`` if they do not all train so many in one step."""
        packs = [other for other in self._lanes.on(lane.device_id) if other.holders]
        if len(packs) == 1:
            return 1
        alike = all(len(pack.holders) == rows and self._all_run(pack) for pack in packs)
        return len(packs) if rows > 1 and alike else None

    def _all_run(self, lane: LaneRecord) -> bool:
        return all(self._all[trial_id].state is TrialState.RUNNING for trial_id in lane.holders)

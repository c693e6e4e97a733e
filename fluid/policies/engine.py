"""The engine with all of Fluid's policies: which there are, in which order they are asked, and how its parts are made.

A policy of one's own is added to the list in :class:`EngineState`, or handed to it as ``further``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine.core import Deadlines, SessionState, Watching
from fluid.engine.engine import DEFAULT_RESIDENT_LIMIT, Engine
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.measuring import IterationTiming, Measuring
from fluid.engine.estimates.running import RunningTable
from fluid.engine.placing.allocations import Allocations
from fluid.engine.placing.feasibility import Feasibility
from fluid.engine.placing.lanes import Lanes
from fluid.engine.placing.scheduling import Scheduling
from fluid.engine.policy import Policies, Policy
from fluid.engine.records import Trials
from fluid.engine.view import seconds_left
from fluid.errors import require_integer, require_number, require_one_of
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING
from fluid.planners.arrangement import KeepWidths
from fluid.planners.planner import Planner
from fluid.policies.admission import Admitting
from fluid.policies.checkpoints import CheckpointValues
from fluid.policies.cohorts import Cohorts
from fluid.policies.drains import DeviceDemand, Drains, Retirements
from fluid.policies.elsewhere import Elsewhere
from fluid.policies.forking.forks import Forks
from fluid.policies.forking.shared_runs import SharedRuns
from fluid.policies.fusing.fusing import Fusing
from fluid.policies.gangs import Reservations
from fluid.policies.hung import HungTrials
from fluid.policies.isolation import CleanUps
from fluid.policies.owners.lateness import GroupLateness
from fluid.policies.owners.owners import OpenJobs, Owners
from fluid.policies.owners.pauses import DeadlinePauses
from fluid.policies.owners.quick_checks import QuickChecks
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES, GroupShares
from fluid.policies.owners.transfers import Transfers
from fluid.policies.preemption import Preemptions
from fluid.policies.rebalancing import Overpacking, Rebalancing
from fluid.policies.rounds import Rotation
from fluid.policies.spare_lanes import SpareLanes
from fluid.policies.strikes import Strikes
from fluid.policies.turns import Turns
from fluid.policies.urgent.urgency import Urgency
from fluid.policies.waits import Waits
from fluid.resources import DEFAULT_MEMORY_WATERMARK


class EngineState(Engine):
    """Decides what runs where, with all of Fluid's policies.

    Args:
        planner: plans widths, placements and resizes.
        profile: measurements of trials; it learns from what lanes report.
        max_packing: most processes on one device; 1 switches packing them off.
        max_fused: most trials that one process trains in one step; 1 switches fusing off.
        insists_on_fusing: whether trials that can be fused are, though it was not measured to pay.
        turns: most trials on one device that take turns in its lanes; 1 if each is to have a lane of its own.
        in_rounds: whether all trials advance together, an iteration each in turn, those that wait for room too.
        max_width: most devices for one trial; ``None`` for the planner's ``d``.
        max_failures: times a trial is queued again after it failed; ``None``, the default, for 2, and fewer where it
            can only fail again.
        resident_limit: states of trials at rest that a device keeps, of those whose bytes do not bound packing.
        watermark: share of a device's memory that trials may fill.
        group_policy: which owner's trials start first: see :mod:`fluid.policies.owners.shares`.
        fairness: how much owners that got less than their share are preferred; 0 for not at all.
        spare_lanes: unused lanes that are at hand on each device; 0 for none.
        further: make policies of one's own, which are asked after Fluid's (docs/extending.md).
    """

    def __init__(
        self,
        planner: Planner,
        profile: Profile | None = None,
        *,
        max_packing: int = DEFAULT_MAX_PACKING,
        max_fused: int = 1,
        insists_on_fusing: bool = False,
        turns: int = 1,
        in_rounds: bool = False,
        max_width: int | None = None,
        max_failures: int | None = None,
        resident_limit: int = DEFAULT_RESIDENT_LIMIT,
        watermark: float = DEFAULT_MEMORY_WATERMARK,
        group_policy: str = DEFAULT_GROUP_POLICY,
        fairness: float = 0.0,
        spare_lanes: int = 0,
        further: Iterable[Callable[[SessionState], Policy]] = (),
    ) -> None:
        self.planner = planner
        trials, queue, table, occupancy = Trials(), StartQueue(), RunningTable(), Occupancy(watermark=watermark)
        deadlines, policies = Deadlines(), Policies()
        self.jobs = jobs = OpenJobs(occupancy)
        profile = profile if profile is not None else Profile()
        lanes = Lanes(require_integer("resident_limit", resident_limit, at_least=0), occupancy.memory)
        estimates = Estimates(
            profile,
            occupancy,
            table,
            max_packing=require_integer("max_packing", max_packing, at_least=1),
            max_width=planner.d if max_width is None else require_integer("max_width", max_width, at_least=1),
            max_fused=require_integer("max_fused", max_fused, at_least=1),
            insists_on_fusing=insists_on_fusing,
            turns=require_integer("turns", turns, at_least=1),
        )
        allocations = Allocations(trials, occupancy, estimates, table, jobs)
        measuring = Measuring(trials, profile, occupancy, estimates, allocations)
        self.shares = shares = GroupShares(
            require_one_of("group_policy", group_policy, GROUP_POLICIES),
            require_number("fairness", fairness, at_least=0.0),
            Owners(),
            trials,
            queue,
            occupancy,
            estimates,
            allocations.work,
            jobs,
        )
        core = SessionState(
            profile=profile,
            trials=trials,
            queue=queue,
            lanes=lanes,
            occupancy=occupancy,
            memory=occupancy.memory,
            estimates=estimates,
            allocations=allocations,
            measuring=measuring,
            timing=IterationTiming(trials, occupancy),
            scheduling=Scheduling(
                planner,
                trials,
                queue,
                occupancy,
                lanes,
                estimates,
                table,
                allocations,
                shares,
                policies,
            ),
            deadlines=deadlines,
            watching=Watching(deadlines, estimates, lanes),
            feasibility=Feasibility(occupancy),
            sharing=shares,
            policies=policies,
        )
        super().__init__(
            core, None if max_failures is None else require_integer("max_failures", max_failures, at_least=0)
        )
        self._hung = HungTrials(core)
        self.demand = DeviceDemand(core)
        self.drains = Drains(core, self._lifecycle, self._residency, self._resizing, self._failures.device_lost)
        self.retirements = Retirements(core, self.drains, self.demand)
        self.gangs = Reservations(trials, occupancy, estimates, queue, shares)
        self.admission = Admitting(trials, queue, occupancy, estimates, allocations.work)
        self.urgency = Urgency(core, self._lifecycle)
        self.quick_checks = QuickChecks(core, self._lifecycle, shares)
        self.overpacking = Overpacking(core, table)
        self.spares = SpareLanes(core, require_integer("spare_lanes", spare_lanes, at_least=0))
        self.checkpoints = CheckpointValues(core)
        moves = not isinstance(planner.replanner(), KeepWidths)
        self._register(
            (
                # Lanes are killed whose trials hang, or do not clean up, and devices given up that do not work.
                self._hung,
                CleanUps(core),
                Strikes(core, self._failures.device_lost),
                # What other drivers run comes and goes before anything is paused or placed.
                Elsewhere(core, self._submissions, self._residency, self._resizing),
                # What waits for another trial's state is asked for, or given up, before anything is placed.
                SharedRuns(core, self._submissions, self._lifecycle, self._residency),
                Forks(core, self._calls),
                # Trials that the user pauses leave devices that retire, and these then drain.
                self._user_pauses,
                self.retirements,
                self.drains,
                # Devices are kept for whom they are cleared, then for gangs, then where memory is scarce.
                self.urgency,
                self.gangs,
                self.admission,
                # Then one is cleared for one iteration of what nothing is known of; in rounds, that comes first anyway.
                *([] if in_rounds else [self.quick_checks]),
                # Trials advance in rounds once all that fits has started.
                *([Rotation(core, self._lifecycle, self._residency)] if in_rounds else []),
                # What trials take is predicted before they get a group to be fused with.
                Cohorts(profile, estimates, allocations, measuring),
                # On a tick trials leave full devices, then lanes in which they wait, then go to other widths.
                self.overpacking,
                Fusing(core, Turns(trials, lanes, occupancy, estimates, measuring)),
                Rebalancing(core, table, moves=moves),
                # Then devices change hands between owners, for deadlines first, and last within one's own trials.
                DeadlinePauses(core, shares),
                Transfers(core, shares),
                Preemptions(core, planner.preempts),
                Waits(core),
                # At the end of the instant lanes are at hand for the next, and stores learn what checkpoints are worth.
                self.spares,
                self._failures.starts,
                self.checkpoints,
                *(make_policy(core) for make_policy in further),
            )
        )

    @property
    def only_spreads(self) -> bool:
        """Whether a tick could only widen trials onto idle devices: none waits, and none hinders another."""
        return not self.queue and not self.overpacking.has_overpacking

    def seconds_left(self, group_id: str, now: float | None = None) -> float | None:
        """Predicted seconds until a group has ended, from ``now``, or from the latest event where that is ``None``.

        ``None`` where no trial was measured, one hangs, or one waits for devices that there are not.
        """
        if self.hangs(group_id, self._core.now if now is None else now) or self.awaited(group_id):
            return None
        return seconds_left(self.groups[group_id].live.values(), self.occupancy, self.estimates)

    def lateness(self, group_id: str, now: float) -> GroupLateness | None:
        """How a group stands with regard to its deadline at a time; ``None`` if it has none, or has ended."""
        return self.shares.lateness(self.groups[group_id].owner, now)

    def hangs(self, group_id: str, now: float) -> bool:
        """Whether a trial of a group has given no result for far longer than usual."""
        return any(self._hung.silence(trial, now) is not None for trial in self.groups[group_id].live.values())

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Returns the trials that have given no result for far longer than usual, and for how many seconds."""
        held = (self.trials.by_row.get(row) for row in sorted(self.occupancy.held))  # No others run.
        silences = ((trial.trial_id, self._hung.silence(trial, now)) for trial in held if trial is not None)
        return [(trial_id, seconds) for trial_id, seconds in silences if seconds is not None]

"""Puts the parts of a session's state together."""

from __future__ import annotations

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine.allocations import Allocations
from fluid.engine.cohorts import Cohorts
from fluid.engine.core import SessionState
from fluid.engine.deadlines import Deadlines
from fluid.engine.estimates import Estimates
from fluid.engine.feasibility import Feasibility
from fluid.engine.fusion import Fusing
from fluid.engine.group_shares import GroupShares
from fluid.engine.iteration_timing import IterationTiming
from fluid.engine.lanes import Lanes
from fluid.engine.measuring import Measuring
from fluid.engine.owners import Owners
from fluid.engine.rebalancing import Rebalancing
from fluid.engine.running_table import RunningTable
from fluid.engine.scheduling import Scheduling
from fluid.engine.trials import Trials
from fluid.engine.turns import Turns
from fluid.engine.watching import Watching
from fluid.measure.profile import Profile
from fluid.planners.arrangement import KeepWidths
from fluid.planners.planner import Planner


def make_session_state(
    planner: Planner,
    profile: Profile,
    *,
    max_packing: int,
    max_fused: int,
    insists_on_fusing: bool,
    turns: int,
    in_rounds: bool,
    max_width: int,
    resident_limit: int,
    watermark: float,
    group_policy: str,
    fairness: float,
) -> SessionState:
    """The state of a session without devices and trials (arguments: see :class:`fluid.engine.state.EngineState`)."""
    deadlines, owners = Deadlines(), Owners()
    trials, queue, table, occupancy = Trials(), StartQueue(), RunningTable(), Occupancy(watermark=watermark)
    lanes = Lanes(resident_limit, occupancy.memory)
    estimates = Estimates(
        profile,
        occupancy,
        table,
        max_packing=max_packing,
        max_width=max_width,
        max_fused=max_fused,
        insists_on_fusing=insists_on_fusing,
        turns=turns,
    )
    allocations = Allocations(trials, occupancy, estimates, table)
    moves = not isinstance(planner.replanner(), KeepWidths)
    rebalancing = Rebalancing(trials, queue, occupancy, estimates, table, allocations, moves=moves)
    measuring = Measuring(trials, profile, occupancy, estimates, allocations, rebalancing)
    shares = GroupShares(group_policy, fairness, owners, trials, queue, occupancy, estimates, allocations.work)
    return SessionState(
        profile=profile,
        trials=trials,
        queue=queue,
        lanes=lanes,
        occupancy=occupancy,
        memory=occupancy.memory,
        estimates=estimates,
        allocations=allocations,
        rebalancing=rebalancing,
        measuring=measuring,
        timing=IterationTiming(trials, occupancy),
        scheduling=Scheduling(
            planner, trials, queue, occupancy, lanes, estimates, table, allocations, shares, in_rounds=in_rounds
        ),
        in_rounds=in_rounds,
        deadlines=deadlines,
        watching=Watching(deadlines, estimates, lanes),
        feasibility=Feasibility(occupancy),
        cohorts=Cohorts(profile, estimates, allocations, measuring),
        owners=owners,
        shares=shares,
        fusing=Fusing(
            trials, lanes, estimates, allocations, measuring, Turns(trials, lanes, occupancy, estimates, measuring)
        ),
    )

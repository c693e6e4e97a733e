"""The rehearsal in force: what ``fluid rehearse`` puts in place of the devices of a script's executors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid.rehearsal.overheads import FREE, Overheads
from fluid.rehearsal.replayable import Replayable
from fluid.resources import DeviceChoice


@dataclass(frozen=True, kw_only=True)
class RehearsalPlan:
    """How executors that are made while it is in force rehearse.

    Example:
        >>> from fluid.rehearsal import Overheads, RehearsalPlan
        >>> plan = RehearsalPlan(devices=32, overheads=Overheads(alpha=1.2))
        >>> plan.devices, plan.source
        (32, None)

    Attributes:
        devices: as for :class:`fluid.FluidExecutor`; ``None`` for what the script asks for.
        source: replays all trials; ``None`` for their trainables themselves.
        overheads: what packing, scaling and moves cost.
        options: options of executors that are set in place of the script's, by name.
        folder: where run folders are made, numbered from 1 on, in place of those that the script names; ``None`` for
            what the script asks for.
        began: called with the run folder of each executor that is made.
        seed: added to the seeds of :func:`fluid.run`, so that rehearsals of one script draw other configs.

    Loggers and metrics ports of executors are left out: what is rehearsed has not happened.
    """

    devices: DeviceChoice = None
    source: Replayable | None = None
    overheads: Overheads = FREE
    options: tuple[tuple[str, Any], ...] = ()
    folder: Path | None = None
    began: Callable[[Path], None] | None = None
    seed: int = 0

    def folder_for(self, asked: Any) -> Any:
        """Returns the run folder of a further executor that asks for one."""
        if self.folder is None:
            return asked
        number = 1
        while (self.folder / str(number)).exists():
            number += 1
        return self.folder / str(number)


_in_force: list[RehearsalPlan] = []


@contextlib.contextmanager
def rehearsing(plan: RehearsalPlan) -> Iterator[None]:
    """Makes all executors of this process rehearse by a plan, whatever backend they ask for.

    Example:
        >>> import fluid
        >>> from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing
        >>> class Source:
        ...     def replay(self, config, iterations):
        ...         return [ReplayedIteration({"loss": config["lr"] / i}, seconds=60.0) for i in iterations]
        >>> def train(config):
        ...     yield {"loss": config["lr"]}  # Takes a minute, in truth.
        >>> with rehearsing(RehearsalPlan(devices=2, source=Source())):
        ...     with fluid.FluidExecutor(max_width=1, verbose=0) as executor:
        ...         group = fluid.TrialGroup([fluid.Trial(train, {"lr": lr}, budget=5) for lr in (0.1, 0.2)])
        ...         handle = executor.submit_trialgroup(group)
        ...         ended = handle.wait()
        >>> handle.makespan
        300.0
    """
    _in_force.append(plan)
    try:
        yield
    finally:
        _in_force.remove(plan)


def plan_in_force() -> RehearsalPlan | None:
    """The innermost plan; ``None`` if there is none."""
    return _in_force[-1] if _in_force else None


def seed_in_force(seed: int | None) -> int | None:
    """The seed that a search is to use in place of the one it was given; ``None`` stays as it is."""
    plan = plan_in_force()
    return seed if plan is None or seed is None else seed + plan.seed

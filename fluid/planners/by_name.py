"""The planners by name. A new planner is added here."""

from __future__ import annotations

from fluid.dynamic_fluid import DynamicFluid
from fluid.errors import require_one_of
from fluid.planners.fifo import Fifo
from fluid.planners.portfolio import Portfolio
from fluid.planning.planner import Planner
from fluid.planning.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.static_fluid import StaticFluid

#: From the simplest to the best; ``portfolio`` is the default.
PLANNERS: dict[str, type[Planner]] = {planner.name: planner for planner in (Fifo, StaticFluid, DynamicFluid, Portfolio)}


def make_planner(name: str, *, c: int = DEFAULT_MAX_PACKING, d: int = DEFAULT_MAX_WIDTH) -> Planner:
    """Makes the planner of that name.

    Args:
        name: ``"fifo"``, ``"static"``, ``"dynamic"`` or ``"portfolio"``.
        c: most trials to pack on one device.
        d: most devices for one trial.

    Raises:
        InvalidFieldError: the planner is unknown.
    """
    return PLANNERS[require_one_of("planner", name, PLANNERS)](c=c, d=d)

"""Tells the code of a lane which bundles of placement groups its devices are, so that it can start Ray actors there."""

from __future__ import annotations

import base64
import json
import os
import pickle
from typing import Any, NamedTuple

from fluid._imports import try_import

with try_import("Ray", extra="ray"):
    from ray.util.placement_group import PlacementGroup

#: Environment variable of a lane.
VARIABLE = "FLUID_RAY_BUNDLES"


class Bundle(NamedTuple):
    """One device: a bundle of a placement group.

    Attributes:
        group: the pickled placement group.
        number: the bundle's in it.
    """

    group: bytes
    number: int


def variables_of(group: Any, number: int) -> tuple[tuple[str, str], ...]:
    """Returns the environment variable that tells a lane the bundle of its device: a list, as JSON."""
    return ((VARIABLE, json.dumps([[base64.b64encode(pickle.dumps(PlacementGroup(group.id))).decode(), number]])),)


def bundles_of_lane() -> tuple[Bundle, ...]:
    """Returns the bundles of this lane's devices; none where Fluid does not have them from Ray."""
    told = json.loads(os.environ.get(VARIABLE, "[]"))
    return tuple(Bundle(base64.b64decode(group), number) for group, number in told)

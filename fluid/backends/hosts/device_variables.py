"""Environment variables that tell code in a lane about its device."""

from __future__ import annotations

import json


def device_variables(index: int) -> tuple[tuple[str, str], ...]:
    """Returns the variable that has the indices of a lane's devices, given that of one: ``FLUID_DEVICES="[0]"``."""
    return (("FLUID_DEVICES", json.dumps([index])),)

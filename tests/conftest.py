"""What all tests share: the hypothesis profile, and helper modules beside the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# Tests are imported in importlib mode, which leaves sys.path alone; helpers such as brute_force.py live here.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)

# Nothing is timed. On CI every run tries the same examples, so that a failure belongs to the change it shows up with.
settings.register_profile(
    "fluid",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fluid")

"""Without HpBandSter, the integration says how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
sys.modules["hpbandster"] = sys.modules["ConfigSpace"] = None
import fluid.errors
try:
    import fluid.integrations.hpbandster
except fluid.errors.MissingDependencyError as error:
    print(error)
"""


def test_the_error_for_a_missing_package_has_the_command_that_installs_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "pip install 'ConfigSpace>=1.2' 'hpbandster>=0.7.4'" in done.stdout

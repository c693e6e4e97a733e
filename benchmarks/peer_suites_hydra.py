"""Hydra's own tests of launchers, as ``peer_suites.py`` runs them: of its basic launcher, or of Fluid's."""

from __future__ import annotations

import os

import peer_suites_adapters
import pytest
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

NAME = "fluid" if os.environ.get("FLUID_PEER_SIDE") == "fluid" else "basic"
OVERRIDES = ["hydra.launcher.devices=2", "hydra.launcher.backend=local"] if NAME == "fluid" else []


@pytest.fixture(autouse=True)
def counted() -> None:
    """All tests launch jobs, some in processes of their own."""
    if NAME == "fluid":
        peer_suites_adapters.count()


# The ids are those of both launchers.
@pytest.mark.parametrize("launcher_name, overrides", [pytest.param(NAME, OVERRIDES, id="launcher")])
class TestLauncher(LauncherTestSuite):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "launcher_name, overrides",
    [pytest.param(NAME, [*OVERRIDES, "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"], id="launcher")],
)
class TestBatches(BatchedSweeperTestSuite):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "task_launcher_cfg, extra_flags",
    [pytest.param({}, ["-m", f"hydra/launcher={NAME}", *OVERRIDES], id="launcher")],
)
class TestIntegration(IntegrationTestSuite):  # type: ignore[misc]
    pass

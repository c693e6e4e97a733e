"""Trials that ask for devices, on two nodes of a real cluster."""

from __future__ import annotations

from typing import Any

import pytest

from fluid import FluidExecutor, InvalidFieldError, Requires, Trial, TrialGroup

ray = pytest.importorskip("ray")
from ray_drive import OTHER_MACHINE, PATIENCE, Counter  # noqa: E402

from fluid.backends.hosts.folders import HERE  # noqa: E402
from fluid.backends.ray import RayBackend  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_gangs_stay_on_one_node_and_requirements_choose_nodes(cluster: Any) -> None:
    tag = f"at-{OTHER_MACHINE}"
    trials = [
        Trial(Counter, budget=2, trial_id="gang3", devices=3),
        Trial(Counter, budget=2, trial_id="gang2", devices=2, requires=Requires(host=OTHER_MACHINE)),
        *(Trial(Counter, budget=2, trial_id=f"tagged{k}", requires=Requires(tags=tag)) for k in range(3)),
        *(Trial(Counter, budget=2, trial_id=f"here{k}", requires=Requires(host=HERE)) for k in range(3)),
    ]
    with FluidExecutor(backend=RayBackend(), verbose=0) as executor:
        hosts = {device.index: device.host for device in executor.devices}
        assert {device.host for device in executor.devices if tag in device.tags} == {OTHER_MACHINE}
        handle = executor.submit_trialgroup(TrialGroup(trials))
        assert handle.wait(PATIENCE)
        ran = {result.trial_id: [hosts[index] for index in result.device_ids] for result in handle.results()}
        assert ran["gang3"] == [HERE] * 3
        assert ran["gang2"] == [OTHER_MACHINE] * 2
        assert {host for k in range(3) for host in ran[f"tagged{k}"]} == {OTHER_MACHINE}
        assert {host for k in range(3) for host in ran[f"here{k}"]} == {HERE}
        with pytest.raises(InvalidFieldError, match="no 5 devices of one host can be had"):
            handle.add(Trial(Counter, trial_id="gang5", devices=5))

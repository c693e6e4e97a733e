"""Drivers that work a sweep together while they are killed and stopped, and their clocks jump."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import member_script
import pytest
from check_log import check_log
from member_script import BUDGET, LEASE_S, SAMPLES
from member_torture import ROOT, Torture, shim_or_none

import fluid
from fluid.joint.membership import MEMBERS


def torture(folder: Path, algorithm: str, *, faults: int, members: int, shim: Path | None) -> None:
    slow, shared = folder / "slow", folder / "shared"
    if faults:
        slow.touch()
    arguments = [algorithm, str(slow)]
    command = [member_script.__file__, "join", str(shared), *arguments]
    torn = Torture(command, shared, folder, members=members, faults=faults, lease_s=LEASE_S, shim=shim).run(
        after_faults=lambda: slow.unlink(missing_ok=True)
    )
    assert [code for code, _ in torn.ended] == [0] * members, torn.ended
    assert torn.orphans == 0
    assert torn.injected.total() == faults, "the sweep was over before its faults"
    alone = folder / "alone"
    subprocess.run(
        [sys.executable, member_script.__file__, "alone", str(alone), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    trials = fluid.load(alone).trials
    found = check_log(
        shared,
        algorithm=algorithm,
        samples=SAMPLES,
        budget=BUDGET,
        alone=[(trial.config, [result.metrics["loss"] for result in trial.results]) for trial in trials],
        ended_well=members,
    )
    configs = [(trial.trial_id, trial.config) for trial in trials]
    for name in set(found.folders.values()):
        known = (
            fluid.load(shared / MEMBERS / name).trials if (shared / MEMBERS / name / "trials.jsonl").exists() else []
        )
        assert [(trial.trial_id, trial.config) for trial in known] == configs[: len(known)]
    print(torn.injected, len(found.events), len(found.lost), found.void)


@pytest.mark.parametrize("algorithm", ["asha", "hyperband"])
def test_undisturbed(tmp_path: Path, algorithm: str) -> None:
    torture(tmp_path, algorithm, faults=0, members=3, shim=None)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["asha", "hyperband"])
@pytest.mark.parametrize("is_slow", [False, True], ids=["plain", "shim"])
def test_many_faults(tmp_path: Path, algorithm: str, is_slow: bool) -> None:
    shim = None
    if is_slow and (shim := shim_or_none(tmp_path / "shim")) is None:
        pytest.skip("no C compiler")
    torture(tmp_path, algorithm, faults=50, members=4, shim=shim)

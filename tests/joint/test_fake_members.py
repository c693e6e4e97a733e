"""Members without sessions under torture: the log, the state and the membership by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_member
import pytest
from check_log import check_log
from fake_member import BUDGET, RESULTS, SAMPLES, config_of, loss_of
from member_torture import Torture, shim_or_none


def results_of(folder: Path) -> dict[str, list[Any]] | None:
    """What a member has written that ended well."""
    file = folder / RESULTS
    if not file.exists():
        return None
    return {trial_id: [*map(json.loads, texts)] for trial_id, texts in json.loads(file.read_text()).items()}


def torture(folder: Path, algorithm: str, *, faults: int, members: int, shim: Path | None) -> None:
    slow = folder / "slow"
    if faults:
        slow.touch()
    shared = folder / "shared"
    shared.mkdir()
    command = [fake_member.__file__, str(shared), algorithm, str(slow)]
    torture = Torture(command, shared, folder, members=members, faults=faults, lease_s=fake_member.LEASE_S, shim=shim)
    torn = torture.run(after_faults=lambda: slow.unlink(missing_ok=True))
    assert [code for code, _ in torn.ended] == [0] * members, torn.ended
    assert torn.orphans == 0
    assert torn.injected.total() == faults, "the sweep was over before its faults"
    alone = [
        (config_of(number), [loss_of(config_of(number), step + 1) for step in range(BUDGET)])
        for number in range(SAMPLES)
    ]
    found = check_log(
        shared,
        algorithm=algorithm,
        samples=SAMPLES,
        budget=BUDGET,
        alone=alone,
        results_of=results_of,
        ended_well=members,
    )
    print(torn.injected, len(found.events), len(found.lost), found.void)


@pytest.mark.parametrize("algorithm", ["asha", "hyperband"])
def test_undisturbed(tmp_path: Path, algorithm: str) -> None:
    torture(tmp_path, algorithm, faults=0, members=3, shim=None)


def test_a_few_faults(tmp_path: Path) -> None:
    torture(tmp_path, "asha", faults=5, members=3, shim=shim_or_none(tmp_path / "shim"))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["asha", "hyperband"])
@pytest.mark.parametrize("is_slow", [False, True], ids=["plain", "shim"])
def test_many_faults(tmp_path: Path, algorithm: str, is_slow: bool) -> None:
    shim = None
    if is_slow and (shim := shim_or_none(tmp_path / "shim")) is None:
        pytest.skip("no C compiler")
    torture(tmp_path, algorithm, faults=50, members=4, shim=shim)

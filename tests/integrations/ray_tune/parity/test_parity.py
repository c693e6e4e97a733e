"""The same sweeps under stock Tune and under Fluid: whatever a user of Tune can see is the same.

A case (``cases_*.py``) is a small sweep that runs on both sides; its whole observation is compared. CI runs the most
telling ones; ``make test-parity`` runs all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from parity_case import Side
from parity_table import CASES, Case

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


#: What every case with a Tuner uses.
TUNERS_OWN = {
    "Tuner.trainable",
    "Tuner.restore.path",
    "Tuner.restore.trainable",
    "Tuner.can_restore",
    "Tuner.get_results",
    "Tuner.restore",
}


def _marked(case: Case) -> Any:
    marks = [] if case.telling else [pytest.mark.parity]
    if case.defect:
        marks.append(pytest.mark.xfail(strict=True, run=not case.hangs, reason=case.defect))
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_parity(case: Case, executor: Any, tmp_path: Path) -> None:
    sides = [Side(name, tmp_path / name, executor, case.without) for name in ("stock", "fluid")]
    observed = []
    for side in sides:
        returned = case.function(side)
        observed.append({"sweeps": side.seen, "returned": side.plain(returned)})
    stock, fluid = sides
    assert stock.used == fluid.used
    settings = {name for name in case.covers if name.startswith(("run.", "Tuner.", "TuneConfig.", "RunConfig."))}
    assert settings - {"run.run_or_experiment"} <= stock.used | TUNERS_OWN, "covers what it does not use"
    differences = list(differences_of(*observed))
    if differences:
        pytest.fail("\n".join(["stock | Fluid", *differences[:40]]), pytrace=False)


def differences_of(stock: Any, fluid: Any, path: str = "") -> Iterator[str]:
    """The places at which two observations differ, with both values."""
    if isinstance(stock, dict) and isinstance(fluid, dict):
        for name in [*stock, *(name for name in fluid if name not in stock)]:
            yield from differences_of(stock.get(name, "missing"), fluid.get(name, "missing"), f"{path}/{name}")
    elif isinstance(stock, list) and isinstance(fluid, list) and len(stock) == len(fluid):
        for number, (mine, theirs) in enumerate(zip(stock, fluid, strict=True)):
            yield from differences_of(mine, theirs, f"{path}/{number}")
    elif stock != fluid:
        yield f"{path}: {stock!r} | {fluid!r}"

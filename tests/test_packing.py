"""The values of packing: each declared once, told in the docs as it is, and named nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, InvalidFieldError, Sharing, Trial, TrialGroup
from fluid.packing import DEFAULT_GPU_WAY, GPU_WAYS, PACKINGS, TIMESLICE, Packing, gpu_way_of
from fluid.results.run_files import read_facts

ROOT = Path(__file__).resolve().parents[1]
#: Where a word that is a value is something else: the entry of a report on NVIDIA MPS.
ELSEWHERE = {("fluid/reports/doctor.py", "mps")}


def test_the_docs_say_what_is_declared() -> None:
    rows = "".join(
        f'| `"{way.name}"` | {way.admits} | {way.bounds or "no meaning"} | {way.needs} | {way.measures} |\n'
        for way in PACKINGS.values()
    )
    assert rows in (ROOT / "docs" / "devices.md").read_text(encoding="utf-8"), f"docs/devices.md lacks:\n{rows}"


def test_no_other_module_names_a_value() -> None:
    # "fused", "lane", "auto" and "off" are words of other things, too.
    values, found = {"mps", "timeslice"}, set()
    for folder in ("fluid", "integrations", "hydra_plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == "fluid/packing.py" or name.startswith("fluid/integrations/"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in values:
                    found.add((name, node.value))
    assert found == ELSEWHERE


@pytest.mark.parametrize("way", PACKINGS.values(), ids=PACKINGS)
def test_what_a_value_says_of_itself_agrees(way: Packing) -> None:
    assert bool(way.bounds) == (way.has_processes or way.takes_turns), "max_packing bounds something, or nothing"
    assert way.has_processes or not way.tries_mps, "MPS is for several processes"
    assert way.tries_mps or not way.needs_mps
    assert way.fuses or not way.insists_on_fusing
    assert way.most_processes(None) == (4 if way.has_processes else 1)
    assert way.most_processes(2) == (2 if way.has_processes else 1)
    assert way.most_turns(None, "longest_first") == (64 if way.takes_turns else 1)
    assert way.most_turns(None, "srtf") == (64 if way.takes_turns or way.has_processes else 1)
    assert way.most_turns(3, "srtf") == (3 if way.takes_turns else 64 if way.has_processes else 1)
    assert way.most_fused(8) == (8 if way.fuses else 1)
    assert way.gpu_way(None) is (way if way.has_processes else TIMESLICE)
    assert way.gpu_way(1) is (way if way.needs_mps else TIMESLICE)


def test_backends_take_the_ways_of_several_processes() -> None:
    assert sorted(GPU_WAYS) == ["auto", "mps", "timeslice"] and GPU_WAYS[DEFAULT_GPU_WAY] is TIMESLICE
    with pytest.raises(InvalidFieldError, match=r"sharing='lane': must be one of auto, mps, timeslice"):
        gpu_way_of("lane")


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"loss": 1.0}


def test_a_further_value_is_one_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shy = Packing(name="shy", needs="-", admits="-", measures="-", bounds="most shy ones", has_processes=True)
    monkeypatch.setitem(PACKINGS, shy.name, shy)
    monkeypatch.setitem(GPU_WAYS, shy.name, shy)
    with FluidExecutor("local", 1, packing="shy", max_packing=2, run_dir=tmp_path / "run", verbose=0) as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(train)])).wait(60.0)
    assert read_facts(tmp_path / "run")["packing"] == "shy"
    with pytest.raises(InvalidFieldError, match=r"with packing='shy' it is the most shy ones"):
        Sharing("shy", max_packing=0)
    with pytest.raises(InvalidFieldError, match=r"packing='mute': must be one of .*shy, timeslice"):
        Sharing("mute")

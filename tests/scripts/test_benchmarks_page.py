"""docs/benchmarks.md and README's table of figures: both are of benchmarks/results, and their commands exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
#: Measured elsewhere or without ``measure.py``: on a GPU, and how tests and examples of other projects ended.
OTHERS = {"gpu_2026-11-27", "peer_suites", "official_examples"}
COMMAND = re.compile(r"`python ((?:benchmarks|scripts)/\w+\.py)([^`]*)`")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import benchmarks_page

    yield benchmarks_page
    for name in ("benchmarks_page", "gpu_note", "paper_gains"):
        sys.modules.pop(name, None)


def test_the_page_and_the_table_are_of_the_results(writer: Any) -> None:
    page, table, used = writer.page()
    again = "python scripts/benchmarks_page.py writes them anew"
    written, readme = (path.read_text(encoding="utf-8") for path in (writer.PAGE, writer.README))
    for old, new in ((written, page), (readme, writer.with_table(readme, table))):
        assert [(a, b) for a, b in zip(old.splitlines(), new.splitlines(), strict=False) if a != b][:1] == [], again
        assert len(old) == len(new), again
    assert len(page.split()) <= 2000
    assert used == {path.stem for path in RESULTS.iterdir()}, "files that no figure is of"


def test_all_were_measured_alike(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import measure

    measured = {path.stem: json.loads(path.read_text()) for path in RESULTS.iterdir() if path.stem not in OTHERS}
    assert set(measured) == set(measure.COMMANDS)
    assert len({found["date"] for found in measured.values()}) == 1
    assert len({json.dumps(found["machine"], sort_keys=True) for found in measured.values()}) == 1
    for name, found in measured.items():
        assert found["command"] == measure.COMMANDS[name].shown()
        assert len(found["runs"]) == 2
        assert all(run["seconds"] > 0.0 and run["load"]["load_1_min"] >= 0.0 for run in found["runs"])
    sys.modules.pop("measure")


def test_commands_exist_with_their_options(writer: Any) -> None:
    commands = COMMAND.findall(" ".join(writer.PAGE.read_text(encoding="utf-8").split()))
    assert len(commands) > 20
    for script, words in commands:
        text = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"(?<= )--[\w-]+", words):
            assert f'"{option}"' in text or 'f"--{option}"' in text, f"{script} has no {option}"


def test_a_figure_of_unlike_runs_is_a_range(writer: Any) -> None:
    assert writer.shown([1.04, 1.01], ".1f") == "1.0"
    assert writer.shown([1.07, 1.01], ".1f") == "1.0 to 1.1"
    assert writer.shown([3, 12], "d") == "3 to 12"


def test_rows_of_unlike_runs_are_refused(writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*values: str) -> Any:
        content = {"runs": [{"figures": {"rows": [["a", value]]}} for value in values]}
        (tmp_path / "x.json").write_text(json.dumps(content))
        return writer.Page()

    monkeypatch.setattr(writer, "RESULTS", tmp_path)
    page = write("1", "1")
    assert page.fill("{{rows: x: rows}} {{x: len(rows); d}}") == "| a | 1 | 1"
    assert page.used == {"x"}
    with pytest.raises(ValueError, match="the runs of x differ"):
        write("1", "2").fill("{{rows: x: rows}}")
    with pytest.raises(ValueError, match="no figure"):
        page.fill("{{x}}")


def test_a_measurement_goes_on_where_it_was_interrupted(
    writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import measure

    script = "import json, sys; json.dump({'n': int(sys.argv[1])}, open(sys.argv[3], 'w'))"
    (tmp_path / "x.py").write_text(script)
    monkeypatch.setattr(measure, "HERE", tmp_path)
    monkeypatch.setattr(measure, "COMMANDS", {"x": measure.Command("x.py 5"), "y": measure.Command("x.py DIR")})
    monkeypatch.setattr(measure, "wait_until_idle", lambda limit_s: {"busy_share": 0.0, "load_1_min": 0.5})
    for runs, known in ((1, 1), (2, 2), (2, 2)):
        monkeypatch.setattr(sys, "argv", ["measure.py", "--runs", str(runs), "--results", str(tmp_path)])
        assert measure.main() == 0
        found = json.loads((tmp_path / "x.json").read_text())
        assert found["command"] == "python benchmarks/x.py 5"
        assert [run["figures"] for run in found["runs"]] == [{"n": 5}] * known
    assert not (tmp_path / "y.json").exists(), "left out without --data"
    sys.modules.pop("measure")

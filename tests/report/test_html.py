from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fluid.display.format import duration, tick_step
from fluid.errors import InvalidFieldError
from fluid.report.html import page_data, render_html, save_html
from fluid.report.loader import load_run
from fluid.trialgroup import Trial

Sessions = Callable[..., Any]
PAGE_SCRIPT = Path(__file__).parents[2] / "fluid" / "report" / "page.js"
FORMAT_SCRIPT = PAGE_SCRIPT.with_name("page.format.js")

#: What may not become part of the page, wherever a name can be given.
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&<!--"


class Page(HTMLParser):
    """The elements of a page, its embedded data and the text of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.data: Any = None
        self._path: list[str] = []
        self._table = ""
        self._is_data = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        self._is_data = tag == "script" and found.get("id") == "data"
        if tag == "table":
            self._table = found["id"] or ""
            self.cells[self._table] = []
        if tag == "tr":
            self.cells[self._table].append([])
        if tag in ("td", "th"):
            self.cells[self._table][-1].append("")
        if tag in ("td", "th", "table"):
            self._path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._path and tag == self._path[-1]:
            self._path.pop()
        self._is_data = False

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data = json.loads(data)
        elif self._path and self._path[-1] in ("td", "th"):
            self.cells[self._table][-1][-1] += data


def page_of(path: Path) -> Page:
    return Page(render_html(load_run(path)))


def test_the_page_needs_nothing_but_itself(small_run: Path) -> None:
    text = render_html(load_run(small_run))
    page = Page(text)
    assert page.addresses == []
    assert page.tags.count("script") == 3
    assert "link" not in page.tags
    assert "default-src 'none'" in text
    # The namespace of SVG is a name, not an address.
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text.replace("url(#plot)", "").replace("url(#strip)", "")


def test_the_header_tells_the_facts(small_run: Path) -> None:
    text = render_html(load_run(small_run))
    for fact in (
        "<h1>run</h1>",
        "<b>10 s</b>",
        "of 3 devices",
        "1 unfinished, 2 done, 1 failed",
        "1 resize<",
        "portfolio",
    ):
        assert fact in text


def test_the_tables_hold_every_group_trial_and_key(small_run: Path) -> None:
    cells = page_of(small_run).cells
    assert [row[0] for row in cells["groups"]] == ["group", "rung 0", "rung 1"]
    assert [row[:6] for row in cells["trials"]] == [
        ["trial", "group", "state", "iterations", "time", "widths"],
        ["a", "rung 0", "done", "3/3", "5.5 s", "1/2, x2"],
        ["b", "rung 0", "done", "2/2", "6 s", "1/2"],
        ["c", "rung 0", "failed", "1/2", "4 s", "x2"],
        ["d", "rung 1", "unfinished", "1/4", "2 s", "x3"],
    ]
    # act is the same for all trials, so it has no column.
    assert cells["trials"][0][6:] == ["lr", "last", "best"]
    assert cells["keys"][1] == ["net", "2 s", "1.250", "2", "1.000"]


def test_the_data_is_what_the_drawings_need(small_run: Path) -> None:
    data = page_of(small_run).data
    assert data == json.loads(json.dumps(page_data(load_run(small_run))))
    assert data["lanes"] == ["gpu 0", "gpu 1", "gpu 2"]
    assert data["makespan"] == 10.0
    assert [data["placements"][segment[3]] for segment in data["segments"]] == [
        "1/2 of gpu 0",
        "2 gpus: 1,2",
        "1/2 of gpu 0",
        "2 gpus: 1,2",
        "3 gpus: 0,1,2",
    ]
    assert [0, 0, 1, 0, 2] in data["blocks"]
    assert [metric["name"] for metric in data["metrics"]] == ["loss", "eval/f1", "epoch"]
    assert [metric["less"] for metric in data["metrics"]] == [True, False, False]
    a, b = data["trials"][:2]
    assert a["curves"][0] == [[1, 2, 3], [2.0, 4.0, 8.0], [0.9, 0.5, 0.4]]
    assert b["curves"][1] == [[1, 2], [3.0, 6.0], [0.25, 0.5]]
    assert (a["last"][0], a["low"][0], a["high"][0]) == ("0.4", "0.4", "0.9")
    assert a["last"][1] == ""
    assert a["facts"]["widths"] == "1/2 for 4 s, x2 for 1.5 s"
    times, shares = data["busy"]
    assert len(times) == len(shares) + 1


def test_what_users_name_is_text_only(session: Sessions) -> None:
    config = {EVIL: EVIL, "lr": 0.1}
    trials = [Trial(print, config, trial_id=EVIL, profile_key=EVIL), Trial(print, {EVIL: 2}, trial_id="b")]
    made = session({EVIL: trials}, planner=EVIL, name_of_run=EVIL, fluid=EVIL)
    made.results((EVIL, 1, 0.0, 1.0, 1.0, (0,), {EVIL: 1.0, "note": EVIL, "nan": float("nan")}))
    text = render_html(load_run(made.close()))
    page = Page(text)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert "<!--" not in text
    assert page.cells["groups"][1][0] == page.cells["trials"][1][0] == EVIL
    assert page.data["trials"][0]["id"] == EVIL
    assert page.data["metrics"][0]["name"] == EVIL
    assert page.data["trials"][0]["config"][EVIL] == EVIL


def test_the_script_writes_names_as_text_only() -> None:
    for script in (PAGE_SCRIPT, FORMAT_SCRIPT):
        text = script.read_text(encoding="utf-8")
        for way_to_write_markup in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
            assert way_to_write_markup not in text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_formats_times_as_python_does() -> None:
    seconds = [0.0, 1e-5, 0.0004, 0.0123, 0.0999, 0.1, 0.25, 1.0, 9.996, 59.94, 99.96, 123.4, 300.0, 300.1, 3601.0]
    seconds += [10800.0, 10801.0, 86400.0, 361234.5, 1e7]
    axes = [(span, most) for span in (*seconds, 2.5, 17.0, 4500.0) for most in (1, 6, 14)]
    calls = f"{json.dumps(seconds)}.map(format.duration), {json.dumps(axes)}.map(([a, b]) => format.tickStep(a, b))"
    source = f"{FORMAT_SCRIPT.read_text(encoding='utf-8')}\nconsole.log(JSON.stringify([{calls}]));"
    run = subprocess.run(["node", "-e", source], capture_output=True, text=True, check=True, timeout=60)
    durations, steps = json.loads(run.stdout)
    assert durations == [duration(value) for value in seconds]
    assert steps == pytest.approx([tick_step(span, most) for span, most in axes], rel=1e-9)


def test_long_runs_are_thinned_out(session: Sessions) -> None:
    made = session({"g": [Trial(print, budget=5000, trial_id="a")]})
    made.results(*(("a", k + 1, k * 2.0, k * 2.0 + 1.0, 1.0, (0,), {"loss": 1.0 / (k + 1)}) for k in range(2500)))
    data = page_of(made.close()).data
    iterations, times, values = data["trials"][0]["curves"][0]
    assert len(iterations) == len(times) == len(values) == 400
    assert (iterations[0], iterations[-1]) == (1, 2500)
    assert len(data["busy"][1]) <= 2000


def test_values_of_any_kind(session: Sessions) -> None:
    values = [1, 2.5, "x" * 1000, None, True, [1, {"a": 2}], float("inf")]
    trials = [Trial(print, {"p": value}, trial_id=f"t{k}") for k, value in enumerate(values)]
    page = page_of(session({"g": trials}).close())
    shown = [row[6] for row in page.cells["trials"][1:]]
    assert shown[:2] == ["1", "2.5"]
    assert shown[2].endswith("...")
    assert shown[3:5] == ["", "true"]
    assert page.data["trials"][5]["config"]["p"] == '[1, {"a": 2}]'


def test_a_session_that_has_only_begun(session: Sessions) -> None:
    page = page_of(session({}).close())
    assert (page.data["segments"], page.data["trials"], page.data["lanes"]) == ([], [], [])
    assert page.cells["trials"] == [["trial", "group", "state", "iterations", "time", "widths", "last", "best"]]


def test_notes_are_shown(small_run: Path) -> None:
    (small_run / "session.json").write_text("{")
    assert '<p class="note">session.json is not JSON' in render_html(load_run(small_run))


def test_saving(small_run: Path, tmp_path: Path) -> None:
    run = load_run(small_run)
    save_html(tmp_path / "page.html", run)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == render_html(run)
    with pytest.raises(InvalidFieldError, match=r"html='.*nowhere.*': cannot be written"):
        save_html(tmp_path / "nowhere" / "page.html", run)


def test_hyperparameters_without_a_column_are_named(session: Sessions) -> None:
    names = [f"p{k}" for k in range(8)]
    trials = [Trial(print, {**dict.fromkeys(names, k), "net": {"depth": k}}, trial_id=f"t{k}") for k in range(2)]
    text = render_html(load_run(session({"g": trials}).close()))
    assert Page(text).cells["trials"][0][6:12] == names[:6]
    assert "Select a trial to see p6, p7, net." in text

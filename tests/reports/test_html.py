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
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError
from fluid.reports.page.data import page_data
from fluid.reports.page.html import SCRIPTS, embedded, html_page, save_html
from fluid.reports.run.loader import load_run
from fluid.results.metrics import Goal
from fluid.trialgroup import Search, Trial

Sessions = Callable[..., Any]
SCRIPT_FILES = sorted((Path(__file__).parents[2] / "fluid" / "reports" / "page").glob("page*.js"))
FORMAT_SCRIPT = next(path for path in SCRIPT_FILES if path.name == "page.format.js")

#: What may not become part of the page, wherever a name can be given.
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&<!--"


class Page(HTMLParser):
    """The elements of a page and its embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.data: Any = None
        self._is_data = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        self._is_data = tag == "script" and found.get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._is_data = False

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data = json.loads(data)


def data_of(*paths: Path) -> Any:
    return Page(html_page([load_run(path) for path in paths])).data


def test_the_page_needs_nothing_but_itself(small_run: Path) -> None:
    text = html_page([load_run(small_run)])
    page = Page(text)
    assert page.addresses == []
    assert page.tags.count("script") == 2
    assert "link" not in page.tags
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    assert not re.findall(r"https?://[^\s\"']+", text)
    assert "@import" not in text
    assert "url(" not in text


def test_only_a_live_page_listens_to_its_server(small_run: Path) -> None:
    text = html_page([load_run(small_run)], events="/events")
    assert "connect-src 'self'" in text
    assert 'data-events="/events"' in text
    assert Page(text).data["live"]


def test_all_scripts_are_part_of_the_page(small_run: Path) -> None:
    assert {f"page.{name}.js" for name in SCRIPTS} | {"page.js"} == {path.name for path in SCRIPT_FILES}
    text = html_page([load_run(small_run)])
    for path in SCRIPT_FILES:
        assert path.read_text(encoding="utf-8") in text


def test_readers_without_javascript_see_the_tables_of_the_terminal(small_run: Path) -> None:
    text = html_page([load_run(small_run)])
    plain = text[text.index("<noscript>") : text.index("</noscript>")]
    assert "4 trials on 3 devices" in plain
    assert "rung 1" in plain


def test_a_notebook_does_not_show_these_tables_below_the_cell(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    assert "<noscript>" in html_page([load_run(small_run)])
    assert not shown


def test_the_data_of_a_run(small_run: Path) -> None:
    (run,) = data_of(small_run)["runs"]
    assert (run["makespan"], run["trials"], run["iterations"]) == (10.0, 4, 7)
    assert (run["states"], run["resizes"]) == ("1 unfinished, 2 done, 1 failed", "1 resize")
    assert run["devices_text"] == "3 devices"
    assert ["planner", "portfolio"] in run["facts"]
    assert [group["name"] for group in run["groups"]] == ["rung 0", "rung 1"]
    assert [(key["key"], key["seconds"], key["alpha"], key["c"]) for key in run["keys"]] == [("net", 2.0, 1.25, 2)]


def test_the_data_is_what_the_drawings_need(small_run: Path) -> None:
    data = data_of(small_run)
    assert data == json.loads(json.dumps(page_data([load_run(small_run)])))
    (run,) = data["runs"]
    assert run["lanes"] == ["gpu 0", "gpu 1", "gpu 2"]
    assert [run["placements"][segment[3]] for segment in run["segments"]] == [
        "1/2 of gpu 0",
        "2 gpus: 1,2",
        "1/2 of gpu 0",
        "2 gpus: 1,2",
        "3 gpus: 0,1,2",
    ]
    assert [0, 0, 1, 0, 2] in run["blocks"]
    times, shares = run["busy"]
    assert len(times) == len(shares) + 1
    assert [metric["name"] for metric in data["metrics"]] == ["loss", "eval/f1", "epoch"]
    assert [metric["mode"] for metric in data["metrics"]] == ["min", "max", None]
    assert data["parameters"] == ["lr", "act"]
    a, b = data["trials"][:2]
    assert a["config"] == [0.1, "relu"]
    # Iterations that count from 1, and those of the first metric, are left out.
    assert a["curves"] == [[[], [2.0, 4.0, 8.0], [0.9, 0.5, 0.4]], None, [[], [], [1, 2, 3]]]
    assert b["curves"][1] == [[], [], [0.25, 0.5]]
    assert a["best"] == [[0.4, 3, 8.0, 0.9, 1, 2.0], None, [1, 1, 2.0, 3, 3, 8.0]]
    assert a["last"] == [0.4, None, 3]
    assert a["facts"]["widths"] == "1/2 for 4 s, x2 for 1.5 s"
    assert (a["state"], a["iterations"], a["budget"], a["widths"]) == ("done", 3, 3, "1/2, x2")


def test_the_best_so_far_leaves_out_failed_trials(small_run: Path) -> None:
    (run,) = data_of(small_run)["runs"]
    # Trial c reported 0.7 after 4 s and failed.
    times, values, rows, iterations = run["progress"][0]["min"]
    assert (times, values) == ([2.0, 3.0, 4.0, 8.0, 10.0], [0.9, 0.8, 0.5, 0.4, 0.3])
    assert (rows, iterations) == ([0, 1, 0, 0, 3], [1, 1, 2, 3, 1])
    assert run["progress"][0]["max"][1] == [0.9]


def test_if_all_trials_failed_the_best_of_them_is_shown(session: Sessions) -> None:
    made = session({"g": [Trial(print, trial_id="a")]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 2.0}))
    made.end("a", "FAILED", failure=Failure("error", "ValueError: no"))
    (run,) = data_of(made.close())["runs"]
    assert run["progress"][0]["min"][1] == [2.0]


def test_failures_come_with_traceback_and_the_end_of_the_output(session: Sessions) -> None:
    made = session({"g": [Trial(print, trial_id=name) for name in "ab"]})
    for name in "ab":
        made.end(name, "FAILED", failure=Failure("error", "ValueError: no", "Traceback ...\n  line 1"))
    log = made.path / "trials" / "a" / "output.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"step {k}\n" for k in range(1000)))
    data = data_of(made.close())
    a, b = data["trials"]
    assert a["failure"][0] == b["failure"][0] == "ValueError: no"
    # A text that several trials share is in the page once.
    assert a["failure"][1] == b["failure"][1]
    assert data["texts"][a["failure"][1]] == "Traceback ...\n  line 1"
    output = data["texts"][a["failure"][2]]
    assert output.endswith("step 999")
    assert output.startswith("step ")
    assert len(output) <= 2000
    assert b["failure"][2] is None


def test_several_runs_share_metrics_and_hyperparameters(session: Sessions, small_run: Path) -> None:
    trials = [Trial(print, {"lr": 0.3, "depth": 2}, trial_id="a")]
    made = session({"g": trials}, name="other")
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"acc": 0.5, "loss": 0.1}))
    data = data_of(small_run, made.close())
    assert [run["name"] for run in data["runs"]] == ["run", "other"]
    assert [metric["name"] for metric in data["metrics"]] == ["loss", "eval/f1", "epoch", "acc"]
    assert data["parameters"] == ["lr", "act", "depth"]
    assert [trial["run"] for trial in data["trials"]] == [0, 0, 0, 0, 1]
    assert data["trials"][4]["config"] == [0.3, None, 2]
    assert data["runs"][1]["progress"][1] is None
    assert data["runs"][1]["progress"][0]["min"] == [[1.0], [0.1], [0], [1]]


def test_runs_of_one_name_are_told_apart_by_their_folders(session: Sessions) -> None:
    paths = [session({}, name=name).close() for name in ("one", "two")]
    for path in paths:
        (path / "session.json").write_text(json.dumps({"name": "sweep"}))
    assert [run["name"] for run in data_of(*paths)["runs"]] == ["sweep (one)", "sweep (two)"]


def test_a_page_needs_a_run() -> None:
    with pytest.raises(InvalidFieldError, match=r"runs=.*at least one"):
        page_data([])


def test_the_pareto_set_of_several_goals(session: Sessions) -> None:
    made = session({})
    for metric, mode, names in (("loss", "min", "abc"), ("acc", "max", "def")):
        made.submit(metric, [Trial(print, trial_id=name) for name in names], Search(metric, mode))
    points = {"a": (1.0, 0.5), "b": (2.0, 0.9), "c": (2.5, 0.8), "d": (3.0, 0.9), "e": (1.0, 0.5), "f": (0.5, 0.1)}
    made.results(*((name, 1, 0.0, 1.0, 1.0, (0,), {"loss": loss, "acc": acc}) for name, (loss, acc) in points.items()))
    made.end("f", "FAILED", failure=Failure("error", "no"))
    data = data_of(made.close())
    (run,) = data["runs"]
    assert run["goals"] == ["loss", "acc"]
    # Of equal points the first counts; a failed trial does not.
    assert run["pareto"] == [[0, 1, 1.0, 0.5], [1, 1, 2.0, 0.9]]


def test_a_given_goal_comes_first_in_its_own_mode(small_run: Path) -> None:
    data = page_data([load_run(small_run)], goal=Goal("eval/f1", less=True))
    assert [(metric["name"], metric["mode"]) for metric in data["metrics"]][:2] == [("eval/f1", "min"), ("loss", "min")]


def test_importances_are_passed_on(small_run: Path) -> None:
    data = page_data([load_run(small_run)], importances=[{"loss": [("lr", 0.75), ("act", 0.25)], "epoch": "too few"}])
    assert data["runs"][0]["importances"] == {"loss": [["lr", 0.75], ["act", 0.25]], "epoch": "too few"}


def test_what_users_name_is_text_only(session: Sessions) -> None:
    config = {EVIL: EVIL, "lr": 0.1}
    trials = [Trial(print, config, trial_id=EVIL, profile_key=EVIL), Trial(print, {EVIL: 2}, trial_id="b")]
    made = session({EVIL: trials}, planner=EVIL, name_of_run=EVIL, fluid=EVIL)
    made.results((EVIL, 1, 0.0, 1.0, 1.0, (0,), {EVIL: 1.0, "note": EVIL, "nan": float("nan")}))
    text = html_page([load_run(made.close())])
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert "<!--" not in text
    assert page.data["runs"][0]["groups"][0]["name"] == EVIL
    assert page.data["trials"][0]["id"] == EVIL
    assert page.data["metrics"][0]["name"] == EVIL
    assert page.data["trials"][0]["config"][0] == EVIL


def test_embedded_data_is_one_line_that_ends_no_element() -> None:
    text = embedded({"a": EVIL + "\n\u2028"})
    assert json.loads(text) == {"a": EVIL + "\n\u2028"}
    assert not set(text) & set("<>&\n")


def test_the_script_writes_names_as_text_only() -> None:
    for script in SCRIPT_FILES:
        text = script.read_text(encoding="utf-8")
        for way_to_write_markup in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
            assert way_to_write_markup not in text, script.name
        assert len(text.splitlines()) <= 400, script.name


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
    data = data_of(made.close())
    iterations, times, values = data["trials"][0]["curves"][0]
    assert len(iterations) == len(times) == len(values) == 400
    assert (iterations[0], iterations[-1]) == (1, 2500)
    # The best value is exact nevertheless.
    assert data["trials"][0]["best"][0][:2] == [1.0 / 2500, 2500]
    assert len(data["runs"][0]["busy"][1]) <= 2000


def test_values_of_any_kind(session: Sessions) -> None:
    values = [1, 2.5, "x" * 5000, None, True, [1, {"a": 2}], float("inf"), {"b": {"c": 1}, "d": {}}]
    trials = [Trial(print, {"p": value}, trial_id=f"t{k}") for k, value in enumerate(values)]
    data = data_of(session({"g": trials}).close())
    assert data["parameters"] == ["p", "p/b/c"]
    shown = [trial["config"] for trial in data["trials"]]
    assert [config[0] for config in shown[:2]] == [1, 2.5]
    assert len(shown[2][0]) == 2000
    assert [config[0] for config in shown[3:7]] == [None, True, [1, {"a": 2}], "inf"]
    assert shown[7] == [None, 1]
    # A config is copied as it was given.
    assert data["trials"][7]["nested"] == {"p": {"b": {"c": 1}, "d": {}}}
    assert "nested" not in data["trials"][0]


def test_a_session_that_has_only_begun(session: Sessions) -> None:
    data = data_of(session({}).close())
    (run,) = data["runs"]
    assert (run["segments"], data["trials"], run["lanes"]) == ([], [], [])


def test_notes_are_in_the_data(small_run: Path) -> None:
    (small_run / "session.json").write_text("{")
    assert "session.json is not JSON and was ignored." in data_of(small_run)["runs"][0]["notes"]


def test_saving(small_run: Path, tmp_path: Path) -> None:
    run = load_run(small_run)
    save_html(tmp_path / "page.html", [run])
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html_page([run])
    with pytest.raises(InvalidFieldError, match=r"html='.*nowhere.*': cannot be written"):
        save_html(tmp_path / "nowhere" / "page.html", [run])


def test_no_hyperparameter_is_left_out(session: Sessions) -> None:
    names = [f"p{k}" for k in range(30)]
    trials = [Trial(print, {**dict.fromkeys(names, k), "net": {"depth": k}}, trial_id=f"t{k}") for k in range(2)]
    assert data_of(session({"g": trials}).close())["parameters"] == [*names, "net/depth"]

"""The HTML page in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from browser import Page as BrowserPage
from page_runs import write_sweep

from fluid.reports.page.data import page_data
from fluid.reports.page.html import embedded, html_page
from fluid.reports.page.patch import PageDrawer
from fluid.reports.run.loader import RunReader, load_run
from fluid.trialgroup import Search, Trial

pytestmark = pytest.mark.browser
Sessions = Callable[..., Any]
Open = Callable[..., Any]
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&<!--"


@dataclass
class Opened:
    """A page of runs in a browser."""

    page: BrowserPage

    def trials(self) -> list[str]:
        """The trials in the table, as shown."""
        return self.page.texts("#trials tr.trial td:first-child")

    def heads(self) -> list[str]:
        return self.page.texts("#trials th")

    def column(self, title: str) -> list[str]:
        place = self.heads().index(title) + 1
        cells = f"document.querySelectorAll('#trials tr.trial td:nth-child({place})')"
        return list(self.page.run(f"Array.from({cells}, (cell) => cell.title || cell.innerText)"))

    def head(self, title: str) -> str:
        return f"#trials th:nth-child({self.heads().index(title) + 1}) button"

    def filter(self, text: str) -> list[str]:
        self.page.type("#filter", text)
        return self.trials()

    def inked(self, canvas: str) -> float:
        """The share of a canvas on which something is drawn."""
        script = f"(() => {{ const from = document.querySelector('{canvas}'), c = document.createElement('canvas');"
        script += " c.width = from.width; c.height = from.height; const pen = c.getContext('2d');"
        script += " pen.drawImage(from, 0, 0); const d = pen.getImageData(0, 0, c.width, c.height).data; let n = 0;"
        script += " for (let k = 3; k < d.length; k += 4) n += d[k] > 0; return n / (d.length / 4); })()"
        return float(self.page.run(script))


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Open:
    """Opens a page of runs; at the end it must have reported nothing, and have no horizontal scroll bar."""

    @contextmanager
    def show(*runs: Path, width: int = 1440, dark: bool = False, **options: Any) -> Iterator[Opened]:
        file = tmp_path / "page.html"
        file.write_text(html_page([load_run(run) for run in runs], **options), encoding="utf-8")
        with browser.page(width, 900, dark=dark) as page:
            page.open(file)
            yield Opened(page)
            assert page.problems == []
            assert page.run("document.documentElement.scrollWidth") <= width

    return show


@pytest.fixture
def sweep(session: Sessions) -> Path:
    """24 trials, the last of which failed."""
    return write_sweep(session, "sweep", 24)


def best_of(path: Path) -> Any:
    trials = [trial for trial in load_run(path).trials if trial.state != "FAILED"]
    return min(trials, key=lambda trial: trial.ranges["loss"][0])


# --- What is shown first


def test_the_best_trial_comes_first(shown: Open, sweep: Path) -> None:
    best = best_of(sweep)
    with shown(sweep, importances=[{"loss": [("lr", 0.7), ("dropout_1", 0.3)]}]) as opened:
        text = opened.page.text("#best")
        assert text.startswith(f"Best trial\n{best.trial_id}\n")
        assert f"loss {best.ranges['loss'][0]:.5g}" in text.replace("\n", " ")
        for name in ("lr", "batch_size", "net/depth", "net/width", "data_folder"):
            assert f"\n{name}\n" in text
        page = opened.page

        assert "70 %" in page.text("#importances")
        page.middle("#scatters")
        page.drawn()
        assert page.run("document.querySelectorAll('#scatters figure').length") == 11
        # The most important comes first.
        assert page.texts("#scatters figcaption")[:2] == ["lr", "dropout_1"]
        for canvas in ("#progress", "#curves", "#parallel", "#gantt", "#busy"):
            page.middle(canvas)
            page.drawn()
            assert opened.inked(canvas) > 0.002, canvas


def test_makespan_and_wall_time_have_the_same_figures_everywhere(shown: Open, sweep: Path) -> None:
    run = load_run(sweep)
    assert run.wall is not None
    with shown(sweep) as opened:
        tiles = opened.page.text(".tiles")
        makespan = re.search(r"makespan\n(.*)\nwall time (.*)\n", tiles)
        assert makespan is not None
        assert makespan.groups() == (f"{run.timeline.makespan:.3g} s", f"{run.wall:.3g} s")


def test_the_config_can_be_copied(shown: Open, sweep: Path) -> None:
    best = best_of(sweep)
    with shown(sweep) as opened:
        opened.page.click("#best .actions button")
        copied = opened.page.run("document.querySelector('#best textarea')?.value")
        if copied is not None:  # A page of a file may not have the clipboard.
            assert json.loads(copied) == best.config
        else:
            assert opened.page.text("#best .actions button") == "copied"
        assert json.loads(opened.page.run("JSON.stringify(model.config(model.now.best))")) == best.config


# --- The table


def test_the_table_is_in_order_of_the_metric_and_failed_trials_come_last(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        least = [float(value) for value in opened.column("least loss")]
        assert least[:-1] == sorted(least[:-1])
        assert opened.trials()[-1] == "trial-00023"
        assert opened.column("state")[-1] == "failed"
        assert least[-1] == -1.0
        page = opened.page
        assert "Traceback" not in page.text("#trials")
        page.click(".why summary")
        assert "Traceback (most recent call last)" in page.text(".why pre")


def test_any_column_sorts_the_table_and_empty_cells_stay_last(shown: Open, session: Sessions) -> None:
    configs: dict[str, dict[str, int]] = {"a": {"p": 2}, "b": {}, "c": {"p": 10}}
    trials = [Trial(print, config, trial_id=name) for name, config in configs.items()]
    made = session({"g": trials})
    with shown(made.close()) as opened:
        opened.page.click(opened.head("p"))
        assert opened.trials() == ["a", "c", "b"]
        assert (
            opened.page.run("document.querySelector('#trials th[aria-sort]').getAttribute('aria-sort')") == "ascending"
        )
        opened.page.click(opened.head("p"))
        assert opened.trials() == ["c", "a", "b"]


def test_every_hyperparameter_has_a_column_that_can_be_hidden(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        page = opened.page
        names = ["lr", "batch_size", "optimizer", "weight_decay", "net/depth", "net/width", "dropout_1", "dropout_2"]
        assert set(names) <= set(opened.heads())
        # What all trials share is named above the table.
        assert "data_folder" not in opened.heads()
        assert "data_folder /data/" in page.text("#constants")
        page.click("#columns summary")
        place = page.texts("#column-list label").index("lr")
        page.click(f"#column-list label:nth-child({place + 1}) input")
        assert "lr" not in opened.heads()
        place = page.texts("#column-list label").index("data_folder")
        page.click(f"#column-list label:nth-child({place + 1}) input")
        assert opened.column("data_folder")[0].startswith("/data/")


def test_filters(shown: Open, sweep: Path) -> None:
    trials = {trial.trial_id: trial for trial in load_run(sweep).trials}

    def having(passes: Callable[[Any], bool]) -> set[str]:
        return {name for name, trial in trials.items() if passes(trial)}

    with shown(sweep) as opened:
        assert set(opened.filter("lr > 0.001")) == having(lambda trial: trial.config["lr"] > 0.001)
        assert set(opened.filter("batch_size <= 64 and lr > 1e-3")) == having(
            lambda trial: trial.config["batch_size"] <= 64 and trial.config["lr"] > 1e-3
        )
        assert opened.filter("state = failed") == ["trial-00023"]
        assert set(opened.filter("not (optimizer = adam or optimizer = SGD)")) == having(
            lambda trial: trial.config["optimizer"] == "rmsprop"
        )
        assert set(opened.filter("depth >= 5 config/lr<.01")) == having(
            lambda trial: trial.config["net"]["depth"] >= 5 and trial.config["lr"] < 0.01
        )
        assert opened.filter("00007") == ["trial-00007"]
        assert set(opened.filter("augment = true iterations = 27")) == having(
            lambda trial: trial.config["augment"] and trial.iterations == 27
        )
        assert opened.page.text("#shown").endswith("of 24 trials")
        assert len(opened.filter("")) == 24


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lr >", "a value is missing after lr >"),
        ("> 3", "a name is missing before >"),
        ("(lr > 3", "a closing ) is missing"),
        ("lr > 3)", "a ) is without its ("),
        ("lr > big", "> needs a number behind it, and big is none"),
        ("lr = big", "lr is a number, and big is none"),
        ("lx > 3", "there is no column lx; there is"),
        ("lr > 3 and", "something is missing after and"),
        ("or lr > 3", "something is missing before or"),
        ("'lr", "a closing ' is missing"),
        ("lr ! 3", "write != or not, instead of !"),
    ],
)
def test_a_filter_that_cannot_be_read_says_why(browser: Browser, text: str, why: str) -> None:
    source = (Path(__file__).parents[2] / "fluid" / "reports" / "page" / "page.filter.js").read_text(encoding="utf-8")
    columns = "[{names: ['lr'], title: 'lr', numeric: true, value: (t) => t.lr, text: (t) => String(t.lr)}]"
    with browser.page() as page:
        assert why in page.run(
            f"(() => {{ {source}; try {{ filters.compile({json.dumps(text)}, {columns}); }}"
            " catch (problem) { return problem.message; } })()"
        )


def test_the_last_filter_that_could_be_read_stays(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        few = opened.filter("lr > 0.001")
        assert opened.filter("lr > 0.001 and (") == few
        assert opened.page.run("document.querySelector('#filter').getAttribute('aria-invalid')") == "true"
        assert opened.page.text("#shown") == "something is missing after ("


# --- Charts


def test_following_a_trial(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        page = opened.page
        page.click("#trials tr.trial:nth-child(3) td:nth-child(2)")
        name = opened.trials()[2]
        assert name in page.text("#detail")
        assert "What happened, and why" in page.text("#detail")
        assert page.run("document.querySelector('#trials tr.on td').innerText") == name
        page.press("Escape")
        assert page.run("document.querySelector('#detail').hidden")
        # The device runs trial-00000 first: its bar begins at the left of the first lane.
        x, y = page.corner("#gantt")
        left = page.run("Math.ceil(draw.byId('gantt').getContext('2d').measureText('cpu 0').width) + 60")
        page.move((x + left, y + 20))
        tooltip = page.text("#tooltip")
        assert tooltip.startswith("trial-00000\ncpu 0: ")
        assert "\nloss " in tooltip
        assert "\nlr " in tooltip
        page.click((x + left, y + 20))
        assert "trial-00000" in page.text("#detail h3")


def test_charts_are_reached_by_keys(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        page = opened.page
        names = opened.trials()
        page.run("document.querySelector('#curves').focus()")
        page.press("ArrowRight")
        assert page.text("#detail h3") == names[0]
        page.press("ArrowRight")
        assert page.text("#detail h3") == names[1]
        page.press("ArrowLeft")
        assert page.text("#detail h3") == names[0]
        page.press("Escape")
        page.run("document.querySelector('#trials tr.trial').focus()")
        page.press("ArrowDown")
        page.press("Enter")
        assert page.text("#detail h3") == names[1]


def test_a_range_of_an_axis_keeps_the_trials_in_it(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        page = opened.page
        x, y = page.corner("#parallel")
        axis = page.run("parallel.placeOf('lr')")
        top, middle = y + axis["top"], y + axis["top"] + axis["tall"] / 2
        page.drag((x + axis["x"], middle), (x + axis["x"], top - 3))
        kept = opened.trials()
        assert 0 < len(kept) < 24
        assert min(map(float, opened.column("lr"))) > max(
            trial.config["lr"] for trial in load_run(sweep).trials if trial.trial_id not in kept
        )
        assert page.text("#brushes").startswith("lr: ")
        page.click("#brushes button")
        assert len(opened.trials()) == 24


def test_the_time_axis_can_be_zoomed(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        page = opened.page
        page.click("#zoom-in")
        zoomed = page.run("model.state.zoom")
        assert zoomed is not None
        x, y = page.corner("#gantt")
        page.drag((x + 400, y + 20), (x + 700, y + 20))
        inner = page.run("model.state.zoom")
        assert inner[1] - inner[0] < zoomed[1] - zoomed[0]
        page.click("#zoom-all")
        assert page.run("model.state.zoom") is None


def test_many_trials_are_coloured_by_the_metric(shown: Open, session: Sessions) -> None:
    path = write_sweep(session, "many", 30)
    with shown(path) as opened:
        page = opened.page
        assert page.run("document.querySelector('#colour').value") == "metric"
        colours = page.run("Array.from(document.querySelectorAll('#trials tr.trial i'), (i) => i.style.background)")
        assert colours[0] != colours[15] != colours[28]
        before = opened.inked("#curves")
        page.click("#leaders")
        assert page.run("model.now.trials.filter((trial) => model.stands(trial)).length") == 10
        assert opened.inked("#curves") <= before


def test_another_metric_and_another_mode(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        page = opened.page
        first = opened.trials()[0]
        page.select("#metric", "accuracy")
        greatest = [float(value) for value in opened.column("greatest accuracy")]
        assert greatest[:-1] == sorted(greatest[:-1], reverse=True)
        assert opened.trials()[0] == first
        page.select("#mode", "min")
        least = [float(value) for value in opened.column("least accuracy")]
        assert least[:-1] == sorted(least[:-1])


def test_a_logarithmic_scale_leaves_out_what_is_not_positive(shown: Open, session: Sessions) -> None:
    made = session({"g": [Trial(print, {"lr": 0.1 * k}, trial_id=f"t{k}") for k in range(4)]})
    made.results(*((f"t{k}", 1, k, k + 1.0, 1.0, (0,), {"loss": k - 1.0}) for k in range(4)))
    with shown(made.close()) as opened:
        page = opened.page
        before = page.run("model.axis('').scale.log")
        page.click("#log")
        assert (before, page.run("model.axis('').scale.log")) == (False, True)
        for canvas in ("#progress", "#curves", "#parallel", "#scatters canvas"):
            page.middle(canvas)
            page.drawn()
            assert opened.inked(canvas) > 0.002, canvas
        two, three = (page.run(f"model.axis('').place(model.now.trials[{row}])") for row in (2, 3))
        assert two < three


def test_failed_trials_do_not_stretch_the_axes(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        # The failed trial reported -1.
        assert opened.page.run("model.axis('').scale.low") > -0.2
        assert opened.page.run("model.axis('').place(model.now.trials[23])") is None


def test_the_pareto_set(shown: Open, session: Sessions) -> None:
    made = session({})
    for metric, mode, names in (("loss", "min", "ab"), ("accuracy", "max", "cd")):
        made.submit(metric, [Trial(print, {"lr": 0.1}, trial_id=name) for name in names], Search(metric, mode))
    points = {"a": (1.0, 0.5), "b": (2.0, 0.9), "c": (2.5, 0.8), "d": (3.0, 0.9)}
    made.results(*((name, 1, 0.0, 1.0, 1.0, (0,), {"loss": x, "accuracy": y}) for name, (x, y) in points.items()))
    with shown(made.close()) as opened:
        assert opened.page.text("#pareto-note").startswith("2 iterations that no other one beats in loss and accuracy")
        assert opened.inked("#pareto") > 0.002
    with shown(write_sweep(session, "one goal", 3)) as opened:
        assert opened.page.run("document.querySelector('#pareto-card').hidden")


# --- Several runs, and newer data


def test_three_runs(shown: Open, session: Sessions) -> None:
    paths = [write_sweep(session, name, 12, seed=seed, devices=seed) for seed, name in enumerate(("a", "b", "c"), 1)]
    with shown(*paths) as opened:
        page = opened.page
        cells, width = page.texts("#runs tbody td"), len(page.texts("#runs thead th"))
        for row, path in zip([cells[k : k + width] for k in range(0, len(cells), width)], paths, strict=True):
            run, best = load_run(path), best_of(path)
            assert row[0] == f"sweep ({path.name})"
            assert row[1:3] == [f"{best.ranges['loss'][0]:.5g}", best.trial_id]
            assert row[4] == "12"
            assert row[6] == f"{run.timeline.makespan:.3g} s"
        assert len(opened.trials()) == 36
        assert page.run("document.querySelector('#colour').value") == "run"

        assert len(opened.filter('run = "sweep (b)"')) == 12
        # Following a trial shows the devices of its run.
        page.click("#trials tr.trial td:nth-child(4)")
        assert page.run("document.querySelector('#run').value") == "1"


def test_newer_data_keep_what_the_reader_chose(shown: Open, session: Sessions) -> None:
    older, newer = (write_sweep(session, f"run{n}", n, seed=3) for n in (12, 20))
    for path in (older, newer):
        (path / "session.json").write_text(json.dumps({"name": "sweep"}))
    with shown(older) as opened:
        page = opened.page
        few = opened.filter("batch_size <= 128")
        page.click(opened.head("lr"))
        page.click("#zoom-in")
        page.click("#trials tr.trial td:nth-child(2)")
        followed, zoom = page.text("#detail h3"), page.run("model.state.zoom")
        page.run(f"page.update({embedded(page_data([load_run(newer)], live=True))})")
        page.drawn()
        assert page.run("document.querySelector('#filter').value") == "batch_size <= 128"
        shown_now = opened.trials()
        assert set(few) - {"trial-00011"} < set(shown_now)
        rates = [float(value) for value in opened.column("lr")]
        assert rates == sorted(rates)
        assert page.text("#detail h3") == followed
        assert page.run("model.state.zoom") == zoom
        assert page.text(".live") == "the session has ended"
        assert "20" in page.text(".tiles")


def test_a_patch_is_shown_as_all_of_the_data_is(shown: Open, session: Sessions) -> None:
    run = write_sweep(session, "sweep", 12)
    rest = {}
    for name in ("results.jsonl", "journal.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        half = len(lines) // 2
        (run / name).write_text("".join(lines[:half]))
        rest[name] = "".join(lines[half:])
    reader, drawer = RunReader(run), PageDrawer()
    drawer.draw([reader.read()], [])
    with shown(run) as opened:
        page = opened.page
        page.click("#trials tr.trial td:nth-child(2)")
        followed = page.text("#detail h3")
        for name, text in rest.items():
            with (run / name).open("a") as file:
                file.write(text)
        patch = drawer.patch([reader.read_on()])
        assert patch is not None and len(patch["trials"]) > 1
        page.run(f"page.update({embedded(patch)})")
        page.drawn()
        assert page.text("#detail h3") == followed
        assert page.text("#idle").startswith("Drawn up to ")
        seen = [page.text(part) for part in ("#trials", "#best", "#groups")]
        page.run(f"page.update({embedded(drawer.draw([reader.read()], []))})")
        page.drawn()
        assert [page.text(part) for part in ("#trials", "#best", "#groups")] == seen
        assert "Drawn up to " not in page.text("#idle")


# --- Looks


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [420, 1440])
def test_pages_fit_the_window_in_light_and_dark(shown: Open, session: Sessions, width: int, dark: bool) -> None:
    sweeps = [write_sweep(session, f"run{n}", n, seed=n) for n in (1, 5, 30)]
    for runs in ([sweeps[0]], [sweeps[1]], sweeps):
        with shown(*runs, width=width, dark=dark) as opened:
            page = opened.page
            background = page.run("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(20, 23, 26)" if dark else "rgb(246, 247, 249)")
            assert page.screenshot(whole=True).startswith(b"\x89PNG")
            page.click("#trials tr.trial td:nth-child(2)")
            left = page.run("draw.byId('detail').getBoundingClientRect().left")
            assert 0 <= left < page.run("draw.byId('detail').getBoundingClientRect().right") <= width


def test_colours_follow_the_scheme_while_the_page_is_open(shown: Open, sweep: Path) -> None:
    with shown(sweep) as opened:
        light = opened.page.run("draw.themeColour('card')")
        opened.page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        opened.page.drawn()
        assert opened.page.run("draw.themeColour('card')") != light


def test_names_that_look_like_markup_are_shown_as_text(shown: Open, session: Sessions) -> None:
    evil = Trial(print, {EVIL: EVIL, "lr": 0.1}, trial_id=EVIL, profile_key=EVIL)
    trials = [evil, Trial(print, {EVIL: 2}, trial_id="b")]
    made = session({EVIL: trials}, planner=EVIL, name_of_run=EVIL, fluid=EVIL)
    made.results((EVIL, 1, 0.0, 1.0, 1.0, (0,), {EVIL: 1.0, "note": EVIL, "nan": float("nan")}))
    with shown(made.close()) as opened:
        page = opened.page
        assert page.run("document.images.length") == 0
        assert opened.column("trial")[0] == EVIL
        page.click("#trials tr.trial td:nth-child(2)")
        assert EVIL in page.text("#detail")


def test_a_session_that_has_only_begun(shown: Open, session: Sessions) -> None:
    with shown(session({}).close()) as opened:
        assert "The trials reported no numeric metrics." in opened.page.text("#top")
        assert "No trial has been submitted." in opened.page.text("#trials")


def test_a_hundred_hyperparameters(shown: Open, session: Sessions) -> None:
    configs = [{f"p{k}": (k * 7 + row) % 11 for k in range(100)} for row in range(12)]
    made = session({"g": [Trial(print, config, trial_id=f"t{row}") for row, config in enumerate(configs)]})
    made.results(*((f"t{row}", 1, row, row + 1.0, 1.0, (0,), {"loss": row + 1.0}) for row in range(12)))
    with shown(made.close()) as opened:
        page = opened.page
        page.middle("#parallel")
        page.drawn()
        assert opened.inked("#parallel") > 0.002
        assert page.text("#parallel-note") == "60 hyperparameters of little importance have no axis"
        assert {f"p{k}" for k in range(100)} <= set(opened.heads())
        assert page.run("document.querySelectorAll('#scatters figure').length") == 24
        page.click("#scatters > button")
        assert page.run("document.querySelectorAll('#scatters figure').length") == 100


def test_two_thousand_trials(shown: Open, session: Sessions) -> None:
    path = write_sweep(session, "large", 2000, devices=8, failed=40)
    with shown(path) as opened:
        page = opened.page
        assert len(opened.trials()) == 100
        assert page.run("document.documentElement.outerHTML.length") < 8_000_000
        found = len([trial for trial in load_run(path).trials if trial.config["lr"] > 0.01])
        opened.filter("lr > 0.01")
        assert page.text("#shown") == f"{found:,} of 2,000 trials"
        assert len(opened.filter("state = failed")) == 40
        opened.filter("")
        page.click("#more button:last-child")
        assert len(opened.trials()) == 2000
        page.click(opened.head("lr"))
        rates = [float(value) for value in opened.column("lr")]
        assert rates == sorted(rates)
        assert page.screenshot(whole=False).startswith(b"\x89PNG")

"""The HTML page on paper and as one picture, in a real browser: nothing cut, nothing blank."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from browser import Page as BrowserPage
from page_runs import write_sweep

from fluid.reports.page.html import html_page
from fluid.reports.run.loader import load_run

pytestmark = pytest.mark.browser
Sessions = Callable[..., Any]
CANVASES = ("#progress", "#curves", "#parallel", "#contour", "#scatters canvas", "#gantt", "#busy")
#: The share of a canvas on which something is drawn.
_INK = """(selector) => {
  const from = document.querySelector(selector), c = document.createElement("canvas");
  c.width = from.width; c.height = from.height;
  const pen = c.getContext("2d");
  pen.drawImage(from, 0, 0);
  const d = pen.getImageData(0, 0, c.width, c.height).data;
  let n = 0;
  for (let k = 3; k < d.length; k += 4) n += d[k] > 0;
  return n / (d.length / 4);
}"""
#: What is wider than its place: canvases and tables, by their ids.
_CUT = """() => Array.from(document.querySelectorAll("canvas, table")).filter((node) => node.offsetParent)
  .filter((node) => {
    const room = node.parentNode.getBoundingClientRect(), box = node.getBoundingClientRect();
    return box.right > room.right + 1 || room.right > document.body.getBoundingClientRect().right + 1;
  })
  .map((node) => node.id)"""


def opened(page: BrowserPage, run: Path, folder: Path, **options: Any) -> None:
    file = folder / "page.html"
    file.write_text(html_page([load_run(run)], **options), encoding="utf-8")
    page.open(file)


def all_drawn(page: BrowserPage) -> None:
    """Waits until all charts are drawn; those far from the window are when the browser is idle."""
    page.run("new Promise((done) => { const look = () => (draw.waits() ? setTimeout(look, 20) : done()); look(); })")
    page.drawn()


@pytest.fixture
def sweep(session: Sessions) -> Path:
    return write_sweep(session, "sweep", 30)


@pytest.mark.parametrize("dark", [False, True])
def test_a_printed_page_is_whole(browser: Browser, sweep: Path, tmp_path: Path, dark: bool) -> None:
    with browser.page(1280, 900, dark=dark) as page:
        opened(page, sweep, tmp_path)
        all_drawn(page)
        before = page.run("[draw.byId('parallel').width, draw.themeColour('card')]")
        page.run("document.querySelector('#trials tr.trial').click()")  # It is followed: its panel is not printed.
        page.run(
            f"addEventListener('beforeprint', () => {{ const ink = {_INK}, cut = {_CUT}; window.printed = {{"
            f" ink: {list(CANVASES)!r}.map(ink), cut: cut(), "
            "  colours: [draw.themeColour('card'), draw.qualityColour(1)],"
            "  columns: Array.from(document.querySelectorAll('#trials th'), (head) => head.dataset.title),"
            "  width: document.body.getBoundingClientRect().width }; })"
        )
        pdf = page.call("Page.printToPDF", printBackground=True)["data"]
        assert base64.b64decode(pdf).startswith(b"%PDF")
        printed = page.run("window.printed")
        assert printed["cut"] == []
        assert all(ink > 0.002 for ink in printed["ink"]), printed["ink"]
        assert printed["colours"] == ["#ffffff", "rgb(68,1,84)"], "those of the light theme, as paper is white"
        assert printed["width"] == 700
        assert {"lr", "net/depth", "warmup", "iterations", "time"} <= set(printed["columns"])
        # Then the page is as it was.
        page.drawn()
        page.run("document.querySelector('#detail button').click()")
        all_drawn(page)
        assert page.run("[draw.byId('parallel').width, draw.themeColour('card')]") == before
        assert page.problems == []


def test_a_table_of_many_columns_is_made_smaller(browser: Browser, session: Sessions, tmp_path: Path) -> None:
    with browser.page(1280, 900) as page:
        opened(page, write_sweep(session, "sweep", 3), tmp_path)
        page.run("dispatchEvent(new Event('beforeprint'))")
        scale = float(page.run("draw.byId('trials').style.zoom"))
        assert 0.33 <= scale < 0.9
        page.run("dispatchEvent(new Event('afterprint'))")
        assert page.run("draw.byId('trials').style.zoom") == ""


def test_no_panel_is_blank_in_a_picture_of_a_page_that_was_not_scrolled(
    browser: Browser, sweep: Path, tmp_path: Path
) -> None:
    with browser.page(1280, 600) as page:
        opened(page, sweep, tmp_path)
        all_drawn(page)
        assert page.run("scrollY") == 0
        assert page.run("draw.byId('gantt').getBoundingClientRect().top") > 1200, "far from the window"
        ink = page.run(f"{list(CANVASES)!r}.map({_INK})")
        assert all(share > 0.002 for share in ink), ink


def test_what_the_engine_did_is_folded_behind_the_best_trial(browser: Browser, sweep: Path, tmp_path: Path) -> None:
    with browser.page(1280, 900) as page:
        opened(page, sweep, tmp_path)
        shown = page.run("document.body.innerText")
        assert shown.index("Best trial") < shown.index("about this run")
        assert "planner" not in shown and str(sweep) not in shown
        page.click("#about summary")
        assert f"folder {sweep}" in page.text("#about")

"""Renders recorded runs as one HTML page: the best trial, its hyperparameters against the others', and the devices.

The page loads no other file, so it can be mailed, archived and opened from a disk. Its scripts draw what
:func:`fluid.reports.page.data.page_data` gives, and draw it anew when they are given newer data. All names that users
chose enter the page as text only.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from rich.console import Console

from fluid._private_files import replacing
from fluid.errors import InvalidFieldError
from fluid.reports.page.data import Importances, page_data
from fluid.reports.run.run import RecordedRun
from fluid.reports.tables.run import run_tables
from fluid.results.metrics import Goal

#: The scripts, in the order in which they need each other.
SCRIPTS = (
    *("format", "filter", "draw", "model", "best", "curves", "parallel"),
    *("scatter", "contour", "table", "detail", "timeline", "forks"),
)
#: What becomes of names that are no text, such as those of files may be: question marks.
UNPRINTABLE = "replace"
#: The page may not load anything; a live page may only listen to its server.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def save_html(
    path: str | Path,
    runs: Sequence[RecordedRun],
    *,
    goal: Goal | None = None,
    importances: Sequence[Importances] = (),
) -> None:
    """Writes the page to a file.

    Args:
        path: the file to write.
        runs: the run to show, or the runs to compare.
        goal: what trials are judged by at first; ``None`` for the metric of the searches, in their mode.
        importances: the importances of the hyperparameters in each run; empty if they were not computed.

    Raises:
        InvalidFieldError: the file cannot be written.
    """
    save_text(path, html_page(runs, goal=goal, importances=importances))


def save_text(path: str | os.PathLike[str], html: str) -> None:
    """Writes a page to a file; raises as :func:`save_html` does."""
    try:
        with replacing(path) as draft:
            draft.write_text(html, encoding="utf-8", errors=UNPRINTABLE)
    except OSError as error:
        raise InvalidFieldError("html", str(path), f"cannot be written: {error.strerror or error}") from error


def html_page(
    runs: Sequence[RecordedRun],
    *,
    goal: Goal | None = None,
    importances: Sequence[Importances] = (),
    events: str = "",
) -> str:
    """The page as text.

    Args:
        runs: the run to show, or the runs to compare.
        goal: what trials are judged by at first; ``None`` for the metric of the searches, in their mode.
        importances: the importances of the hyperparameters in each run; empty if they were not computed.
        events: address of server-sent events, each of which is :func:`embedded` newer data; empty for a page that stays
            as it is.
    """
    data = page_data(runs, goal=goal, importances=importances, live=bool(events))
    policy = _POLICY + ("; connect-src 'self'" if events else "")
    scripts = "\n".join(_asset(f"page.{name}.js") for name in SCRIPTS)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(data['title'])} - Fluid</title>",
        f'<style>{_asset("page.css")}</style></head><body data-events="{escape(events)}">',
        _asset("page.html"),
        f"<noscript><p class=note>The charts need JavaScript.</p>{_plain_text(runs, goal)}</noscript>",
        f'<script type="application/json" id="data">{embedded(data)}</script>',
        f"<script>{scripts}\n{_asset('page.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def embedded(data: object) -> str:
    """JSON on one line, for a script element or an event: no ``<`` in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain_text(runs: Sequence[RecordedRun], goal: Goal | None) -> str:
    """The tables of the terminal, for readers without JavaScript."""
    # In a notebook, rich would also show them below the cell.
    console = Console(file=io.StringIO(), width=150, record=True, color_system=None, force_jupyter=False)
    for run in runs:
        console.print(run_tables(run, goal=goal if goal is not None and goal.metric in run.metrics else None))
    return f"<pre>{escape(console.export_text())}</pre>"


def _asset(name: str) -> str:
    return (resources.files("fluid.reports.page") / name).read_text(encoding="utf-8")

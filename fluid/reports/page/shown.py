"""The page of a run as an object: a notebook shows it in a frame, and elsewhere it is the path of a file."""

from __future__ import annotations

import contextlib
import os
from html import escape
from pathlib import Path

from fluid.errors import InvalidFieldError
from fluid.reports.analysis.importance import by_metric
from fluid.reports.page.html import html_page, save_text
from fluid.reports.run.loader import load_run
from fluid.results.metrics import Goal

#: Pixels of the frame in a notebook.
_HEIGHT = 900


class RunPage(os.PathLike[str]):
    """The page of a run: see :meth:`fluid.SweepResult.page`.

    Attributes:
        html: the page, which needs no other file.
        path: the file that holds it; ``None`` if it could not be written into the run folder.
    """

    def __init__(self, html: str, path: Path | None) -> None:
        self.html = html
        self.path = path

    def __fspath__(self) -> str:
        if self.path is None:
            raise InvalidFieldError("path", None, "the run folder cannot be written: name a file")
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunPage({str(self.path)!r})" if self.path is not None else "RunPage in memory"

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{_HEIGHT}px;border:0"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}" title="Fluid: the page of a run"></iframe>'


def page_of(run_dir: Path, goal: Goal | None, path: str | os.PathLike[str] | None) -> RunPage:
    """Makes the page of a run, and writes it.

    Args:
        run_dir: the run folder.
        goal: what trials are judged by at first; ``None`` for the metric of the search.
        path: the file to write; ``None`` for ``report.html`` in the run folder, if that can be written.

    Raises:
        InvalidFieldError: the run cannot be read, or the given file cannot be written.
    """
    run = load_run(run_dir)
    html = html_page([run], goal=goal, importances=[by_metric(run)])
    if path is not None:
        save_text(path, html)
        return RunPage(html, Path(path))
    with contextlib.suppress(InvalidFieldError):
        save_text(run_dir / "report.html", html)
        return RunPage(html, run_dir / "report.html")
    return RunPage(html, None)

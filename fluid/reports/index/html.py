"""Renders the page of all runs. It loads nothing, and all names that users chose enter it as text only."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from fluid.reports.index.following import IndexState
from fluid.reports.page.html import embedded

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)


def index_page(home: Path, state: IndexState, key: str) -> str:
    """The page as text.

    Args:
        home: the folder with the runs.
        state: the runs.
        key: what a request to delete has to name.
    """
    data = {"home": str(home), "version": state.version, "key": key, **state.since(0)}
    page, index = "fluid.reports.page", "fluid.reports.index"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>Runs in {escape(home.name)} - Fluid</title>",
        f"<style>{_asset(page, 'page.css')}{_asset(index, 'index.css')}</style></head><body>",
        _asset(index, "index.html"),
        f'<script type="application/json" id="data">{embedded(data)}</script>',
        f"<script>{_asset(page, 'page.format.js')}\n{_asset(index, 'index.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _asset(package: str, name: str) -> str:
    return (resources.files(package) / name).read_text(encoding="utf-8")

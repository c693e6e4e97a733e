"""Notebooks for tests: cells that a real kernel runs. A test that imports this is skipped without IPython."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


class Notebook:
    """Runs cells; keeps the messages about displays by cell."""

    def __init__(self, cells: list[str], folder: Path) -> None:
        self._nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        self._folder = folder
        self.displays: list[list[dict[str, Any]]] = [[] for _ in cells]
        #: Called with each text that a cell prints.
        self.on_print: Callable[[str, Any], None] = lambda text, client: None

    def run(self) -> list[list[Any]]:
        """Runs all cells, also after an error; returns the outputs of each."""
        book = self

        class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
            def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
                if msg["msg_type"] in ("display_data", "update_display_data"):
                    book.displays[cell_index].append(msg)
                if msg["msg_type"] == "stream":
                    book.on_print(msg["content"]["text"], self)
                return super().process_message(msg, cell, cell_index)

        client = Client(
            self._nb, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": "."}}
        )
        client.resources["metadata"]["path"] = str(self._folder)
        client.execute()
        return [cell.outputs for cell in self._nb.cells]


def forms_of(output: Any) -> tuple[str, str]:
    """The HTML and the text of an output."""
    return output["data"]["text/html"], output["data"]["text/plain"]

"""What an executor shows while it is open: its live view, and above it, or alone, what trials print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from fluid.backends.base import Backend
from fluid.display.trial_output import TrialOutput
from fluid.session.options import ray_hides_output
from fluid.session.status import Status

if TYPE_CHECKING:
    from fluid.display.live import LiveView
    from fluid.display.notebook import NotebookView


class Terminal:
    """Shows a session until it is closed.

    Args:
        status: returns the current status.
        backend: of the session; it was told to forward what trials print, if it can.
        is_shown: whether anything is shown at all.
    """

    def __init__(self, status: Callable[[], Status], backend: Backend, *, is_shown: bool) -> None:
        self._view = _view_of(status) if is_shown else None
        self._output: TrialOutput | None = None
        if is_shown and backend.forwards_output:
            self._output = TrialOutput(backend.read_output, self._view, is_hidden=ray_hides_output)

    @property
    def is_live(self) -> bool:
        """Whether a live view is shown."""
        return self._view is not None and self._view.is_drawn

    def announce(self, text: str) -> None:
        """Shows in the live view what is about to begin, until the next group is submitted."""
        if self._view is not None:
            self._view.announce(text)

    def begin_group(self) -> None:
        """Shows the live view of a notebook in the cell that submits a group."""
        if self._view is not None:
            self._view.begin_group()

    def flush(self) -> None:
        """Shows all that trials have printed until now."""
        if self._output is not None:
            self._output.flush()

    def close_view(self) -> None:
        """Ends the live view, which leaves a line per group below what trials have printed."""
        if self._view is not None:
            self.flush()
            self._view.close()

    def close(self) -> None:
        """Ends the live view, if it is shown, and shows what trials have printed last. The session is closed."""
        if self._output is not None:
            self._output.close()
        if self._view is not None:
            self._view.close()


def _view_of(status: Callable[[], Status]) -> LiveView | NotebookView | None:
    """Makes the live view; without a terminal or a notebook, what draws it is not even imported."""
    if "ipykernel" in sys.modules:
        from fluid.display.notebook import NotebookView

        if NotebookView.wanted():
            return NotebookView(status)
    if sys.stderr is None or not getattr(sys.stderr, "isatty", bool)():
        return None
    from fluid.display.live import LiveView

    return LiveView(status) if LiveView.wanted() else None

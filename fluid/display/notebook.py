"""The live view in a notebook: one display, which is updated in place, as HTML and as text.

It needs no widgets: an IPython kernel sends displays and their updates, and every frontend shows them. The display is
in the cell that submits the group; a group of another cell begins a display there.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import io
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console, RenderableType

from fluid._waiting import AwaitedThread
from fluid.display.dashboard import render
from fluid.display.follow import StatusFollower
from fluid.display.notebook_html import final_html, status_html
from fluid.display.states import has_ended
from fluid.display.summary import folder_lines, summary_lines
from fluid.errors import FluidError
from fluid.session.status import Status

#: Seconds between two updates.
_INTERVAL = 0.5
#: Seconds that ``close`` waits for the thread, which may be waiting for a status.
_PATIENCE = 2.0
#: Size of the text for frontends without HTML.
_WIDTH, _HEIGHT = 100, 30


class NotebookView:
    """Shows a session in the output of a cell until it is closed. Create one only if :meth:`wanted` is true.

    Args:
        status: returns the current status; the view ends if it raises a :class:`FluidError`.
        interval: seconds between two updates.
    """

    def __init__(self, status: Callable[[], Status], *, interval: float = _INTERVAL) -> None:
        self._status = status
        self._interval = interval
        self._follower = StatusFollower()
        #: Held while something is sent.
        self._lock = threading.RLock()
        #: The display, the cell that it is in, and the context to send from, by which the kernel knows the cell.
        self._display: Any = None
        self._cell: int | None = None
        self._context = contextvars.copy_context()
        #: The HTML that was sent last.
        self._sent = ""
        self._finished = False
        self._stopping = threading.Event()
        self._thread = AwaitedThread("fluid-live", self._run)
        self._thread.start()

    @staticmethod
    def wanted() -> bool:
        """Whether this process is the kernel of a notebook."""
        return getattr(_shell(), "kernel", None) is not None

    @property
    def is_drawn(self) -> bool:
        """Whether the view is shown."""
        return not self._finished

    def write_above(self, stream: TextIO, text: str) -> bool:
        """Does nothing: in a notebook the output of a cell keeps its order."""
        return False

    def announce(self, text: str) -> None:
        """Shows what is about to begin, until the next group is submitted."""
        self._follower.announce(text)
        self.begin_group()

    def begin_group(self) -> None:
        """Shows the display in the current cell, if it is in another one. Called where a group is submitted."""
        cell = getattr(_shell(), "execution_count", None)
        if self._finished or threading.current_thread() is self._thread:
            return
        with self._lock:
            if self._display is not None and cell == self._cell:
                return
            self._cell, self._context = cell, contextvars.copy_context()
            self._display = _display(*self._now(), display_id=True)

    def close(self) -> None:
        """Sends the final state. Closing twice is harmless."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        self._finish()

    # -- the view's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._refresh() and not self._stopping.wait(self._interval):
                pass
            if self._stopping.is_set():
                self._refresh()
        finally:
            if not self._stopping.is_set():
                self._finish()

    def _refresh(self) -> bool:
        """Takes the current status, and sends it if it has changed; returns whether to continue."""
        try:
            status = self._status()
        except FluidError:
            return False
        with self._lock:
            if self._finished:
                return False
            self._follower.take(status)
            if self._stopping.is_set():
                return False  # The thread that closes the view sends the rest.
            if all(has_ended(group.trials) for group in status.groups) and not self._follower.announced:
                self._send(*self._end())
            else:
                self._send(*self._now())
        return True

    def _now(self) -> tuple[str, str]:
        """The current state, as HTML and as text."""
        follower = self._follower
        if follower.last is None:
            return status_html(None, {}, {}, follower.announced), f"Fluid  {follower.announced}".rstrip()
        shares, ends, announced = follower.shares(), follower.ends(), follower.announced
        shown = render(follower.last, _WIDTH, _HEIGHT, follower.numbers, shares=shares, ends=ends, announced=announced)
        return status_html(follower.last, follower.numbers, shares, announced, ends), _text(shown)

    def _end(self) -> tuple[str, str]:
        """What remains, as HTML and as text."""
        last = self._follower.last
        if last is None or not last.groups:
            return "", ""
        lines = summary_lines(last, self._follower.seconds(), width=_WIDTH)
        lines += [] if last.run_dir is None else folder_lines(last.run_dir, _WIDTH)
        return final_html(last, self._follower.seconds()), "\n".join(line.plain for line in lines)

    def _send(self, html: str, text: str, context: contextvars.Context | None = None) -> None:
        if self._display is None or html == self._sent:
            return
        self._sent = html
        with contextlib.suppress(Exception):  # The kernel may be about to end.
            (context or self._context.copy()).run(self._display.update, _Forms(html, text))

    def _finish(self) -> None:
        """Sends what remains, from the cell that closes the view: some frontends hear only the cell that runs."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self._send(*self._end(), contextvars.copy_context())


class _Forms:
    """What IPython displays, in two forms."""

    def __init__(self, html: str, text: str) -> None:
        self._forms = {"text/html": html, "text/plain": text}

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        return self._forms


def _shell() -> Any:
    """IPython's shell; ``None`` where this process has none."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


def _display(html: str, text: str, **options: Any) -> Any:
    return importlib.import_module("IPython.display").display(_Forms(html, text), **options)


def _text(shown: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()

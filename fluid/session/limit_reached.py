"""How a session ends at its deadline, or when its budget is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fluid.errors import FluidError


class LimitReachedError(FluidError):
    """A session has ended before its trials, as its deadline came or its budget was spent. They are saved.

    Example:
        >>> from fluid import LimitReachedError
        >>> error = LimitReachedError("the deadline of 2 h has come", "runs/1", unfinished=5, unsaved=["a"])
        >>> print(error)
        the deadline of 2 h has come: 4 of 5 unfinished trials are saved; FluidExecutor.resume('runs/1') goes on

    Attributes:
        reason: which limit was reached.
        run_dir: the run folder.
        unfinished: number of trials that had not ended.
        unsaved: ids of those among them whose newest iterations are not saved.
        rehearsed: whether the session was rehearsed, and so cannot be resumed.
    """

    def __init__(
        self,
        reason: str,
        run_dir: str | Path,
        *,
        unfinished: int,
        unsaved: Sequence[str] = (),
        rehearsed: bool = False,
    ) -> None:
        self.reason, self.run_dir, self.rehearsed = reason, str(run_dir), rehearsed
        self.unfinished, self.unsaved = unfinished, tuple(unsaved)
        saved = f"{self.saved} of {unfinished} unfinished trials are saved"
        resume = "" if rehearsed else f"; FluidExecutor.resume({self.run_dir!r}) goes on"
        super().__init__(f"{reason}: {saved}{resume}")

    def __reduce__(self) -> tuple[Callable[..., LimitReachedError], tuple[str, str]]:
        left: Any = {"unfinished": self.unfinished, "unsaved": self.unsaved, "rehearsed": self.rehearsed}
        return partial(type(self), **left), (self.reason, self.run_dir)

    @property
    def saved(self) -> int:
        """Number of trials that had not ended and are saved."""
        return max(0, self.unfinished - len(self.unsaved))


def ended_early(error: BaseException, otherwise: str) -> FluidError:
    """The error for those who use a session that has ended, or wait for it.

    Args:
        error: what ended the session.
        otherwise: what is to be said before that, where it was no limit.

    Returns:
        Where a limit was reached, an error that says so, too: each caller gets one of its own.
    """
    if isinstance(error, LimitReachedError):
        left: Any = {"unfinished": error.unfinished, "unsaved": error.unsaved, "rehearsed": error.rehearsed}
        return LimitReachedError(error.reason, error.run_dir, **left)
    return FluidError(f"{otherwise}: {error}")

"""What an executor does at a notice of preemption."""

from __future__ import annotations

from fluid.errors import FluidError
from fluid.session.session import Session


def save_all(session: Session, deadline_s: float) -> str:
    """Saves all trials; returns a line that says how many, and how to go on."""
    if session.hold.is_virtual:
        return ""  # A rehearsal has nothing to save, and begins anew.
    try:
        unsaved, unfinished = len(session.drain(None, deadline_s)), session.unfinished
    except FluidError:
        return ""  # It was closed meanwhile.
    saved = f"{max(0, unfinished - unsaved)} of {unfinished} unfinished trials are saved"
    return f"{saved}; go on with FluidExecutor.resume({str(session.run_dir)!r})"

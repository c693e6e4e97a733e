"""How the examples end when a signal interrupts them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def exit_status() -> Iterator[None]:
    """Ends an interrupted program with 128 + the signal's number, and one line instead of a traceback.

    Fluid itself says how many trials were cut off, and how to go on.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except SystemExit as end:
        # Fluid has saved the trials after SIGTERM or SIGUSR1; tune.SweepInterrupted has told everything.
        if type(end) is SystemExit and end.code in (143, 138):
            print(f"interrupted by {'SIGTERM' if end.code == 143 else 'SIGUSR1'}", file=sys.stderr)
        raise

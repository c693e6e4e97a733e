"""Python's garbage collector, held back while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Holds the collector back, which would go through all that was made again and again, and find nothing to free.

    A quarter of the time of loading modules or a run folder went there.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

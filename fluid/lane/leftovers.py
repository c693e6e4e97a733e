"""What a trial that has left a lane leaves behind in its process besides settings: threads, and compiled code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fluid.trainables.trial_code import TrialCode

#: Seconds that a thread of a trial has to end by itself, once the trial has left: it may have been told to.
_GRACE_S = 0.05


def threads_left(code: TrialCode) -> Iterator[str]:
    """Yields the names of a trial's threads that still run."""
    for thread in code.threads():
        thread.join(_GRACE_S)
        if thread.is_alive():
            yield thread.name


def forget_compiled() -> None:
    """Makes ``torch.compile`` forget what it has compiled, if it has: it counts how often it compiles each function."""
    with suppress(Exception):  # A module whose import has failed, or names that have moved.
        if _dynamo("convert_frame").FRAME_COUNTER:
            sys.modules["torch._dynamo"].reset()


def has_compiled_too_often() -> bool:
    """Whether ``torch.compile`` has compiled a function as often as it does in one process; it runs eagerly then."""
    with suppress(Exception):
        most = _dynamo("config").cache_size_limit  # An alias of recompile_limit in newer releases.
        return max(_dynamo("convert_frame").FRAME_COMPILE_COUNTER.values(), default=0) >= int(most)
    return False


def _dynamo(name: str) -> Any:
    return sys.modules[f"torch._dynamo.{name}"]

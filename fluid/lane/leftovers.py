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


def make_room_to_compile() -> None:
    """Makes ``torch.compile`` forget what it has compiled, if that leaves a new trial too little.

    It compiles each function a few times in a process, and then runs it eagerly. Half of that is a new trial's; up to
    there, trials of one lane use what others have compiled. Trials that go on compile again what they run.
    """
    with suppress(Exception):  # Not loaded, an import that has failed, or names that have moved.
        most = _dynamo("config").cache_size_limit  # An alias of recompile_limit in newer releases.
        if 2 * max(_dynamo("convert_frame").FRAME_COMPILE_COUNTER.values(), default=0) >= most:
            sys.modules["torch._dynamo"].reset()


def _dynamo(name: str) -> Any:
    return sys.modules[f"torch._dynamo.{name}"]

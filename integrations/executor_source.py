"""Where an integration that outlives its calls gets its executor from."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

from fluid.executor import FluidExecutor, executor_in_force
from fluid.integrations.options import require_options


class ExecutorSource:
    """An executor: the one given, that in force, or one that is made once and closed with this object.

    Args:
        given: by the user.
        options: of a new executor. If there are any, the one in force is not used.

    Raises:
        InvalidFieldError: an option is none of an executor.
    """

    def __init__(self, given: FluidExecutor | None, options: Mapping[str, Any]) -> None:
        require_options(FluidExecutor, options)
        self._given = given
        self._options = dict(options)
        self._made: FluidExecutor | None = None
        self._process = os.getpid()

    def get(self) -> FluidExecutor:
        """Returns the executor.

        Raises:
            InvalidFieldError: the options cannot be used.
        """
        if self._process != os.getpid():  # It was forked: an executor of its parent runs nothing for it.
            self._given = self._made = None
            self._process = os.getpid()
        found = self._given or (None if self._options else executor_in_force())
        if found is not None:
            return found
        if self._made is None or self._made.closed:
            self._made = FluidExecutor(**self._options)
            weakref.finalize(self, self._made.close)
        return self._made

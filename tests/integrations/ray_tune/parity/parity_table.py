"""The cases of all themes."""

from __future__ import annotations

import cases_arguments
import cases_callbacks
import cases_checkpoints
import cases_failures
import cases_restore
import cases_schedulers
import cases_stoppers
import cases_tuner
from parity_case import CASES, Case

#: Each adds its cases to ``CASES``.
THEMES = (
    cases_arguments,
    cases_callbacks,
    cases_checkpoints,
    cases_failures,
    cases_restore,
    cases_schedulers,
    cases_stoppers,
    cases_tuner,
)
__all__ = ["CASES", "THEMES", "Case"]

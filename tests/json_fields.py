"""What docstrings say of the JSON that commands print, for tests that compare it with the output.

``docs/api/files.md`` shows these docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any


def undescribed(fields: Iterable[str], *makers: Callable[..., Any]) -> set[str]:
    """Returns the fields that the docstrings of the functions that make them do not name."""
    named = {name for maker in makers for name in re.findall("``(.+?)``", inspect.getdoc(maker) or "")}
    return set(fields) - named

"""Makes the cases and what they share importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
for _folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("*_*.py")))

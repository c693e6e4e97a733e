"""Helper modules of the tests of shared folders."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)

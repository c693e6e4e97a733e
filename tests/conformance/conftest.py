"""Has pytest show the values of what fails in the suite."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("fluid.testing.backends")

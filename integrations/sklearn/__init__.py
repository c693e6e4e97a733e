"""scikit-learn's searches on Fluid: candidates are trials, lanes fit and score them.

:class:`FluidSearchCV` takes the place of scikit-learn's searches. Start reading at ``search``, then ``running`` (the
driver) and ``evaluation`` (the lanes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluid.integrations.sklearn.search import FluidSearchCV

__all__ = ["FluidSearchCV"]


def __getattr__(name: str) -> Any:
    """Loads the search on first use: lanes import this package, and need less."""
    if name != "FluidSearchCV":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fluid.integrations.sklearn.private_api import imports

    imports.check()  # It derives from a class of scikit-learn.
    from fluid.integrations.sklearn.search import FluidSearchCV

    return FluidSearchCV

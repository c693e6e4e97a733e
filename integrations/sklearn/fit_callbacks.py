"""scikit-learn's callbacks (``set_callbacks``, scikit-learn 1.9) in the fit of a search.

The driver begins and ends the tasks of the search itself; a lane those of its fits, on a copy of the search, as
scikit-learn's own processes do. Callbacks send to the driver's process what they have to tell.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class LaneCallbacks:
    """The callbacks of a search as a lane has them.

    Args:
        search: the search.
        context: of its task that consists of the fits.
    """

    def __init__(self, search: Any, context: Any) -> None:
        self._search = search
        self._context = context

    def of_fit(self, number: int) -> dict[str, Any]:
        """Returns the arguments of ``_fit_and_score`` for a fit.

        Args:
            number: of the fit in the search.
        """
        context = copy.copy(self._context)
        context._children_map = {}  # A fit whose lane has died is tried again.
        fit = context.subcontext(task_name="candidate-split-evaluation", task_id=number)
        return {"caller": self._search, "callback_ctx": fit}


class FitCallbacks:
    """Calls the callbacks of a search in the driver; does nothing with releases of scikit-learn that have none.

    Args:
        search: is about to be fitted.
        X: data.
        y: targets.
        params: of its ``fit``.
    """

    def __init__(self, search: Any, X: Any, y: Any, params: Mapping[str, Any]) -> None:
        self._search = search
        self._root: Any = None
        if hasattr(search, "_init_callback_context"):
            weights = params.get("sample_weight")
            metadata = None if weights is None else {"sample_weight": weights}
            self._data = {"estimator": search, "X": X, "y": y, "metadata": metadata}
            root = search._init_callback_context(max_subtasks=1 + (search.refit is not False))
            self._root = root.call_on_fit_task_begin(**self._data)

    @contextmanager
    def fits(self, number: int) -> Iterator[LaneCallbacks | None]:
        """The candidates are fitted in the block.

        Args:
            number: of fits.
        """
        if self._root is None:
            yield None
            return
        task = self._root.subcontext(task_name="search", max_subtasks=number, sequential_subtasks=False)
        task.call_on_fit_task_begin(estimator=self._search)
        yield LaneCallbacks(self._search, task) if _has_callbacks(self._search) else None
        task.call_on_fit_task_end(estimator=self._search)

    @contextmanager
    def refit(self, estimator: Any) -> Iterator[None]:
        """The best estimator is fitted in the block."""
        if self._root is None:
            yield
            return
        task = self._root.subcontext(task_name="refit-with-best-params")
        with task.propagate_callback_context(estimator):
            task.call_on_fit_task_begin(**self._data)
            yield
        task.call_on_fit_task_end(**self._data)

    def end(self) -> None:
        """The search is fitted."""
        if self._root is not None:
            self._root.call_on_fit_task_end(**self._data)


def _has_callbacks(search: Any) -> bool:
    return any(hasattr(each, "_skl_callbacks") for each in (search, *search.get_params(deep=True).values()))

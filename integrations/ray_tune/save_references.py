"""The references to checkpoints that the controller is given at once, as it is given those of Ray's actors."""

from __future__ import annotations

from typing import Any

import ray


class SaveReferences:
    """Makes them.

    Args:
        are_read: whether the scheduler may look at checkpoints by their references.
    """

    def __init__(self, are_read: bool) -> None:
        self._are_read = are_read
        #: The reference to ``None`` that stands for checkpoints which the scheduler does not look at.
        self._placeholder: Any = None

    def of(self, saved: Any) -> Any:
        """Returns a reference to a checkpoint; one to ``None`` if the scheduler never looks at it."""
        if self._are_read:
            return ray.put(saved)
        if self._placeholder is None:
            self._placeholder = ray.put(None)
        return self._placeholder

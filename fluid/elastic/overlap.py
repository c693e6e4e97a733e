"""Whether gradients that were sent during the backward pass have changed since, found without a wait in each step.

A GPU runs behind the host. A host that reads a value in a step waits for the step's backward pass, and cannot queue the
next step meanwhile. So comparisons are made and collected on the device. The host reads them once per iteration, before
the iteration counts.
"""

from __future__ import annotations

import torch

from fluid.elastic.generation import GenerationBrokenError
from fluid.elastic.group import Group

SENT_TOO_EARLY = "gradients were sent before they were final; the iteration is repeated"


class Changes:
    """Whether one of several comparisons has found a change; kept on the devices that compare."""

    def __init__(self) -> None:
        self._found: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def note(self, changed: torch.Tensor) -> None:
        """Adds a comparison's result: a boolean without dimensions, which this object may write to."""
        found = self._found.setdefault(changed.device, changed)
        if found is not changed:
            found.logical_or_(changed)

    def read(self) -> bool:
        """Returns whether there was a change; waits for the devices."""
        return any(found.item() for found in self._found.values())


class Overlap:
    """What a rank knows, in one generation, of the gradients that are sent during the backward pass.

    Args:
        is_allowed: whether this rank agrees to it.

    Attributes:
        is_used: whether gradients have been sent in this way; the same on all ranks at the end of an iteration.
        failed: whether some are known to have been sent before they were final.
        changes: of values, after they were sent.
    """

    def __init__(self, is_allowed: bool = True) -> None:
        self.is_allowed = is_allowed
        self.is_used = False
        self.failed = False
        self.changes = Changes()

    def has_failed(self) -> bool:
        """Returns whether this rank's gradients were sent before they were final; waits for the devices."""
        self.failed = self.failed or self.changes.read()
        return self.failed

    def confirm(self, group: Group) -> None:
        """Returns if no gradient was sent too early; all ranks call this before an iteration's result counts.

        Raises:
            GenerationBrokenError: some rank's gradients were, or a member failed.
        """
        if not self.is_used:
            return
        failures = torch.tensor([float(self.has_failed())])
        group.all_reduce(failures)
        if failures.item():
            self.failed = True
            raise GenerationBrokenError(SENT_TOO_EARLY)

"""What the engine knows of a trial beforehand."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fluid.devices.constraints import Constraint
from fluid.resources import MemoryNeed, Requires
from fluid.trial_fields import IterationTimeout


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """A trial as the engine knows it: what matters for scheduling.

    Attributes:
        trial_id: unique within the session.
        budget: iterations to run.
        priority: trials of a higher priority start first.
        profile_key: trials of one key share measured overheads; a gang shares none with trials of one device.
        max_width: most devices; 1 for a trial that is not elastic.
        memory: device memory it needs, if known beforehand.
        can_save: whether it can be saved and restored, and so moved to another lane.
        retry_errors: whether it is tried again after it raised; after a lost lane or out of memory it always is.
        follow_up_iterations: iterations that later rungs may add after its budget, its critical path.
        iteration_timeout_s: when an iteration counts as hung: see :class:`fluid.trialgroup.Trial`.
        requires: what its devices must have; ``None`` if any will do.
        devices: the devices that the submitter asks for: see :class:`fluid.trialgroup.Trial`.
        gang: whether one lane holds all of these.
        keep_last: whether its newest checkpoint is to outlive the run.
        fusible: whether it can be fused with others like it.
        isolated: whether it runs in a lane that has run no other trial, and that ends with it.
        extends: whether its submitter may extend it once its budget is used up; ``None`` if unknown.
        config: texts of the values of its config by dotted name: they tell which trials may be like it.
    """

    trial_id: str
    budget: int
    _: KW_ONLY
    priority: float = 1.0
    profile_key: str = "default"
    max_width: int = 1
    memory: MemoryNeed | None = None
    can_save: bool = True
    retry_errors: bool = True
    follow_up_iterations: int = 0
    iteration_timeout_s: IterationTimeout = "auto"
    requires: Requires | None = None
    devices: float | None = None
    gang: bool = False
    keep_last: bool = False
    fusible: bool = False
    isolated: bool = False
    extends: bool | None = None
    config: tuple[tuple[str, str], ...] = ()

    def constraint(self) -> Constraint | None:
        """What the trial asks of its devices; ``None`` if nothing."""
        return Constraint.of(self.requires, self.devices, self.gang)

    @property
    def wanted_devices(self) -> str:
        """The devices that it asks for, in words."""
        return (self.constraint() or Constraint()).wanted(self.memory)

"""``hydra/launcher=fluid``: each job of a multirun is a trial. :mod:`fluid.integrations.hydra` does the work.

Annotations are evaluated here: Hydra runs the module before it is in ``sys.modules``, where dataclasses would look.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class FluidLauncherConf:
    """The options, ``hydra.launcher.*``: those of :class:`fluid.FluidExecutor` that are set make a new executor.

    Attributes:
        keep_going: whether the other jobs of a batch are run after one has failed.
        trial: further fields of each :class:`fluid.Trial`, such as ``devices`` and ``threads``.
    """

    _target_: str = "hydra_plugins.fluid_launcher.launcher.FluidLauncher"
    backend: str | None = None
    devices: Any = None
    packing: str | None = None
    max_packing: int | None = None
    max_fused: int | None = None
    max_failures: int | None = None
    run_dir: str | None = None
    verbose: int | None = None
    keep_going: bool = True
    trial: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/launcher", name="fluid", node=FluidLauncherConf, provider="fluid_launcher")


class FluidLauncher(Launcher):
    """Launches jobs on Fluid's lanes; the arguments are the fields of :class:`FluidLauncherConf`."""

    def __init__(self, *, keep_going: bool = True, trial: Any = None, **options: Any) -> None:
        self._keep_going = keep_going
        self._trial = trial
        self._options = options
        self._jobs: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what all jobs have in common."""
        # Only if it is used: see the package.
        from fluid.integrations.hydra.job import SharedByJobs
        from fluid.integrations.hydra.launching import JobLauncher

        shared = SharedByJobs.of_driver(hydra_context=hydra_context, task_function=task_function, config=config)
        self._jobs = JobLauncher(
            shared, keep_going=self._keep_going, trial_fields=self._trial or {}, options=self._options
        )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of jobs, and returns how each ended, in their order."""
        return list(self._jobs.launch(job_overrides, initial_job_idx))

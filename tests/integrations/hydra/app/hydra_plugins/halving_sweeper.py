"""A user's sweeper, which asks in batches: it halves the better of two rates, and writes how each job ended."""

import json
import os
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf


@dataclass
class HalvingSweeperConf:
    _target_: str = "hydra_plugins.halving_sweeper.HalvingSweeper"
    rounds: int = 2


ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=HalvingSweeperConf, provider="tests")


class HalvingSweeper(Sweeper):
    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._launcher: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from hydra.core.plugins import Plugins

        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        rates, jobs, ended = [1.0, 0.5], 0, []
        for _ in range(self._rounds):
            batch = [[*arguments, f"rate={rate}"] for rate in rates]
            returned = self._launcher.launch(batch, initial_job_idx=jobs)
            jobs += len(batch)
            ended += [self._describe(each) for each in returned]
            losses = [each._return_value if each.status == JobStatus.COMPLETED else 1e9 for each in returned]
            best = rates[losses.index(min(losses))]
            rates = [best / 2, best / 4]
        with open(os.environ["ENDED"], "w", encoding="utf-8") as file:
            json.dump(ended, file)

    def _describe(self, returned: Any) -> dict[str, Any]:
        value = returned._return_value
        failed = returned.status == JobStatus.FAILED
        return {
            "status": returned.status.name,
            "value": f"{type(value).__name__}: {value}" if failed else value,
            "has_traceback": bool(failed and "in main" in str(value.__cause__)),
            "overrides": list(returned.overrides),
            "task_name": returned.task_name,
            "working_dir": returned.working_dir,
            "cfg": returned.cfg and OmegaConf.to_container(returned.cfg),
            "number": returned.hydra_cfg and returned.hydra_cfg.hydra.job.num,
            "output_dir": returned.hydra_cfg and returned.hydra_cfg.hydra.runtime.output_dir,
        }

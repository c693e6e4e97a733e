"""A HpBandSter worker as a trainable of Fluid: one iteration is one call of ``compute``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError

#: The worker of the run that this process serves, by the run's id. It is kept, as workers may load data when made.
_workers: dict[str, Any] = {}


class WorkerTrial:
    """One configuration of a worker.

    Its config holds ``worker``, the class, and ``options``, its arguments; ``run_id``, by which the trials of a run
    share the worker; ``budgets``, in order; and ``config_id``, ``config`` and ``working_directory`` for ``compute``.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config
        self._calls = 0
        run_id = config["run_id"]
        if run_id not in _workers:
            _workers.clear()
            # A worker without a logger configures the process's own.
            options = {"logger": logging.getLogger("hpbandster"), **config["options"]}
            _workers[run_id] = config["worker"](run_id=run_id, **options)
        self._worker = _workers[run_id]

    def step(self) -> dict[str, Any]:
        result = self._worker.compute(
            config_id=self._config["config_id"],
            config=dict(self._config["config"]),
            budget=self._config["budgets"][self._calls],
            working_directory=self._config["working_directory"],
        )
        if not isinstance(result, dict) or "loss" not in result:
            raise InvalidFieldError("compute", result, "must return a dict with 'loss' and 'info'")
        self._calls += 1
        return {"loss": result["loss"], "info": result.get("info")}

    @staticmethod
    def rehearsed_course(config: dict[str, Any], source: Any) -> Any:
        """Makes the course of a trial that is rehearsed: see :data:`fluid.rehearsal.backend.MAKE_COURSE`."""
        from fluid.integrations.hpbandster.worker_course import course_of

        return course_of(config, source)

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "calls.json").write_text(json.dumps(self._calls))

    def load_checkpoint(self, folder: str) -> None:
        self._calls = json.loads((Path(folder) / "calls.json").read_text())

    def cleanup(self) -> None:
        pass

"""A job of Hydra as a trial: its config is composed in the lane, and it runs there as under Hydra's basic launcher."""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fluid._imports import try_import
from fluid.trainables.driver_link import driver_link
from fluid.trainables.exception_pickle import dump_exception
from fluid.trainables.script_names import names_of_script
from fluid.trainables.trial_code import DriverLink

with try_import("Hydra", extra="hydra") as _imports:
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobStatus, run_job, setup_globals
    from omegaconf import open_dict

#: Metrics of a job: how it ended, and what its function returned, if that is a number.
STATUS, RETURN_VALUE = "status", "return_value"


class JobFailure(NamedTuple):
    """What a job raised.

    Attributes:
        exception: pickled.
        traceback: its traceback in the lane.
    """

    exception: bytes
    traceback: str


@dataclass(frozen=True)
class SharedByJobs:
    """What the jobs of an application have in common; it is sent to each lane once.

    Args:
        hydra_context: loads configs, and calls callbacks.
        task_function: the user's.
        config: of the multirun.
        singletons: state of Hydra's in the driver.
        folder: the driver's working directory.
        targets: functions and classes of the application by their names, as a config may give them in ``_target_``.
    """

    hydra_context: Any
    task_function: Any
    config: Any
    singletons: Any
    folder: str
    targets: tuple[str, ...]

    @classmethod
    def of_driver(cls, *, hydra_context: Any, task_function: Any, config: Any) -> SharedByJobs:
        """Takes what is the driver's from this process."""
        _imports.check()
        return cls(hydra_context, task_function, config, Singleton.get_state(), os.getcwd(), names_of_script())


def as_trainable(shared: SharedByJobs) -> Any:
    """Returns a generator function of a config with a job's ``overrides`` and its ``number``."""

    # Of the user's module: Fluid looks there for what lanes need to have imported.
    @functools.wraps(shared.task_function, updated=())
    def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield _run(shared, config["overrides"], config["number"])

    return run


def _run(shared: SharedByJobs, overrides: list[str], number: int) -> dict[str, Any]:
    link = driver_link()
    with _in_folder(shared.folder), _own_logging():
        setup_globals()
        Singleton.set_state(shared.singletons)
        config = shared.hydra_context.config_loader.load_sweep_config(shared.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        done = run_job(
            hydra_context=shared.hydra_context,
            task_function=shared.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    value = done._return_value
    if done.status == JobStatus.FAILED:
        _tell_failure(link, done, value)
        return {STATUS: done.status.name}
    try:
        link.ask((done, None))
    except Exception as error:  # One of the two processes cannot pickle what it returned.
        done.status = JobStatus.FAILED
        _tell_failure(link, done, error)
        return {STATUS: done.status.name}
    metrics: dict[str, Any] = {STATUS: done.status.name}
    if isinstance(value, (int, float)):
        metrics[RETURN_VALUE] = value
    return metrics


def _tell_failure(link: DriverLink, done: Any, error: BaseException) -> None:
    """Tells the driver how a job failed: with the exception, which the driver puts into Hydra's object itself."""
    done.return_value = None
    link.ask((done, JobFailure(dump_exception(error), "".join(traceback.format_exception(error)))))


@contextmanager
def _in_folder(path: str) -> Iterator[None]:
    """Works in the driver's folder, below which that of the sweep is."""
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _own_logging() -> Iterator[None]:
    """Puts back the handlers of the root logger, as a job's own write to its file."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)

"""HpBandSter's optimizers without its dispatcher and its workers.

An optimizer is a subclass of HpBandSter's ``Master``, which starts a dispatcher and looks for workers on the network as
soon as it is made. :class:`BracketState` replaces it as the base class: it keeps the same records and starts nothing.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fluid.errors import InvalidFieldError


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings of HpBandSter, which is no longer maintained, and of the libraries that it calls."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, RuntimeWarning, SyntaxWarning):
            warnings.simplefilter("ignore", category)
        yield


with quiet():
    import ConfigSpace
    from hpbandster import optimizers
    from hpbandster.core.base_iteration import WarmStartIteration
    from hpbandster.core.dispatcher import Job
    from hpbandster.core.master import Master
    from hpbandster.core.result import Result
    from hpbandster.core.worker import Worker

__all__ = ["BY_NAME", "BracketState", "Job", "SeededRandom", "Worker", "make", "quiet"]

#: The optimizers that can be named.
BY_NAME: dict[str, Any] = {name: getattr(optimizers, name) for name in ("RandomSearch", "HyperBand", "BOHB")}


class SeededRandom:
    """A seeded state of numpy's global random generator, which HpBandSter uses.

    Args:
        seed: makes a run repeatable; ``None`` for the generator as it is.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = None if seed is None else np.random.RandomState(seed).get_state()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Replaces the state of the process's generator by the run's own; restores it at the end."""
        if self._state is None:
            yield
            return
        outer = np.random.get_state()
        np.random.set_state(self._state)
        try:
            yield
        finally:
            self._state = np.random.get_state()
            np.random.set_state(outer)


class BracketState(Master):  # type: ignore[misc]
    """``Master`` without a dispatcher: the brackets of an optimizer, with their configurations and results.

    HpBandSter calls a bracket an iteration.

    Args:
        config_generator: the optimizer's.
        result_logger: HpBandSter's ``json_result_logger`` or one like it.
        previous_result: of an earlier run, to learn from.
    """

    def __init__(self, config_generator: Any, *, result_logger: Any = None, previous_result: Any = None) -> None:
        # Not Master.__init__, which begins to listen for workers.
        self.logger = logging.getLogger("hpbandster")
        self.config_generator = config_generator
        self.result_logger = result_logger
        self.iterations: list[Any] = []
        self.warmstart_iteration = (
            [] if previous_result is None else [WarmStartIteration(previous_result, config_generator)]
        )
        clock = Job(None)
        clock.time_it("began")
        self.time_ref = clock.timestamps["began"]
        self.config = {"time_ref": self.time_ref}

    def begin_at(self, seconds: float) -> None:
        """Says when the run begins, seconds since 1970."""
        self.time_ref = self.config["time_ref"] = seconds

    def begin_bracket(self) -> None:
        """Begins the next bracket of Successive Halving."""
        kwargs = {"result_logger": self.result_logger}
        self.iterations.append(self.get_next_iteration(len(self.iterations), kwargs))

    def next_runs(self) -> list[tuple[Any, dict[str, Any], float]]:
        """Returns all that can run now: the id of a configuration, the configuration and its budget."""
        runs = []
        for index in self.active_iterations():
            while (run := self.iterations[index].get_next_run()) is not None:
                runs.append(run)
        return runs

    def register(self, job: Any) -> None:
        """Registers the result of a run, as ``Master.job_callback`` does."""
        if self.result_logger is not None:
            self.result_logger(job)
        self.iterations[job.id[0]].register_result(job)
        self.config_generator.new_result(job)

    def result(self) -> Any:
        """Returns HpBandSter's ``Result`` of all runs so far."""
        for iteration in self.warmstart_iteration:
            iteration.fix_timestamps(self.time_ref)
        data = [copy.deepcopy(iteration.data) for iteration in self.iterations]
        return Result([*data, *(iteration.data for iteration in self.warmstart_iteration)], self.config)


def make(optimizer: Any, configspace: Any, **options: Any) -> Any:
    """Makes an optimizer on :class:`BracketState`.

    Args:
        optimizer: a subclass of ``Master``, or the name of one.
        configspace: the space to search.
        options: of the optimizer.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """
    if isinstance(optimizer, str):
        if optimizer not in BY_NAME:
            raise InvalidFieldError("optimizer", optimizer, f"must be a class or one of {', '.join(BY_NAME)}")
        optimizer = BY_NAME[optimizer]
    if not (isinstance(optimizer, type) and issubclass(optimizer, Master)):
        raise InvalidFieldError("optimizer", optimizer, "must be an optimizer of HpBandSter: a class or its name")
    if not isinstance(configspace, ConfigSpace.ConfigurationSpace):
        raise InvalidFieldError("configspace", configspace, "must be a ConfigSpace.ConfigurationSpace")
    made = type(optimizer.__name__, (optimizer, BracketState), {})
    try:
        return made(configspace=configspace, **options)
    except TypeError as error:
        raise InvalidFieldError("options", options, f"{optimizer.__name__} does not accept them: {error}") from error

"""A trial of Ray Tune's that trains in several lanes: to Tune it stays one trial, with one process.

Every lane has Tune's Trainable, so that each knows what Tune would, and any of them can go on if others are gone. Rank
0's is the one that Tune sees: it alone writes checkpoints and files of the trial's, and its results are reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid.elastic.tune import hosts_elastic
from fluid.integrations.ray_tune.lane_trial import SAVED, LaneTrial, SavableLaneTrial
from fluid.integrations.ray_tune.private_api import STDERR_FILE, STDOUT_FILE, Trainable, newest_checkpoint_index
from fluid.integrations.ray_tune.serialization import PickledArguments, ShippedTrainable
from fluid.trainables.trainable import can_save

#: What a Trainable counts and remembers, beside what the user's code does.
_BOOKS = (
    "_episodes_total",
    "_iteration",
    "_iterations_since_restore",
    "_last_result",
    "_restored",
    "_time_since_restore",
    "_time_total",
    "_timesteps_since_restore",
    "_timesteps_total",
)


class ElasticLaneTrial(SavableLaneTrial):
    """One whose trainable :func:`fluid.elastic.as_tune_trainable` made.

    To :class:`fluid.elastic.ElasticMember` it is an :class:`fluid.elastic.ElasticTrainable`: the one within, whose
    iterations are Tune's, and whose state has Tune's books in it.
    """

    fluid_elastic = True

    def setup(self, config: dict[str, PickledArguments]) -> None:
        self._hosts = True
        super().setup(config)

    def setup_to_join(self, config: dict[str, PickledArguments]) -> None:
        """Sets up in a lane that takes the state from others: what they began from may be gone by now."""
        job = self._open(config)
        quiet = {**job.arguments["config"], STDOUT_FILE: None, STDERR_FILE: None}
        self._make(job, {**job.arguments, "config": quiet})
        self._hosts = False
        self._trainable._storage = None

    def _make(self, job: Any, arguments: Mapping[str, Any]) -> None:
        given = job.arguments["config"]
        self._log_files = given.get(STDOUT_FILE), given.get(STDERR_FILE)
        self._storage = job.arguments["storage"]
        super()._make(job, arguments)

    # -- what a member of several needs --------------------------------------------------------------------

    @property
    def _elastic(self) -> Any:
        return self._trainable.elastic._elastic

    @property
    def device(self) -> Any:
        """The device that this lane trains on."""
        return self._trainable.elastic.device

    @property
    def rank(self) -> int:
        """This lane's number among those that train this trial."""
        return int(self._trainable.elastic.rank)

    @property
    def size(self) -> int:
        """How many lanes train this trial."""
        return int(self._trainable.elastic.size)

    def state(self) -> dict[str, Any]:
        """The state at the end of an iteration: the trial's, and what Tune's Trainable knows about it."""
        books = {name: getattr(self._trainable, name) for name in _BOOKS}
        if books["_last_result"] is not None:
            books["_last_result"] = self._without_config(books["_last_result"])
        return {
            "elastic": self._trainable.elastic.state(),
            "books": books,
            "saves": self._saves,
            "iteration": self.iteration,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes a state that another lane, or this one before, was in."""
        self._trainable.elastic.load_state(state["elastic"])
        for name, value in state["books"].items():
            setattr(self._trainable, name, value)
        last = self._trainable._last_result
        if last is not None and "config" in last and last["config"] is None:
            last["config"] = self._trainable.config
        self._saves, self.iteration = state["saves"], state["iteration"]

    def _elastic_joined(self, reported: int, metrics: dict[str, Any] | None) -> None:
        hosts = self.rank == 0
        if hosts and not self._hosts:
            self._begin_hosting()
        elif self._hosts and not hosts:
            self._end_hosting()
        if hosts and metrics is not None and metrics[SAVED] is None:
            due = self._saves.due(self._trainable._iteration, metrics["done"])
            # The last host died with the news of this iteration: the checkpoint that comes with it is made now.
            metrics[SAVED] = self.save() if due and self.iteration > reported else None

    def _wants_save(self, done: bool, result: Mapping[str, Any]) -> bool:
        return self._hosts and super()._wants_save(done, result)

    def _begin_hosting(self) -> None:
        self._hosts = True
        with self._in_place():
            self._trainable._open_logfiles(*self._log_files)
        # Others may have written checkpoints, which only the storage knows of for sure.
        self._storage.current_checkpoint_index = newest_checkpoint_index(self._storage)
        self._trainable._storage = self._storage

    def _end_hosting(self) -> None:
        self._hosts = False
        with self._in_place():
            self._trainable._close_logfiles()
        self._redirected = False
        self._trainable._storage = None


def lane_trial_for(trainable: type, shipped: ShippedTrainable) -> type[LaneTrial]:
    """Makes the class that runs trials of one of Tune's trainables."""
    base = LaneTrial
    if issubclass(trainable, Trainable) and can_save(trainable):
        base = ElasticLaneTrial if hosts_elastic(trainable) else SavableLaneTrial
    name = getattr(trainable, "_name", None) or trainable.__name__
    return type(name, (base,), {"shipped": shipped, "__module__": base.__module__, "__qualname__": name})

"""An elastic trial of Ray Tune over several lanes, which Tune sees as one trial with one process.

Each lane holds a copy of Tune's Trainable with the same counters, so any of them can continue if others are lost. Tune
sees that of rank 0, the host: it alone writes checkpoints and the trial's files, and its results are reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid.integrations.ray_tune.lane.lane_trial import (
    RESULT,
    SAVED,
    SPEC,
    FunctionLaneTrial,
    LaneTrial,
    LaneTrialSpec,
    SavableLaneTrial,
)
from fluid.integrations.ray_tune.private_api import (
    STDERR_FILE,
    STDOUT_FILE,
    TIME_THIS_ITER_S,
    FunctionTrainable,
    Trainable,
    newest_checkpoint_index,
)
from fluid.integrations.ray_tune.serialization import PickledArguments, ShippedTrainable
from fluid.trainables.import_scan import elastic_class_of
from fluid.trainables.trainable import can_save, is_fusible

#: The names that :data:`fluid.rehearsal.backend.MAKE_COURSE` and its neighbour give.
MAKE_COURSE, REQUIRE_COURSE = "rehearsed_course", "require_rehearsed_course"
#: Counters that Tune's Trainable keeps beside the user's state.
_COUNTERS = (
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
    """A lane trial whose trainable :func:`fluid.elastic.as_tune_trainable` made.

    To :class:`fluid.elastic.ElasticMember` it is a :class:`fluid.elastic.ElasticTrainable`: it delegates to the one in
    Tune's Trainable, and adds the Trainable's counters to the state.
    """

    fluid_elastic = True

    def setup(self, config: dict[str, PickledArguments]) -> None:
        self._hosts = True
        super().setup(config)

    def setup_to_join(self, config: dict[str, PickledArguments]) -> None:
        """Sets up in a lane that receives the state from other lanes; the checkpoint they began from may be deleted."""
        spec = self._unpickle(config)
        quiet = {**spec.arguments["config"], STDOUT_FILE: None, STDERR_FILE: None}
        self._make(spec, {**spec.arguments, "config": quiet})
        self._hosts = False
        self._trainable._storage = None

    def _make(self, spec: LaneTrialSpec, arguments: Mapping[str, Any]) -> None:
        given = spec.arguments["config"]
        self._log_files = given.get(STDOUT_FILE), given.get(STDERR_FILE)
        self._storage = spec.arguments["storage"]
        super()._make(spec, arguments)

    # -- the interface of a trial that can be fused --------------------------------------------------------

    @property
    def fused_trial(self) -> Any:
        """What trains in a pack in place of this one: the trainable in Tune's Trainable."""
        return self._trainable.elastic

    def take_step(self, metrics: dict[str, Any], seconds: float) -> None:
        """Has the next :meth:`step` report an iteration that a pack ran, in so many seconds."""
        self._trainable.elastic.hand_out({**metrics, TIME_THIS_ITER_S: seconds})

    # -- the interface of an ElasticTrainable --------------------------------------------------------------

    @property
    def _elastic(self) -> Any:
        return self._trainable.elastic._elastic

    @property
    def device(self) -> Any:
        """The device that this lane trains on."""
        return self._trainable.elastic.device

    @property
    def rank(self) -> int:
        """This lane's rank among the lanes of the trial."""
        return int(self._trainable.elastic.rank)

    @property
    def size(self) -> int:
        """Number of lanes of the trial."""
        return int(self._trainable.elastic.size)

    def elastic_state(self) -> dict[str, Any]:
        """Returns the state at the end of an iteration: the user's, and the counters of Tune's Trainable."""
        counters = {name: getattr(self._trainable, name) for name in _COUNTERS}
        if counters["_last_result"] is not None:
            counters["_last_result"] = self._without_config(counters["_last_result"])
        return {
            "elastic": self._trainable.elastic.elastic_state(),
            "counters": counters,
            "checkpoints": self._checkpoints,
            "iteration": self.iteration,
        }

    def load_elastic_state(self, state: Mapping[str, Any]) -> None:
        """Loads a state of another lane, or an earlier one of this lane."""
        self._trainable.elastic.load_elastic_state(state["elastic"])
        self._restore_error = None
        for name, value in state["counters"].items():
            setattr(self._trainable, name, value)
        last = self._trainable._last_result
        if last is not None and "config" in last and last["config"] is None:
            last["config"] = self._trainable.config
        self._checkpoints, self.iteration = state["checkpoints"], state["iteration"]

    def _elastic_joined(self, reported: int, metrics: dict[str, Any] | None) -> None:
        hosts = self.rank == 0
        if hosts and not self._hosts:
            self._begin_hosting()
        elif self._hosts and not hosts:
            self._end_hosting()
        if hosts and metrics is not None and metrics[SAVED] is None:
            # The last host died before it reported this iteration: the new host makes the checkpoint that was due.
            metrics[SAVED] = self.save() if self.iteration > reported and self._is_due(metrics[RESULT]) else None

    def _should_save(self, result: Mapping[str, Any]) -> bool:
        return self._hosts and super()._should_save(result)

    def _begin_hosting(self) -> None:
        self._hosts = True
        with self._in_place():
            self._trainable._open_logfiles(*self._log_files)
        # Earlier hosts may have written checkpoints; only the storage knows the newest.
        # One more may be on its way there from host memory.
        self._storage.current_checkpoint_index = newest_checkpoint_index(self._storage) + self._in_memory
        self._trainable._storage = self._storage

    def _end_hosting(self) -> None:
        self._hosts = False
        with self._in_place():
            self._trainable._close_logfiles()
        self._redirected = False
        self._trainable._storage = None


def runs_elastic(trainable: type) -> bool:
    """Whether the trials of a trainable of Tune can span several lanes."""
    return issubclass(trainable, Trainable) and can_save(trainable) and elastic_class_of(trainable) is not None


def _rehearsed_course(cls: type[LaneTrial], config: Mapping[str, PickledArguments], source: Any) -> Any:
    """Makes the course of a trial that is rehearsed: see :data:`fluid.rehearsal.backend.MAKE_COURSE`."""
    from fluid.integrations.ray_tune.lane.rehearsed_trial import rehearsed_trial

    shipped = cls.shipped_trainable
    return rehearsed_trial(shipped.trainable_here(), config[SPEC].unpickle(), source)


def _require_rehearsed_course(cls: type[LaneTrial], source: Any) -> None:
    """Refuses a trainable that cannot be replayed."""
    from fluid.integrations.ray_tune.lane.rehearsed_trial import tune_replayable

    tune_replayable(cls.shipped_trainable.trainable_here(), source)


def lane_trial_for(trainable: type, shipped: ShippedTrainable) -> type[LaneTrial]:
    """Makes the class that runs the trials of a trainable of Tune in lanes."""
    base: type[LaneTrial] = LaneTrial
    members: dict[str, Any] = {
        MAKE_COURSE: classmethod(_rehearsed_course),
        REQUIRE_COURSE: classmethod(_require_rehearsed_course),
    }
    if runs_elastic(trainable):
        base = ElasticLaneTrial
        members["fluid_fusible"] = is_fusible(trainable)
    elif issubclass(trainable, Trainable) and can_save(trainable):
        base = SavableLaneTrial
    elif issubclass(trainable, FunctionTrainable):
        base = FunctionLaneTrial
    name = getattr(trainable, "_name", None) or trainable.__name__
    members |= {"shipped_trainable": shipped, "__module__": base.__module__, "__qualname__": name}
    return type(name, (base,), members)

"""The options of an executor, checked, and what is made of them: the backend, the engine, facts for the run folder."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from fluid._clock import wall_seconds
from fluid._logs import logger_of
from fluid.backends.base import Backend, HostRoom
from fluid.backends.hosts.lane_limits import idle_lane_limit, room_here
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP, require_process_group
from fluid.engine.placing.lanes import MOST_IDLE, Lanes
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.gpu.mps_support import MOST_CLIENTS, foreign_daemon, most_clients
from fluid.gpu.nvml import describe_gpus, driver_version
from fluid.keeping import Keep
from fluid.lane.policy import DEFAULT_POLICY, ROUNDS
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.packing import Packing, Sharing, gpu_way_of
from fluid.planners.planner import Planner
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES
from fluid.rehearsal.backend import RehearsalBackend
from fluid.rehearsal.plan import plan_in_force
from fluid.resources import DeviceChoice
from fluid.results.run_files import read_facts
from fluid.session.listeners import TrialListener
from fluid.session.output import Output
from fluid.session.specs import Isolating
from fluid.sizing.goals import Goals

# -- backend choice ------------------------------------------------------------------------------
#
# Makes the backend that an executor runs on, by its name.


def make_backend(
    backend: str | Backend,
    devices: DeviceChoice,
    run_dir: Path,
    sharing: Packing,
    lane_policy: str | None,
    process_group: str | None,
    *,
    forwards: bool,
    releasable: bool = False,
) -> Backend:
    """Returns the backend to run on.

    Args:
        backend: ``"auto"``, ``"local"``, ``"ray"``, ``"simulated"``, or a backend, which is returned.
        devices: how many devices, or which; ``None`` for all.
        run_dir: folder of the session.
        sharing: how lanes share a GPU.
        lane_policy: which trial a lane runs next; ``None`` for the default.
        process_group: how the devices of one trial communicate; ``None`` for the default.
        forwards: whether it is to forward what trials print.
        releasable: whether any device may have to be given back.

    Raises:
        InvalidFieldError: the backend does not support an argument; the error names the executor's argument.
    """
    made = _make_backend(backend, devices, run_dir, sharing, lane_policy, process_group, releasable)
    if forwards:
        made.forward_output()
    return made


def _make_backend(
    backend: str | Backend,
    devices: DeviceChoice,
    run_dir: Path,
    sharing: Packing,
    lane_policy: str | None,
    process_group: str | None,
    releasable: bool,
) -> Backend:
    if (plan := plan_in_force()) is not None:
        virtual = devices if plan.devices is None else plan.devices
        return RehearsalBackend(virtual, source=plan.source, overheads=plan.overheads, lane_policy=lane_policy)
    if not isinstance(backend, str):
        if sharing.needs_mps and backend.sharing.way != sharing.name:
            reason = f"pass it to the backend object instead: sharing={sharing.name!r}"
            raise InvalidFieldError("packing", sharing.name, reason)
        if lane_policy == ROUNDS:
            if backend.lane_policy not in (None, ROUNDS):
                raise InvalidFieldError("rounds", True, 'needs a backend object made with lane_policy="rounds"')
        elif lane_policy is not None:
            raise InvalidFieldError("lane_policy", lane_policy, "pass it to the backend object instead")
        return backend
    if backend == "simulated":
        if process_group is not None:
            reason = "means nothing to trials that are replayed, not run"
            raise InvalidFieldError("process_group", process_group, reason)
        return RehearsalBackend(devices, lane_policy=lane_policy)
    policy = lane_policy or DEFAULT_POLICY
    group = process_group or DEFAULT_PROCESS_GROUP
    try:
        if backend == "ray" or (backend == "auto" and _ray_is_connected()):
            from fluid.backends.ray import RayBackend

            return RayBackend(
                devices,
                run_dir=run_dir,
                sharing=sharing.name,
                lane_policy=policy,
                process_group=group,
                releasable=releasable,
            )
        from fluid.backends.local import LocalBackend

        return LocalBackend(devices, run_dir=run_dir, sharing=sharing.name, lane_policy=policy, process_group=group)
    except InvalidFieldError as error:
        if error.field == "sharing":
            raise InvalidFieldError("packing", error.value, error.reason) from error
        raise


def ray_hides_output() -> bool:
    """Whether the user has told Ray, by ``ray.init(log_to_driver=False)``, not to show what other processes print."""
    if not _ray_is_connected():
        return False
    connection = sys.modules.get("fluid.backends.ray.api")
    if connection is not None and connection.is_ours():
        return False  # Fluid has made the connection; it leaves this to no one else.
    is_driver = sys.modules["ray"]._private.worker.global_worker.mode == sys.modules["ray"].SCRIPT_MODE
    return is_driver and not any(thread.name == "ray_print_logs" for thread in threading.enumerate())


def _ray_is_connected() -> bool:
    """Whether this process is connected to Ray; Ray is not imported to find out."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)  # It may be another module of that name.
    return is_initialized is not None and bool(is_initialized())


# -- packing limit -------------------------------------------------------------------------------
#
# How many processes a device takes: clients of MPS, one in an exclusive compute mode; and how many idle lanes.


_log = logger_of("fluid.session")


class ProcessLimit(NamedTuple):
    """How many processes a GPU takes.

    Attributes:
        most: the number; ``None`` if it is not known to be limited.
        why: why not more, as a clause.
    """

    most: int | None = None
    why: str = ""


def process_limit(backend: Backend) -> ProcessLimit:
    """Returns how many processes each GPU of a backend takes.

    Limits that are found only later, such as those of other nodes' GPUs, apply once a lane cannot start
    (:meth:`fluid.devices.occupancy.Occupancy.cap`).
    """
    if backend.is_virtual:
        return ProcessLimit()  # Its devices are none of this machine.
    hosts = {device.host for device in backend.devices() if device.kind == "gpu"}
    if not hosts:
        return ProcessLimit()
    if gpu_way_of(backend.sharing.way).needs_mps or foreign_daemon(os.environ) is not None:
        here = driver_version() if hosts == {"localhost"} else None  # Other machines may have older drivers.
        return ProcessLimit(most_clients(here), "an MPS server takes no more clients on a GPU")
    if hosts == {"localhost"}:
        modes = {gpu.compute_mode or "" for gpu in describe_gpus()}
        if modes and all(mode.startswith("EXCLUSIVE") for mode in modes):
            return ProcessLimit(1, f"the compute mode of the GPUs is {min(modes)}, and MPS is not used")
    return ProcessLimit()


#: Seconds between two looks at how many idle lanes a device may have.
_LOOK_S = 10.0


class IdleLanes:
    """Tells the engine how many idle lanes a device may have, as lanes come and memory goes.

    Args:
        lanes: the engine's.
        backend: where they run.
        busy: most lanes that run trials on a device at once.
    """

    def __init__(self, lanes: Lanes, backend: Backend, busy: int) -> None:
        self._lanes = lanes
        self._backend = backend
        self._busy = busy
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Looks again if it is time to; ``now`` is that, in seconds."""
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._lanes.most_idle = idle_limit(self._backend, busy=self._busy)
            # What cannot be saved is lost with its lane: only what the machine has bounds it.
            self._lanes.most_processes = idle_limit(self._backend, busy=self._busy, most=sys.maxsize)


def idle_limit(backend: Backend, *, busy: int, most: int = MOST_IDLE) -> int:
    """Returns how many idle lanes each device of a backend may have; to be asked again as lanes come and go.

    On other machines than the driver's, memory and tasks are not known: there the descriptors of the driver bound them.

    Args:
        backend: where lanes run.
        busy: most lanes that run trials on a device at once.
        most: however much room there is.
    """
    if backend.is_virtual:
        return most
    devices = backend.devices()
    room = backend.lane_room() or HostRoom(room_here().descriptors)
    processes = process_limit(backend).most or MOST_CLIENTS
    return min(
        (
            idle_lane_limit(kind, room, devices=len(devices), busy=busy, processes=processes, most=most)
            for kind in {device.kind for device in devices}
        ),
        default=0,
    )


def bounded_packing(packing: int, limit: ProcessLimit) -> int:
    """Returns ``packing``, the most trials on one device, or fewer if GPUs take fewer processes.

    Each trial on a GPU has a lane of its own, and an idle lane is used before another one starts.
    """
    if limit.most is None or packing <= limit.most:
        return packing
    _log.warning("at most %d of %d trials are packed on a GPU: %s", limit.most, packing, limit.why)
    return limit.most


# -- options -------------------------------------------------------------------------------------


BACKENDS = ("auto", "local", "ray", "simulated")
DEFAULT_SPARE_LANES = 1


class FlatOptions(TypedDict, total=False):
    """Options of an executor that are fields of an object, by names of their own, which mean the same.

    See :class:`fluid.Sharing`, :class:`fluid.Goals`, :class:`fluid.Keep` and :class:`fluid.Output`.
    """

    isolation: str | None
    lane_policy: str | None
    rounds: bool
    max_fused: int
    deadline: float | str | None
    budget_usd: float | None
    price_per_device_hour: float | None
    checkpoint_bytes: int | str | None
    verbose: int
    loggers: Sequence[TrialListener]
    metrics_port: int | str | None
    run_dir: str | Path | None
    join: bool
    if_exists: str


#: The objects by which an executor takes options, each by the name of its argument.
OBJECTS: dict[str, type[Any]] = {"sharing": Sharing, "goals": Goals, "keep": Keep, "output": Output}
#: The fields of each.
FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in OBJECTS.items()}


def flattened(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an executor by names of their own, without the objects by which some of them were given.

    Raises:
        InvalidFieldError: one is given both ways, with different values; or something else than an object is given.
    """
    flat = {name: value for name, value in asked.items() if name not in OBJECTS}
    for name, kind in OBJECTS.items():
        value = asked.get(name)
        if isinstance(value, kind):
            for own, said in value.given.items():
                if own in flat and flat[own] != said:
                    reason = f"{name}={kind.__name__}(...) says {own}={said!r}: give it once"
                    raise InvalidFieldError(own, flat[own], reason)
                flat[own] = said
        elif name in FIELDS[name]:  # keep: a text stands for the object.
            if name in asked:
                flat[name] = value
        elif value is not None:
            reason = f"must be a fluid.{kind.__name__}"
            if isinstance(value, (str, int, float)):
                reason += f": {kind.__name__}({value!r}), or {FIELDS[name][0]}={value!r}"
            raise InvalidFieldError(name, value, reason)
    return flat


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutorOptions:
    """What a user asked of an executor: see :class:`fluid.executor.FluidExecutor` for each field.

    Attributes:
        plans: the planner, made for the most trials per device and the most devices per trial.

    Raises:
        InvalidFieldError: one cannot be used.
    """

    backend: str | Backend = "auto"
    devices: DeviceChoice = None
    planner: str = "portfolio"
    sharing: Sharing = field(default_factory=Sharing)
    goals: Goals = field(default_factory=Goals)
    keep: Keep = field(default_factory=Keep)
    output: Output = field(default_factory=Output)
    max_width: int | None = None
    max_failures: int | None = None
    process_group: str | None = None
    group_policy: str = DEFAULT_GROUP_POLICY
    fairness: float = 0.0
    spare_lanes: int = DEFAULT_SPARE_LANES
    plans: Planner = field(init=False)

    @classmethod
    def in_force(cls, **asked: Any) -> ExecutorOptions:
        """The options that a user asked for, but for those that the rehearsal in force sets.

        Args:
            asked: by name; what is a field of an object may be given there or by itself.

        Raises:
            InvalidFieldError: one cannot be used.
            TypeError: there is none of this name.
        """
        flat, plan = flattened(asked), plan_in_force()
        if plan is not None:
            # What trials that are replayed have no use for; what is rehearsed has not happened.
            nothing = {"keep": "none", "process_group": None, "loggers": (), "metrics_port": None}
            flat |= {**nothing, "run_dir": plan.folder_for(flat.get("run_dir")), **dict(plan.options)}
            flat["if_exists"] = _rehearsed_if_exists(
                flat.get("if_exists", "error"), has_folders=plan.folder is not None
            )
        made: dict[str, Any] = {}
        for name, kind in OBJECTS.items():
            own = {each: flat.pop(each) for each in FIELDS[name] if each in flat}
            given = asked.get(name)
            # One that says it all is taken as it is: it has checked itself.
            made[name] = given if isinstance(given, kind) and given.given == own else kind(**own)
        if unknown := next(iter(set(flat) - {each.name for each in fields(cls)}), None):
            raise TypeError(f"FluidExecutor() got an unexpected keyword argument {unknown!r}")
        return cls(**flat, **made)

    def __post_init__(self) -> None:
        _require_backend(self.backend)
        if self.output.run_dir is None and self.output.if_exists in ("resume", "overwrite"):
            raise InvalidFieldError("if_exists", self.output.if_exists, "needs run_dir=, the folder that it is about")
        is_replayed = self.backend == "simulated" if isinstance(self.backend, str) else self.backend.replays
        if is_replayed and self.keep.how == "auto":
            object.__setattr__(self, "keep", replace(self.keep, keep="none"))
        require_one_of("group_policy", self.group_policy, GROUP_POLICIES)
        require_number("fairness", self.fairness, at_least=0.0)
        require_integer("spare_lanes", self.spare_lanes, at_least=0)
        self.sharing.require_isolation(self._own_policy)
        widest = DEFAULT_MAX_WIDTH
        if self.max_width is not None:
            widest = require_integer("max_width", self.max_width, at_least=1)
        packed = DEFAULT_MAX_PACKING if self.sharing.max_packing is None else self.sharing.max_packing
        object.__setattr__(self, "plans", make_planner(self.planner, c=packed, d=widest))
        if isinstance(self.devices, int):
            require_integer("devices", self.devices, at_least=1)
        if is_replayed and self.keep.how != "none":
            raise InvalidFieldError("keep", self.keep.keep, "trials that are replayed have no checkpoints")
        if self.max_failures is not None:
            object.__setattr__(self, "max_failures", require_integer("max_failures", self.max_failures, at_least=0))
        if self.process_group is not None:
            require_process_group(self.process_group)
            if not isinstance(self.backend, str):
                raise InvalidFieldError("process_group", self.process_group, "pass it to the backend object instead")

    @property
    def facts(self) -> dict[str, Any]:
        """What ``session.json`` says of them."""
        return {
            "planner": self.planner,
            "packing": self.sharing.packing,
            "max_fused": self.most_fused,
            "lane_policy": self.sharing.policy or DEFAULT_POLICY,
            "rounds": self.sharing.rounds,
            "keep": self.keep.keep,
            "checkpoint_bytes": self.keep.quota,
            "price_per_device_hour": self.goals.price_per_device_hour,
            "deadline_s": self.goals.deadline_s,
            "budget_usd": self.goals.budget_usd,
            "group_policy": self.group_policy,
            "fairness": self.fairness,
            "isolation": "trial" if self.isolating.plain else "lane",
        }

    @property
    def _own_policy(self) -> str | None:
        """Which of several trials a lane of the user's backend runs next; ``None`` if that is not known."""
        return None if isinstance(self.backend, str) else self.backend.lane_policy

    @property
    def isolating(self) -> Isolating:
        """Which trials run in a process that has run no other one, of those that do not say so themselves."""
        asked, way = self.sharing.isolation, self.sharing.way
        shares_by = self.sharing.shares_by(self._own_policy)
        plain = asked != "lane" and (not shares_by or way.insists_on_fusing)
        fusible = plain and (asked == "trial" or self.most_fused == 1)
        return Isolating(plain, fusible, shares_by, is_asked=asked is not None)

    @property
    def most_fused(self) -> int:
        """Most trials in one fused pack; 1 if none are to be fused."""
        return self.sharing.way.most_fused(self.sharing.max_fused)

    def make_backend(self, run_dir: Path) -> Backend:
        """Makes the backend, or returns the one given.

        Raises:
            InvalidFieldError: it does not support an option.
        """
        return make_backend(
            self.backend,
            self.devices,
            run_dir,
            self.sharing.way.gpu_way(self.sharing.max_packing),
            self.sharing.policy,
            self.process_group,
            forwards=bool(self.output.verbose),
            releasable=self.goals.deadline is not None or self.goals.budget_usd is not None,
        )

    def make_engine(self, profile: Profile | None, backend: Backend) -> EngineState:
        """Makes the engine.

        Args:
            profile: measurements of earlier sessions; ``None`` for none.
            backend: whose GPUs may take fewer processes than the user wants to pack.
        """
        limit, way, most = process_limit(backend), self.sharing.way, self.sharing.max_packing
        packed = way.most_processes(most)
        if way.is_measured and not backend.pays_to_pack:
            packed = 1  # Nothing tells what it costs: on real devices, this is measured.
        policy = self.sharing.policy or backend.lane_policy or DEFAULT_POLICY
        state = EngineState(
            self.plans,
            profile,
            max_packing=bounded_packing(packed, limit),
            max_fused=self.most_fused,
            group_policy=self.group_policy,
            fairness=self.fairness,
            insists_on_fusing=way.insists_on_fusing,
            turns=way.most_turns(most, policy),
            in_rounds=self.sharing.rounds,
            max_failures=self.max_failures,
            spare_lanes=int(self.spare_lanes),
        )
        state.lanes.most_per_device = limit.most
        return state


def _rehearsed_if_exists(asked: str, *, has_folders: bool) -> str:
    """What a rehearsed session does where its folder holds a session: it goes on with none, and deletes none."""
    if has_folders or asked == "resume":
        return "error"
    if asked == "overwrite":
        reason = "cannot be in a rehearsal, which deletes nothing: RehearsalPlan(folder=...) has folders of its own"
        raise InvalidFieldError("if_exists", asked, reason)
    return asked


def _require_backend(backend: object) -> None:
    if not isinstance(backend, Backend) and not (isinstance(backend, str) and backend in BACKENDS):
        own = "an object of a class derived from fluid.backends.base.Backend"
        raise InvalidFieldError("backend", backend, f"must be one of {', '.join(sorted(BACKENDS))}, or {own}")


# -- goals left ----------------------------------------------------------------------------------
#
# What is left of a session's deadline and budget for the session that goes on with it.


def goals_left(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the deadline, the budget and the price of a session that goes on, as options of an executor.

    The price stays. A deadline stays while it is still to come; one that has passed is dropped, as the trials are to
    go on. Of a budget there is what was not spent.

    Args:
        folder: the run folder.
        given: options that the user gives, which take the place of the session's.

    Raises:
        InvalidFieldError: all of the budget was spent, and the user gives none.
    """
    facts = read_facts(folder)
    price, budget, at = facts.get("price_per_device_hour"), facts.get("budget_usd"), facts.get("deadline_at")
    left: dict[str, Any] = {"price_per_device_hour": price}
    if at is not None and "deadline" not in given:
        seconds = at - wall_seconds()
        if seconds > 0.0:
            left["deadline"] = seconds
        else:
            _log.info("the deadline of the session in %s has passed; it goes on without one", folder)
    if budget is not None and "budget_usd" not in given:
        left["budget_usd"] = budget - (price or 0.0) * facts.get("device_s", 0.0) / 3600.0
        if left["budget_usd"] <= 0.0:
            reason = "is spent: give resume() a further budget_usd, or None for no limit"
            raise InvalidFieldError("budget_usd", budget, reason)
    return left

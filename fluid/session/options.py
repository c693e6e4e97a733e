"""The options of an executor, checked, and what is made of them: the backend, the engine, facts for the run folder."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fluid._clock import wall_seconds
from fluid._logs import logger_of
from fluid.backends.base import Backend, HostRoom
from fluid.backends.hosts.lane_limits import idle_lane_limit, room_here
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP, require_process_group
from fluid.engine.engine import DEFAULT_MAX_FAILURES
from fluid.engine.placing.lanes import MOST_IDLE, Lanes
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.gpu.mps_support import MOST_CLIENTS, foreign_daemon
from fluid.gpu.nvml import describe_gpus
from fluid.keeping import Retention, parse_bytes
from fluid.lane.policy import DEFAULT_POLICY, POLICIES, ROUNDS
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.planners.planner import Planner
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES
from fluid.rehearsal.backend import RehearsalBackend
from fluid.rehearsal.plan import plan_in_force
from fluid.resources import DeviceChoice
from fluid.results.run_files import read_facts
from fluid.session.specs import Isolating
from fluid.sizing.goals import Goals, parse_duration
from fluid.trialgroup import ISOLATION

# -- backend choice ------------------------------------------------------------------------------
#
# Makes the backend that an executor runs on, by its name.


def make_backend(
    backend: str | Backend,
    devices: DeviceChoice,
    run_dir: Path,
    sharing: str,
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
        sharing: how lanes share a GPU, as :class:`fluid.backends.local.LocalBackend` takes it.
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
    sharing: str,
    lane_policy: str | None,
    process_group: str | None,
    releasable: bool,
) -> Backend:
    if (plan := plan_in_force()) is not None:
        virtual = devices if plan.devices is None else plan.devices
        return RehearsalBackend(virtual, source=plan.source, overheads=plan.overheads, lane_policy=lane_policy)
    if not isinstance(backend, str):
        if sharing == "mps" and backend.sharing.way != "mps":
            raise InvalidFieldError("packing", sharing, "pass it to the backend object instead: sharing='mps'")
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
                sharing=sharing,
                lane_policy=policy,
                process_group=group,
                releasable=releasable,
            )
        from fluid.backends.local import LocalBackend

        return LocalBackend(devices, run_dir=run_dir, sharing=sharing, lane_policy=policy, process_group=group)
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
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


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
    if backend.sharing.way == "mps" or foreign_daemon(os.environ) is not None:
        return ProcessLimit(MOST_CLIENTS, "an MPS server takes no more clients on a GPU")
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
    exclusive = process_limit(backend).most == 1
    return min(
        (
            idle_lane_limit(kind, room, devices=len(devices), busy=busy, exclusive=exclusive, most=most)
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
PACKING = ("auto", "fused", "lane", "mps", "timeslice", "off")
DEFAULT_MAX_FUSED = 64
#: Most trials that take turns in the lanes of one device, unless the user says how many.
DEFAULT_MAX_TURNS = 64
#: Lane policies that users may choose: rounds are more than a policy of lanes.
LANE_POLICIES = tuple(policy for policy in POLICIES if policy != ROUNDS)
DEFAULT_SPARE_LANES = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutorOptions:
    """What a user asked of an executor: see :class:`fluid.executor.FluidExecutor` for each field.

    Attributes:
        plans: the planner, made for the most trials per device and the most devices per trial.
        retention: which checkpoints outlive the session.
        goals: the deadline, the budget and the price.

    Raises:
        InvalidFieldError: one cannot be used.
    """

    backend: str | Backend = "auto"
    devices: DeviceChoice = None
    planner: str = "portfolio"
    packing: str = "auto"
    max_packing: int | None = None
    max_width: int | None = None
    max_fused: int = DEFAULT_MAX_FUSED
    max_failures: int = DEFAULT_MAX_FAILURES
    process_group: str | None = None
    verbose: int = 1
    lane_policy: str | None = None
    rounds: bool = False
    keep: str | None = None
    checkpoint_bytes: int | str | None = None
    deadline: float | str | None = None
    budget_usd: float | None = None
    price_per_device_hour: float | None = None
    group_policy: str = DEFAULT_GROUP_POLICY
    fairness: float = 0.0
    spare_lanes: int = DEFAULT_SPARE_LANES
    isolation: str | None = None
    plans: Planner = field(init=False)
    retention: Retention = field(init=False)
    goals: Goals = field(init=False)

    @classmethod
    def in_force(cls, **asked: Any) -> ExecutorOptions:
        """The options that a user asked for, but for those that the rehearsal in force sets.

        Raises:
            InvalidFieldError: one cannot be used.
        """
        plan = plan_in_force()
        nothing = {"keep": "none", "process_group": None}  # To trials that are replayed.
        return cls(**{**asked, **({} if plan is None else nothing | dict(plan.options))})

    def __post_init__(self) -> None:
        _require_backend(self.backend)
        quota = parse_bytes("checkpoint_bytes", self.checkpoint_bytes)
        is_replayed = self.backend == "simulated" if isinstance(self.backend, str) else self.backend.replays
        keep = "none" if self.keep is None and is_replayed else self.keep
        object.__setattr__(self, "retention", Retention.parse(keep)._replace(quota=quota))
        seconds = None if self.deadline is None else parse_duration("deadline", self.deadline)
        price = self.price_per_device_hour
        goals = Goals(deadline_s=seconds, budget_usd=self.budget_usd, price_per_device_hour=price)
        object.__setattr__(self, "goals", goals)
        require_one_of("packing", self.packing, PACKING)
        require_one_of("group_policy", self.group_policy, GROUP_POLICIES)
        require_number("fairness", self.fairness, at_least=0.0)
        require_integer("spare_lanes", self.spare_lanes, at_least=0)
        if self.lane_policy is not None:
            require_one_of("lane_policy", self.lane_policy, LANE_POLICIES)
            if self.rounds:
                raise InvalidFieldError("lane_policy", self.lane_policy, "has no meaning with rounds=True")
        if self.isolation is not None:
            require_one_of("isolation", self.isolation, ISOLATION)
            if self.isolation == "trial" and (shares := self._shares_by):
                raise InvalidFieldError(
                    "isolation", self.isolation, f'trials share a process with {shares}: pass "lane"'
                )
        if not isinstance(self.rounds, bool):
            raise InvalidFieldError("rounds", self.rounds, "must be True or False")
        if require_integer("max_fused", self.max_fused, at_least=1) == 1 and self.packing == "fused":
            raise InvalidFieldError("max_fused", self.max_fused, 'must be at least 2 with packing="fused"')
        packed, widest = DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
        if self.max_packing is not None:
            packed = require_integer("max_packing", self.max_packing, at_least=1)
        if self.max_width is not None:
            widest = require_integer("max_width", self.max_width, at_least=1)
        object.__setattr__(self, "plans", make_planner(self.planner, c=packed, d=widest))
        if isinstance(self.devices, int):
            require_integer("devices", self.devices, at_least=1)
        if not isinstance(self.verbose, int) or self.verbose not in (0, 1):
            raise InvalidFieldError("verbose", self.verbose, "must be 0 or 1")
        if is_replayed and self.retention.how != "none":
            raise InvalidFieldError("keep", self.keep, "trials that are replayed have no checkpoints")
        require_integer("max_failures", self.max_failures, at_least=0)
        if self.process_group is not None:
            require_process_group(self.process_group)
            if not isinstance(self.backend, str):
                raise InvalidFieldError("process_group", self.process_group, "pass it to the backend object instead")

    @property
    def facts(self) -> dict[str, Any]:
        """What ``session.json`` says of them."""
        return {
            "planner": self.planner,
            "packing": self.packing,
            "max_fused": self.most_fused,
            "lane_policy": self.policy or DEFAULT_POLICY,
            "rounds": self.rounds,
            "keep": None if self.retention.how == "auto" else str(self.retention),
            "checkpoint_bytes": self.retention.quota,
            "price_per_device_hour": self.goals.price_per_device_hour,
            "deadline_s": self.goals.deadline_s,
            "budget_usd": self.goals.budget_usd,
            "group_policy": self.group_policy,
            "fairness": self.fairness,
            "isolation": "trial" if self.isolating.plain else "lane",
        }

    @property
    def _shares_by(self) -> str:
        """The option by which trials share a process, in words; empty if there is none."""
        if self.packing in ("fused", "lane"):
            return f"packing={self.packing!r}"
        if self.rounds:
            return "rounds=True"
        own = None if isinstance(self.backend, str) else self.backend.lane_policy
        policy = self.lane_policy or own or DEFAULT_POLICY
        return "" if policy == DEFAULT_POLICY else f"lane_policy={policy!r}"

    @property
    def isolating(self) -> Isolating:
        """Which trials run in a process that has run no other one, of those that do not say so themselves."""
        shares_by = self._shares_by
        plain = self.isolation != "lane" and (not shares_by or self.packing == "fused")
        fusible = plain and (self.isolation == "trial" or self.most_fused == 1)
        return Isolating(plain, fusible, shares_by, is_asked=self.isolation is not None)

    @property
    def most_packed(self) -> int:
        """Most processes with a trial on one device, as far as the user decides it."""
        return 1 if self.packing in ("off", "fused", "lane") else self.plans.c

    @property
    def policy(self) -> str | None:
        """Which of several trials a lane runs next; ``None`` if the user did not say."""
        return ROUNDS if self.rounds else self.lane_policy

    def turns(self, backend: Backend) -> int:
        """Most trials on one device that take turns in its lanes; 1 if each is to have a lane of its own.

        Trials end no earlier on the whole by taking turns: unless the user insists on it, they do where they are to
        advance together, or the shortest ones first.
        """
        if self.packing == "lane":
            return DEFAULT_MAX_TURNS if self.max_packing is None else self.plans.c
        policy = self.policy or backend.lane_policy or DEFAULT_POLICY
        return DEFAULT_MAX_TURNS if policy != DEFAULT_POLICY and self.packing not in ("off", "fused") else 1

    @property
    def most_fused(self) -> int:
        """Most trials in one fused pack; 1 if none are to be fused."""
        return int(self.max_fused) if self.packing in ("auto", "fused") else 1

    def make_backend(self, run_dir: Path) -> Backend:
        """Makes the backend, or returns the one given.

        Raises:
            InvalidFieldError: it does not support an option.
        """
        is_alone = self.most_packed == 1 and self.packing != "mps"  # Then MPS would be started for nothing.
        sharing = "timeslice" if is_alone else self.packing
        return make_backend(
            self.backend,
            self.devices,
            run_dir,
            sharing,
            self.policy,
            self.process_group,
            forwards=bool(self.verbose),
            releasable=self.goals.deadline_s is not None or self.goals.budget_usd is not None,
        )

    def make_engine(self, profile: Profile | None, backend: Backend) -> EngineState:
        """Makes the engine.

        Args:
            profile: measurements of earlier sessions; ``None`` for none.
            backend: whose GPUs may take fewer processes than the user wants to pack.
        """
        limit, packed = process_limit(backend), self.most_packed
        if self.packing == "auto" and not backend.pays_to_pack:
            packed = 1  # Nothing tells what it costs: on real devices, this is measured.
        state = EngineState(
            self.plans,
            profile,
            max_packing=bounded_packing(packed, limit),
            max_fused=self.most_fused,
            group_policy=self.group_policy,
            fairness=self.fairness,
            insists_on_fusing=self.packing == "fused",
            turns=self.turns(backend),
            in_rounds=self.rounds,
            max_failures=int(self.max_failures),
            spare_lanes=int(self.spare_lanes),
        )
        state.lanes.most_per_device = limit.most
        return state


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

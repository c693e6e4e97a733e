"""The options of an executor, checked, and what is made of them: the backend, the engine, facts for the run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid.backends.base import Backend, ReplayingBackend
from fluid.elastic.messages import require_process_group
from fluid.engine.engine import DEFAULT_MAX_FAILURES, EngineState
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.keeping import Retention, parse_bytes
from fluid.lane.policy import DEFAULT_POLICY, POLICIES, ROUNDS
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.planners.planner import Planner
from fluid.planners.portfolio import make_planner
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES
from fluid.rehearsal.plan import plan_in_force
from fluid.resources import DeviceChoice
from fluid.session.backend_choice import make_backend
from fluid.session.packing_limit import bounded_packing, process_limit
from fluid.session.specs import Isolating
from fluid.sizing.goals import Goals, parse_duration
from fluid.trialgroup import ISOLATION

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
        quota = parse_bytes("checkpoint_bytes", self.checkpoint_bytes)
        is_replayed = self.backend == "simulated" or isinstance(self.backend, ReplayingBackend)
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
        if isinstance(self.backend, str):
            require_one_of("backend", self.backend, BACKENDS)
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
        policy = self.lane_policy or getattr(self.backend, "lane_policy", None) or DEFAULT_POLICY
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
        policy = self.policy or getattr(backend, "lane_policy", None) or DEFAULT_POLICY
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
        if self.packing == "auto" and isinstance(backend, ReplayingBackend) and not backend.pays_to_pack:
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

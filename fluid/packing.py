"""How trials share devices: what each value of ``packing`` means, and the user's :class:`Sharing`.

This is the only place that says so. All others ask a :class:`Packing` for what they need to know, and compare no
names; a further way to share devices is a declaration here, and the code that does it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.given_fields import GivenFields
from fluid.lane.policy import DEFAULT_POLICY, POLICIES, ROUNDS
from fluid.measure.runtime_model import DEFAULT_MAX_FUSED, DEFAULT_MAX_PACKING
from fluid.trialgroup import ISOLATION
from fluid.user_calls import user_class

#: Most trials that take turns in the lanes of one device, unless the user says how many.
DEFAULT_MAX_TURNS = 64
#: Lane policies that users may choose: rounds are more than a policy of lanes.
LANE_POLICIES = tuple(policy for policy in POLICIES if policy != ROUNDS)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A value of ``packing``.

    Attributes:
        name: the value, as users write it.
        needs: what it cannot do without, in words.
        admits: which trials share a device, and how many, in words.
        bounds: what ``max_packing`` is with it, in words; empty if it has no meaning.
        measures: what is measured to decide how many share a device, in words.
        shown: how reports call it where lanes share a GPU by it; empty for values that are no such way.
        has_processes: whether several processes with trials share a device.
        takes_turns: whether all trials of a device run in one process, an iteration each in turn.
        fuses: whether trials that can be fused are, where it is measured to pay.
        insists_on_fusing: whether they are fused without being measured first.
        tries_mps: whether lanes on a GPU are clients of NVIDIA MPS where that is available.
        needs_mps: whether it is an error if MPS is not.
        is_measured: whether it shares a device only as far as that is known to pay.
    """

    name: str
    needs: str
    admits: str
    bounds: str = ""
    measures: str
    shown: str = ""
    has_processes: bool = False
    takes_turns: bool = False
    fuses: bool = False
    insists_on_fusing: bool = False
    tries_mps: bool = False
    needs_mps: bool = False
    is_measured: bool = False

    @property
    def shares_process(self) -> bool:
        """Whether trials share a process by it: all, or, with ``insists_on_fusing``, those that can be fused."""
        return self.takes_turns or self.insists_on_fusing

    def most_processes(self, max_packing: int | None) -> int:
        """Most processes with trials on one device, as far as the user decides it."""
        if not self.has_processes:
            return 1
        return DEFAULT_MAX_PACKING if max_packing is None else max_packing

    def most_turns(self, max_packing: int | None, policy: str) -> int:
        """Most trials of one device that take turns in its lanes; 1 if each is to have a lane of its own.

        Trials end no earlier on the whole by taking turns: unless the user insists on it, they do where they are to
        advance together, or the shortest ones first.

        Args:
            max_packing: as the user gave it.
            policy: which of several trials a lane runs next.
        """
        if self.takes_turns:
            return DEFAULT_MAX_TURNS if max_packing is None else max_packing
        return DEFAULT_MAX_TURNS if self.has_processes and policy != DEFAULT_POLICY else 1

    def most_fused(self, max_fused: int) -> int:
        """Most trials in one fused pack; 1 if none are to be fused."""
        return max_fused if self.fuses else 1

    def gpu_way(self, max_packing: int | None) -> Packing:
        """How the lanes of a GPU share it, as backends take it; no MPS is started for one process alone."""
        is_alone = self.most_processes(max_packing) == 1 and not self.needs_mps
        return TIMESLICE if is_alone else self


_RAISES = "a further one in its own process, as long as the device then does more"
_PROCESSES = f"most processes on a device, {DEFAULT_MAX_PACKING} by default"
_SLOWDOWN = "the slowdown by each further trial"

AUTO = Packing(
    name="auto",
    needs="nothing: MPS and fusing where possible",
    admits=f"{_RAISES}; or up to `max_fused` fused ones, as long as doubling them gains",
    bounds=_PROCESSES,
    measures=f"{_SLOWDOWN}; the gain of fusing",
    has_processes=True,
    fuses=True,
    tries_mps=True,
    is_measured=True,
)
FUSED = Packing(
    name="fused",
    needs="trials of a `FusedTrainable`",
    admits="up to `max_fused` that can be fused; others have a device each",
    measures="nothing first",
    fuses=True,
    insists_on_fusing=True,
)
LANE = Packing(
    name="lane",
    needs="nothing",
    admits="up to `max_packing` in one process, which run an iteration each in turn",
    bounds=f"most trials that take turns on a device, {DEFAULT_MAX_TURNS} by default",
    measures="the memory of a first trial, which runs alone",
    takes_turns=True,
)
MPS = Packing(
    name="mps",
    needs="NVIDIA MPS on all GPUs",
    admits=f"{_RAISES}; side by side",
    bounds=_PROCESSES,
    measures=_SLOWDOWN,
    shown="NVIDIA MPS",
    has_processes=True,
    tries_mps=True,
    needs_mps=True,
)
TIMESLICE = Packing(
    name="timeslice",
    needs="nothing",
    admits=f"{_RAISES}; on a GPU in time slices, without MPS",
    bounds=_PROCESSES,
    measures=_SLOWDOWN,
    shown="time slices",
    has_processes=True,
)
OFF = Packing(
    name="off",
    needs="nothing",
    admits="none: one trial on a device",
    measures="nothing",
)

PACKINGS = {packing.name: packing for packing in (AUTO, FUSED, LANE, MPS, TIMESLICE, OFF)}
#: How the lanes of a GPU share it, as backends take it.
GPU_WAYS = {name: packing for name, packing in PACKINGS.items() if packing.has_processes}
DEFAULT_GPU_WAY = TIMESLICE.name


def gpu_way_of(name: str) -> Packing:
    """Returns a way in which lanes share a GPU, as backends take it: their argument ``sharing``.

    Raises:
        InvalidFieldError: there is none of this name.
    """
    return GPU_WAYS[require_one_of("sharing", name, GPU_WAYS)]


@user_class
@dataclass(frozen=True)
class Sharing(GivenFields):
    """How trials share devices and processes: an argument of :class:`fluid.FluidExecutor`.

    Example:
        >>> from fluid import FluidExecutor, Sharing, Trial, TrialGroup
        >>> def train(config):
        ...     yield {"loss": config["lr"]}
        >>> trials = [Trial(train, {"lr": lr}) for lr in (0.1, 0.2)]
        >>> with FluidExecutor("local", 1, sharing=Sharing("lane", max_packing=2), verbose=0) as executor:
        ...     handle = executor.submit_trialgroup(TrialGroup(trials))
        ...     sorted(result.metrics["loss"] for result in handle.results())
        [0.1, 0.2]

    Args:
        packing: how trials share a device. ``"auto"``, the default: as is measured to pay. ``"fused"``: those of one
            shape train as one batched model. ``"lane"``: in one process, where they run an iteration each in turn.
            ``"timeslice"``: in processes that take turns on a GPU; ``"mps"``: side by side, by NVIDIA MPS. ``"off"``:
            they do not (``docs/devices.md``).
        max_packing: most processes with trials on one device; ``None``, the default, for 4. With ``"lane"``, most
            trials that take turns on one, by default 64. It has no meaning with ``"fused"`` and ``"off"``.
        isolation: ``"trial"``: each trial runs in a process that has run no other one, and that ends with it
            (``docs/trainables.md``); ``"lane"``: trials run one after another in the processes that there are, as is
            faster for tiny ones whose author knows that they leave nothing behind. ``None``, the default, for
            ``"trial"``, but ``"lane"`` where trials share a process by their nature: with ``packing="fused"`` or
            ``"lane"``, ``rounds=True``, another lane policy, and for trials that can be fused.
        lane_policy: which of several trials in it a lane runs next: ``"longest_first"``, the default, the one with the
            longest work left; ``"srtf"``, the shortest; ``"fair"``, the one that has run least. With the last two,
            many trials of a device take turns in its lanes with ``packing="auto"``, too (``docs/devices.md``).
        rounds: whether all trials advance together, an iteration each in turn, so that they can be compared early;
            ``False`` by default.
        max_fused: most trials in one fused pack; 128 by default. 1 switches fusing off.

    Raises:
        InvalidFieldError: a value cannot be used, or not with another one.
    """

    packing: str = "auto"
    _: KW_ONLY
    max_packing: int | None = None
    isolation: str | None = None
    lane_policy: str | None = None
    rounds: bool = False
    max_fused: int = DEFAULT_MAX_FUSED

    def __post_init__(self) -> None:
        require_one_of("packing", self.packing, PACKINGS)
        if self.max_packing is not None:
            try:
                most = require_integer("max_packing", self.max_packing, at_least=1)
            except InvalidFieldError as error:
                bounds = f"is the {self.way.bounds}" if self.way.bounds else "has no meaning"
                reason = f"{error.reason}; with packing={self.packing!r} it {bounds}"
                raise InvalidFieldError(error.field, error.value, reason) from None
            object.__setattr__(self, "max_packing", most)
        if not isinstance(self.rounds, bool):
            raise InvalidFieldError("rounds", self.rounds, "must be True or False")
        if self.lane_policy is not None:
            require_one_of("lane_policy", self.lane_policy, LANE_POLICIES)
            if self.rounds:
                raise InvalidFieldError("lane_policy", self.lane_policy, "has no meaning with rounds=True")
        if self.isolation is not None:
            require_one_of("isolation", self.isolation, ISOLATION)
        self.require_isolation()
        object.__setattr__(self, "max_fused", require_integer("max_fused", self.max_fused, at_least=1))
        if self.max_fused == 1 and self.way.insists_on_fusing:
            raise InvalidFieldError("max_fused", self.max_fused, f'must be at least 2 with packing="{self.packing}"')

    @property
    def way(self) -> Packing:
        """What its ``packing`` means."""
        return PACKINGS[self.packing]

    @property
    def policy(self) -> str | None:
        """Which of several trials a lane runs next; ``None`` if the user did not say."""
        return ROUNDS if self.rounds else self.lane_policy

    def shares_by(self, policy_of_lanes: str | None = None) -> str:
        """The option by which trials share a process, in words; empty if there is none.

        Args:
            policy_of_lanes: which trial a lane runs next if the user did not say; ``None`` for the default.
        """
        if self.way.shares_process:
            return f"packing={self.packing!r}"
        if self.rounds:
            return "rounds=True"
        policy = self.lane_policy or policy_of_lanes or DEFAULT_POLICY
        return "" if policy == DEFAULT_POLICY else f"lane_policy={policy!r}"

    def require_isolation(self, policy_of_lanes: str | None = None) -> None:
        """Refuses a process of its own for each trial where trials share processes by another option.

        Args:
            policy_of_lanes: as for :meth:`shares_by`.
        """
        if self.isolation == "trial" and (shares := self.shares_by(policy_of_lanes)):
            raise InvalidFieldError("isolation", self.isolation, f'trials share a process with {shares}: pass "lane"')

"""What a session of torture.py is to do: drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from torture_nasty import HANGS, NASTY, WEIGHTS

#: Kinds of sessions, and how often each is drawn.
SESSIONS = {"local": 70, "elastic": 14, "optuna": 5, "tune": 6, "ray": 5}
#: Faults that the session's supervisor brings about, and how often each is drawn.
FAULTS = {
    "kill_lane": 10, "stop_lane": 6, "stop_lane_long": 3, "kill_server": 4, "stop_server": 3,
    "kill_driver": 14, "stop_driver": 4, "kill_driver_and_server": 4, "kill_all": 3,
    "kill_guardian": 3, "kill_guardian_and_server": 2, "kill_every": 2,
    "term_driver": 5, "term_driver_twice": 2, "int_driver": 4, "hup_driver": 3, "usr1_driver": 3,
    "fill_disk": 2, "limit_file": 3, "lose_memory": 3, "fill_memory": 3, "damage_checkpoint": 8,
    "torn_results": 3, "torn_journal": 3, "torn_trials": 2, "torn_payloads": 2,
    "kill_rank0": 6, "stop_rank0": 4, "kill_mps": 6, "stop_mps": 2,
    "eio": 13, "short_write": 13, "enospc": 11, "full_at_close": 9, "strangers": 14,
}  # fmt: skip
#: Faults that befall a driver before it starts, and the share of drivers that each befalls.
STARTS = {"clock_forward": 0.2, "clock_back": 0.25, "other_boot": 0.15, "hostile_cwd": 0.12}
#: Those that only a driver that resumes has.
RESUMED = ("clock_forward", "clock_back", "other_boot")
#: Those that only sessions of one kind have.
ONLY = {"kill_rank0": "elastic", "stop_rank0": "elastic", "kill_mps": "mps", "stop_mps": "mps"}
#: Those that only sessions whose processes are all children of their drivers have, not those on a cluster of Ray's or
#: those whose next driver begins with a new run folder.
OWN_MACHINE = ("eio", "short_write", "enospc", "full_at_close", *RESUMED)
#: Those that end the driver.
ENDINGS = (
    "kill_driver", "kill_driver_and_server", "kill_all", "kill_every", "term_driver", "term_driver_twice",
    "int_driver", "hup_driver", "usr1_driver", "limit_file", "eio", "enospc", "full_at_close",
)  # fmt: skip
#: Faults of trials that sweeps do not have: their trials have the measured limit, which is at least 10 minutes; and
#: Tune's loggers end a sweep for a metric whose text cannot be made.
NOT_IN_SWEEPS = ("hang", "metric_speechless")
#: Those that only trials have whose process has no connection but its lane's: what they write may be taken for data.
ONLY_LOCAL = ("garbage",)
#: What the driver does to its own session, and how often each is drawn.
REQUESTS = {
    "extend": 5, "stop": 2, "stop_now": 1, "add": 3, "call": 3, "forget": 2,
    "remove_device": 3, "drain_device": 2, "add_device": 4,
}  # fmt: skip
#: Those of them that count as faults.
REQUESTED_FAULTS = ("remove_device", "drain_device", "add_device")


@dataclass(kw_only=True)
class Plan:
    """A session.

    Attributes:
        seed: of the session.
        kind: one of :data:`SESSIONS`.
        devices: how many it begins with.
        options: of the executor.
        groups: each a name, and its trials as fields of ``TrialPlan``.
        requests: how many requests its drivers make.
        faults: how many faults its supervisor brings about.
        fault_weights: how often each kind of fault is drawn.
        start_shares: the share of drivers that each fault befalls before they start.
        memory_mb: size of the RAM disk.
        disk_mb: size of the disk of the run folder; ``None`` for the disk of the other files.
        descriptors: most descriptors of a process; ``None`` for no limit.
        scheduler: that of a sweep under Ray Tune; for Optuna ``"asha"`` stands for a pruner.
        machines: of its Ray cluster, if it has one; they differ by their addresses only.
        mps: whether its devices are shared by a stand-in for MPS.
    """

    seed: str
    kind: str
    devices: int
    options: dict[str, Any]
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    requests: int = 0
    faults: int = 0
    fault_weights: dict[str, float] = field(default_factory=dict)
    start_shares: dict[str, float] = field(default_factory=dict)
    memory_mb: int = 256
    disk_mb: int | None = None
    descriptors: int | None = None
    scheduler: str = "fifo"
    machines: int = 1
    mps: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return asdict(self)


def draw(seed: str, *, faults: int | None, kinds: set[str], skipped: set[str], sessions: set[str]) -> Plan:
    """Draws a session.

    Args:
        seed: of the session.
        faults: how many faults; ``None`` to draw that too.
        kinds: of faults, in trials too; empty for all.
        skipped: kinds of faults that are left out.
        sessions: kinds of sessions; empty for all.
    """
    draws = random.Random(seed)
    weights = {kind: weight for kind, weight in SESSIONS.items() if not sessions or kind in sessions}
    kind = draws.choices(list(weights), list(weights.values()))[0]
    elastic = kind == "elastic"
    all_mps = bool(kinds) and kinds <= {name for name, only in ONLY.items() if only == "mps"}
    mps = kind == "local" and (draws.random() < 0.06 or all_mps)
    plan = Plan(
        seed=seed,
        kind=kind,
        devices=draws.randint(2, 4) if elastic else draws.randint(1, 4),
        options={
            "planner": draws.choice(["portfolio", "portfolio", "dynamic", "static", "fifo"]),
            "packing": "mps" if mps else draws.choice(["auto", "auto", "timeslice", "off"]),
            "lane_policy": draws.choice([None, "srtf", "fair"]),
            "max_failures": 1000,
        },
        mps=mps,
    )
    if kind == "ray" and draws.random() < 0.6:
        plan.machines, plan.devices = 2, draws.randint(3, 4)
    if elastic:
        plan.options |= {"planner": "portfolio", "packing": "off"}
    plan.faults = draws.randint(8, 18) if faults is None else faults
    if kind in ("tune", "optuna", "ray", "elastic") and faults is None:
        plan.faults = draws.randint(5, 10)

    def wanted(name: str) -> bool:
        return name not in skipped and (not kinds or name in kinds)

    plan.fault_weights = {
        name: weight
        for name, weight in FAULTS.items()
        if wanted(name) and (name not in ONLY or ONLY[name] == kind or (mps and ONLY[name] == "mps"))
    }
    plan.start_shares = {name: share for name, share in STARTS.items() if wanted(name)}
    if kind not in ("local", "elastic"):
        for name in OWN_MACHINE:
            plan.fault_weights.pop(name, None)
            plan.start_shares.pop(name, None)
    if kind in ("tune", "optuna"):  # Their drivers begin with a new run folder.
        for name in ("torn_results", "torn_journal", "torn_trials", "torn_payloads", "fill_disk", "limit_file"):
            plan.fault_weights.pop(name, None)
    if elastic:  # A trial is wide some seconds after its driver has begun: most faults are to hit it then.
        plan.fault_weights |= {name: 0.4 for name in ENDINGS if name in plan.fault_weights}
    plan.scheduler = draws.choice(["fifo", "asha", "hyperband"])
    odds = draws.random()
    if odds < 0.1:
        plan.memory_mb = 2 if kind in ("local", "elastic", "optuna") else 256
    if kind in ("local", "elastic") and (wanted("fill_disk") or wanted("full_at_close")):
        plan.disk_mb = 64
    if 0.1 <= odds < 0.2 and plan.disk_mb is not None and kind == "local":
        plan.disk_mb = 6
    elif 0.2 <= odds < 0.25 and kind == "local":
        plan.descriptors = 96
    if kind == "local" and wanted("strangers") and draws.random() < 0.8 and find_spec("prometheus_client"):
        plan.options["metrics_port"] = 0
    nasty = [name for name in NASTY if wanted(name) and (kind == "local" or name not in ONLY_LOCAL)]
    sweep = kind in ("tune", "optuna")
    if sweep:
        nasty = [name for name in nasty if name not in NOT_IN_SWEEPS]
    for number in range(1 if elastic or sweep else draws.randint(1, 3)):
        count = (
            draws.choice([1, 2])
            if elastic and plan.devices == 4
            else 1
            if elastic
            else draws.randint(3, 6)
            if sweep
            else draws.choice([1, 2, 3, 5, 8])
        )
        plan.groups[f"g{number}"] = [
            trial(draws, f"{seed}/g{number}-t{index}", kind, nasty) for index in range(count)
        ]  # fmt: skip
    plan.requests = 0 if sweep else draws.randint(0, 3 if elastic else 10)
    return plan


def trial(draws: random.Random, seed: str, kind: str, nasty: list[str]) -> dict[str, Any]:
    """Draws a trial."""
    elastic = kind == "elastic"
    budget = draws.randint(60, 100) if elastic else draws.choice([1, 8, 20, 40, 80])
    form = "elastic" if elastic else draws.choices(["class", "generator"], [9, 1])[0]
    drawn: dict[str, str] = {}
    doomed = False
    if nasty and draws.random() < (0.15 if elastic else 0.3):
        for _ in range(draws.randint(1, 2)):
            drawn[str(draws.randint(1, budget))] = draws.choices(nasty, [WEIGHTS.get(name, 1) for name in nasty])[0]
        doomed = "value_error" in nasty and draws.random() < 0.1
        if doomed:
            drawn = {str(draws.randint(1, budget)): "value_error"}
    hangs = [iteration for iteration, kind in drawn.items() if kind in HANGS]
    for iteration in hangs[1:]:  # A trial may go on after one hung iteration, not after two.
        del drawn[iteration]
    return {
        "id": seed.rpartition("/")[2],
        "form": form,
        "budget": budget,
        "doomed": doomed,
        "iteration_timeout_s": 10.0 if hangs else None,
        "priority": draws.choice([0.5, 1.0, 2.0]),
        "config": {
            "seed": seed,
            "seconds": 0.3 if elastic else draws.choice([0.0, 0.002, 0.02, 0.1]),
            "padding": draws.choice([0, 100, 20_000, 200_000]),
            "nasty": drawn,
        },
    }

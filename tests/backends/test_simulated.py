"""Tests of fluid.backends.simulated."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.arrangement import Arrangement, Resize, Running
from fluid.backends import simulated
from fluid.backends.simulated import SimulationResult, simulate
from fluid.instance import Instance
from fluid.planner import Planner
from fluid.planners import PLANNERS, make_planner
from fluid.resources import Cluster, Device
from fluid.runtime_model import FloatArray
from fluid.scenario import ALGORITHMS, DISTRIBUTIONS, DeviceChange, Runtimes, Scenario, Workload
from fluid.strips import Segment
from fluid.workloads import Algorithm, Ask, GroupAsk

NAMES = tuple(PLANNERS)
LOCK_STEP = ("random", "successive_halving", "hyperband", "syncbohb", "pbt")
CLOSE = 1e-6

# --- Scenarios, and what can be read off their segments


@st.composite
def clusters(draw: st.DrawFn, *, mixed: bool = True) -> Cluster:
    """One to eight devices; ``mixed`` ones may differ in host and speed."""
    n = draw(st.integers(1, 8))
    if not mixed or draw(st.booleans()):
        return Cluster.of(n)
    of_device = st.tuples(st.sampled_from("ab"), st.sampled_from([0.5, 1.0, 2.0]))
    drawn = draw(st.lists(of_device, min_size=n, max_size=n))
    return Cluster(tuple(Device(i, host=host, speed=speed) for i, (host, speed) in enumerate(drawn)))


@st.composite
def device_changes(draw: st.DrawFn, cluster: Cluster) -> tuple[DeviceChange, ...]:
    """Losses and gains that leave at least one device; lost devices may come back, also at the same instant."""
    present, changes, at = {device.index for device in cluster.devices}, [], 0.0
    for _ in range(draw(st.integers(0, 5))):
        at += draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.75]))
        if len(present) > 1 and draw(st.booleans()):
            lost = draw(st.sampled_from(sorted(present)))
            present.remove(lost)
            changes.append(DeviceChange(at, lost=lost))
        else:
            gained = draw(st.sampled_from([index for index in range(20) if index not in present]))
            present.add(gained)
            changes.append(DeviceChange(at, device=Device(gained, host=draw(st.sampled_from("ab")))))
    return tuple(changes)


@st.composite
def scenarios(
    draw: st.DrawFn,
    *,
    algorithms: Sequence[str] = ALGORITHMS,
    distributions: Sequence[str] = DISTRIBUTIONS,
    mixed: bool = True,
    changes: bool = True,
    exact: bool = False,
) -> Scenario:
    """Small scenarios of every kind; ``exact`` ones have neither runtime errors nor early stops."""
    cluster = draw(clusters(mixed=mixed))
    algorithm = draw(st.sampled_from(algorithms))
    return Scenario(
        cluster=cluster,
        workload=Workload(
            algorithm,
            trials=draw(st.integers(1, 16)),
            max_iterations=draw(st.sampled_from([1, 2, 9, 20])),
            eta=draw(st.sampled_from([2, 3])),
            concurrency=draw(st.sampled_from([0, 3])),
            interval=draw(st.integers(1, 7)),
        ),
        runtimes=Runtimes(draw(st.sampled_from(distributions)), draw(st.sampled_from([0.25, 1.0])), 0.5),
        alpha=draw(st.sampled_from([1.0, 1.1, 1.3, 2.5])),
        beta=draw(st.sampled_from([1.0, 1.05, 1.3])),
        c=draw(st.sampled_from([1, 2, 4])),
        d=draw(st.sampled_from([1, 4, 16])),
        epsilon=draw(st.sampled_from([0.0, 0.0, 0.1, 2.0])),
        runtime_error=0.0 if exact else draw(st.sampled_from([0.0, 0.3])),
        early_stop=0.0 if exact else draw(st.sampled_from([0.0, 0.3, 1.0])),
        changes=draw(device_changes(cluster)) if changes else (),
        seed=draw(st.integers(0, 10**6)),
    )


names = st.sampled_from(NAMES)


def speed_of(scenario: Scenario, device: int, at: float) -> float:
    """Speed of a device at a time; a device that was lost may come back with another one."""
    found = {d.index: d.speed for d in scenario.cluster.devices}.get(device, math.nan)
    for change in sorted(scenario.changes, key=lambda change: change.at):
        if change.device is not None and change.device.index == device and change.at <= at:
            found = change.device.speed
    return found


def work_of(scenario: Scenario, result: SimulationResult) -> dict[Segment, float]:
    """True work done in each segment, in seconds at width 1 and speed 1, by actual co-residency."""
    packed: dict[int, list[Segment]] = defaultdict(list)
    for segment in result.segments:
        if segment.width < 1.0:
            packed[segment.devices[0]].append(segment)
    work = {}
    for segment in result.segments:
        begin, slowest = (
            segment.start + segment.pause,
            min(speed_of(scenario, d, segment.start) for d in segment.devices),
        )
        if segment.width >= 1.0:
            gain = segment.width / scenario.beta ** (segment.width - 1.0)
            work[segment] = slowest * gain * (segment.end - begin)
            continue
        there = packed[segment.devices[0]]
        times = {begin, segment.end, *(s.start for s in there), *(s.end for s in there)}
        cuts = sorted(time for time in times if begin <= time <= segment.end)
        work[segment] = sum(
            slowest / scenario.alpha ** (sum(s.start <= a and b <= s.end for s in there) - 1) * (b - a)
            for a, b in itertools.pairwise(cuts)
        )
    return work


def by_row(result: SimulationResult) -> dict[int, list[Segment]]:
    rows: dict[int, list[Segment]] = defaultdict(list)
    for segment in result.segments:
        rows[segment.row].append(segment)
    return rows


def was_evicted(scenario: Scenario, segment: Segment) -> bool:
    """Whether a segment ended because a device was lost."""
    return any(change.lost in segment.devices and change.at == segment.end for change in scenario.changes)


@dataclass
class Spy:
    """Watches an algorithm: who is asked for, and who is reported to have ended."""

    algorithm: Algorithm
    asked: list[Ask]
    in_flight: dict[int, Ask]
    most_in_flight: int = 0

    def start(self) -> list[GroupAsk]:
        return self.note(self.algorithm.start())

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupAsk]:
        assert [trial for trial, _ in trials] == sorted({trial for trial, _ in trials}), "in order of trial"
        for trial, _ in trials:
            del self.in_flight[trial]  # KeyError: it ended twice, or was never asked for
        return self.note(self.algorithm.ended(trials))

    def note(self, groups: list[GroupAsk]) -> list[GroupAsk]:
        for ask in (ask for group in groups for ask in group.asks):
            assert ask.trial not in self.in_flight
            self.in_flight[ask.trial] = ask
            self.asked.append(ask)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return groups


@contextmanager
def spied() -> Iterator[list[Spy]]:
    """Puts a spy on every algorithm made meanwhile."""
    spies: list[Spy] = []
    make = simulated.make_algorithm

    def make_spied(*arguments: Any) -> Spy:
        spies.append(Spy(make(*arguments), [], {}))
        return spies[-1]

    with mock.patch.object(simulated, "make_algorithm", make_spied):
        yield spies


# --- Determinism


@settings(max_examples=60)
@given(scenario=scenarios(), name=names)
def test_the_same_seed_gives_the_same_run_to_the_last_bit(scenario: Scenario, name: str) -> None:
    assert simulate(scenario, make_planner(name), record=True) == simulate(scenario, make_planner(name), record=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_another_run(algorithm: str, name: str) -> None:
    scenario = Scenario(Cluster.of(4), Workload(algorithm, trials=9, max_iterations=9))
    makespans = {simulate(scenario.with_seed(seed), make_planner(name)).makespan for seed in range(4)}
    assert len(makespans) == 4


def test_recording_changes_nothing_but_the_record() -> None:
    scenario = Scenario(Cluster.of(3), Workload("asha", trials=12), epsilon=0.1, changes=(DeviceChange(2.0, lost=0),))
    recorded = simulate(scenario, make_planner("portfolio"), record=True)
    assert simulate(scenario, make_planner("portfolio")) == replace(recorded, segments=())


@settings(max_examples=60)
@given(scenario=scenarios(algorithms=LOCK_STEP, changes=False))
def test_lock_step_algorithms_run_the_same_trials_to_the_same_fates_under_every_planner(scenario: Scenario) -> None:
    seen = []
    for name in NAMES:
        result = simulate(scenario, make_planner(name), record=True)
        work = work_of(scenario, result)
        done: dict[str, list[float]] = defaultdict(list)
        for row, segments in by_row(result).items():
            done[result.trial_ids[row]].append(sum(work[segment] for segment in segments))
        seen.append(({trial: sorted(runs) for trial, runs in done.items()}, result))
    (expected, first), *others = seen
    for done, result in others:
        assert done.keys() == expected.keys()
        for trial, runs in done.items():
            assert runs == pytest.approx(expected[trial], rel=CLOSE)
        assert (result.trials, result.stopped) == (first.trials, first.stopped)
        assert result.lower_bound == pytest.approx(first.lower_bound, rel=CLOSE)


# --- What always holds


@settings(max_examples=200)
@given(scenario=scenarios(), name=names)
def test_every_run_is_sound(scenario: Scenario, name: str) -> None:
    with spied() as spies:
        result = simulate(scenario, make_planner(name), record=True)
    (spy,) = spies
    assert spy.in_flight == {}, "a trial was lost"
    assert (
        len(spy.asked) == len(result.trial_ids) == len(by_row(result)) == sum(group.trials for group in result.groups)
    )
    assert result.trials == len({ask.trial for ask in spy.asked})
    assert 0.0 < result.lower_bound <= result.makespan * (1.0 + CLOSE)
    assert 0.0 < result.utilisation <= 1.0 + CLOSE
    assert result.busy_device_seconds <= result.device_hours * 3600.0 * (1.0 + CLOSE)
    assert result.makespan == max(segment.end for segment in result.segments)
    assert min(segment.start for segment in result.segments) == 0.0
    assert all(0.0 <= group.submitted < group.finished <= result.makespan for group in result.groups)
    if scenario.workload.algorithm == "asha":
        assert spy.most_in_flight <= (scenario.workload.concurrency or len(scenario.cluster))
    assert result.stopped == len(spy.asked) if scenario.early_stop == 1.0 else result.stopped <= len(spy.asked)
    assert scenario.early_stop or result.stopped == 0


@settings(max_examples=200)
@given(scenario=scenarios(), name=names)
def test_no_device_is_overfilled_or_used_while_it_is_not_there(scenario: Scenario, name: str) -> None:
    result = simulate(scenario, make_planner(name), record=True)
    there: dict[int, list[list[float]]] = {device.index: [[0.0, math.inf]] for device in scenario.cluster.devices}
    for at, device, added in result.device_changes:
        if added:
            there.setdefault(device, []).append([at, math.inf])
        else:
            there[device][-1][1] = at
    on_device: dict[int, list[Segment]] = defaultdict(list)
    for segment in result.segments:
        assert len(segment.devices) == len(set(segment.devices)) == max(1, round(segment.width))
        for device in segment.devices:
            on_device[device].append(segment)
            assert any(gained <= segment.start and segment.end <= lost for gained, lost in there[device])
    for segments in on_device.values():
        for time in {segment.start for segment in segments}:
            present = [segment for segment in segments if segment.start <= time < segment.end]
            limit = min(max(1, round(1.0 / segment.width)) for segment in present)
            assert len(present) <= limit <= scenario.c or len(present) == 1


@settings(max_examples=200)
@given(scenario=scenarios(distributions=["constant"], exact=True), name=names)
def test_trials_are_resized_between_iterations_and_lose_at_most_the_one_in_flight(
    scenario: Scenario, name: str
) -> None:
    with spied() as spies:
        result = simulate(scenario, make_planner(name), record=True)
    seconds, work, rows = scenario.runtimes.seconds_per_iteration, work_of(scenario, result), by_row(result)
    asked = sorted(ask.iterations for ask in spies[0].asked)
    reached = []
    for segments in rows.values():
        done = 0.0  # in iterations
        for before, after in itertools.pairwise(segments):
            done += work[before] / seconds
            if was_evicted(scenario, before):
                done = math.floor(done + CLOSE)
                continue
            assert before.end == after.start
            lets_others_in = before.width == 1.0 and after.width < 1.0 and before.devices == after.devices
            assert lets_others_in or done == pytest.approx(round(done), abs=CLOSE), "in the middle of an iteration"
        reached.append(done + work[segments[-1]] / seconds)
    # Nothing is lost beyond the iterations in flight, and nothing is run twice.
    assert sorted(reached) == pytest.approx(asked, abs=CLOSE)


@settings(max_examples=60)
@given(scenario=scenarios(), name=names)
def test_only_a_resize_pauses_a_trial(scenario: Scenario, name: str) -> None:
    result = simulate(scenario, make_planner(name), record=True)
    paused = 0
    for segments in by_row(result).values():
        assert segments[0].pause == 0.0
        for before, after in itertools.pairwise(segments):
            same = before.devices == after.devices
            left = before.pause > before.end - before.start - CLOSE
            assert after.pause <= scenario.epsilon or left, "more than once epsilon only if it stood still already"
            paused += after.pause > 0.0 and not same
    assert paused <= result.resizes
    assert scenario.epsilon or all(segment.pause == 0.0 for segment in result.segments)


@settings(max_examples=60)
@given(scenario=scenarios(algorithms=["successive_halving", "syncbohb"]), name=names)
def test_no_stage_begins_before_the_one_before_has_ended(scenario: Scenario, name: str) -> None:
    groups = simulate(scenario, make_planner(name)).groups
    for before, after in itertools.pairwise(groups):
        assert after.submitted == before.finished


@settings(max_examples=60)
@given(scenario=scenarios(mixed=False, changes=False), name=names, factor=st.sampled_from([0.5, 2.0, 8.0]))
def test_devices_of_twice_the_speed_take_half_the_time(scenario: Scenario, name: str, factor: float) -> None:
    # Powers of two, so that nothing is rounded differently.
    devices = tuple(replace(device, speed=factor) for device in scenario.cluster.devices)
    faster = replace(scenario, cluster=Cluster(devices), epsilon=scenario.epsilon / factor)
    one, other = (simulate(s, make_planner(name), record=True) for s in (scenario, faster))
    assert other.makespan * factor == pytest.approx(one.makespan, rel=CLOSE)
    assert other.resizes == one.resizes
    assert other.utilisation == pytest.approx(one.utilisation, rel=CLOSE)
    assert other.lower_bound * factor == pytest.approx(one.lower_bound, rel=CLOSE)


# --- Better than one trial a device

SYNCHRONOUS = ("random", "successive_halving", "hyperband", "syncbohb")


@pytest.mark.parametrize("algorithm", SYNCHRONOUS)
@pytest.mark.parametrize("n", [4, 16, 32])
@pytest.mark.parametrize("distribution", ["lognormal", "bimodal", "constant"])
def test_the_portfolio_beats_fifo_on_the_synchronous_shapes(algorithm: str, n: int, distribution: str) -> None:
    scenario = Scenario(
        Cluster.of(n),
        Workload(algorithm, trials=27, max_iterations=27),
        Runtimes(distribution),
        alpha=1.1,
        beta=1.05,
        epsilon=0.1,
        seed=7,
    )
    fifo, portfolio = (simulate(scenario, make_planner(name)) for name in ("fifo", "portfolio"))
    assert portfolio.makespan < fifo.makespan
    assert portfolio.lower_bound <= portfolio.makespan


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_can_be_packed_or_widened_every_planner_runs_first_come_first_served(name: str) -> None:
    scenario = Scenario(Cluster.of(3), Workload("random", trials=7, max_iterations=4), Runtimes("constant"), c=1, d=1)
    result = simulate(scenario, make_planner(name), record=True)
    assert result.makespan == 12.0
    assert result.utilisation == pytest.approx(28.0 / 36.0)
    assert result.device_hours == pytest.approx(36.0 / 3600.0)
    assert result.resizes == 0
    assert all(segment.width == 1.0 for segment in result.segments)


# --- What is reported


def test_a_result_says_what_happened() -> None:
    scenario = Scenario(
        Cluster.of(2),
        Workload("successive_halving", trials=3, max_iterations=3),
        Runtimes("constant", 2.0),
        c=1,
        d=1,
        changes=(DeviceChange(3.0, device=Device(5)), DeviceChange(9.0, lost=5)),
    )
    result = simulate(scenario, make_planner("fifo"), record=True)
    # Two trials of 2 s, the third follows; the best one then runs two iterations more, and device 5 comes at 3 s.
    assert result.makespan == 8.0
    assert [(group.name, group.submitted, group.finished, group.trials) for group in result.groups] == [
        ("bracket 0 rung 0", 0.0, 4.0, 3),
        ("bracket 0 rung 1", 4.0, 8.0, 1),
    ]
    assert (result.planner, result.n, result.trials, result.stopped, result.resizes) == ("fifo", 2, 3, 0, 0)
    assert result.cluster == scenario.cluster
    assert result.device_changes == ((3.0, 5, True),), "the loss comes after the end"
    assert result.busy_device_seconds == 10.0
    assert result.device_hours * 3600.0 == pytest.approx(2 * 8.0 + 5.0)
    assert result.utilisation == pytest.approx(10.0 / 21.0)
    assert result.trial_ids[:3] == ("trial 0, stage 0", "trial 1, stage 0", "trial 2, stage 0")
    assert result.trial_ids[3].endswith("stage 1")


def test_packed_trials_keep_a_device_busy_once() -> None:
    scenario = Scenario(Cluster.of(1), Workload("random", trials=4, max_iterations=10), Runtimes("constant"), alpha=1.1)
    result = simulate(scenario, make_planner("static"))
    assert result.makespan == pytest.approx(10 * 1.1**3)
    assert result.busy_device_seconds == pytest.approx(10 * 1.1**3)
    assert result.utilisation == pytest.approx(1.0)


def test_brackets_beside_one_another_do_not_add_up_in_the_lower_bound() -> None:
    # With a device for each trial the longest chain of rungs takes 27 iterations; each rung of a lone trial is 18 s.
    scenario = Scenario(Cluster.of(64), Workload("hyperband"), Runtimes("constant"), c=1, d=1)
    result = simulate(scenario, make_planner("fifo"))
    assert result.makespan == pytest.approx(27.0)
    assert result.lower_bound == pytest.approx(27.0)
    alone = simulate(replace(scenario, cluster=Cluster.of(1)), make_planner("fifo"))
    assert alone.makespan == alone.lower_bound, "all of the work counts, not only one bracket's"
    one_by_one = simulate(replace(scenario, workload=Workload("syncbohb")), make_planner("fifo"))
    assert one_by_one.makespan == one_by_one.lower_bound == pytest.approx(4 * 27.0)


def test_a_device_that_came_back_slower_counts_with_its_greater_speed_in_the_lower_bound() -> None:
    cluster = Cluster.of([Device(0, speed=4.0), Device(1)])
    scenario = Scenario(
        cluster,
        Workload("random", trials=1, max_iterations=8),
        Runtimes("constant"),
        c=1,
        d=1,
        changes=(DeviceChange(5.0, lost=0), DeviceChange(6.0, device=Device(0))),
    )
    result = simulate(scenario, make_planner("fifo"))
    assert result.makespan == result.lower_bound == 2.0


# --- Devices lost and gained


@pytest.mark.parametrize("name", NAMES)
def test_the_trials_of_a_lost_device_go_on_elsewhere_from_their_last_iteration(name: str) -> None:
    scenario = Scenario(
        Cluster.of(2),
        Workload("random", trials=2, max_iterations=8),
        Runtimes("constant"),
        c=1,
        d=1,
        changes=(DeviceChange(3.5, lost=0),),
    )
    result = simulate(scenario, make_planner(name), record=True)
    lost, kept = by_row(result)[0], by_row(result)[1]
    assert [(segment.start, segment.end, segment.devices) for segment in kept] == [(0.0, 8.0, (1,))]
    assert [(segment.start, segment.end, segment.devices) for segment in lost] == [(0.0, 3.5, (0,)), (8.0, 13.0, (1,))]
    assert result.device_changes == ((3.5, 0, False),)
    assert result.device_hours * 3600.0 == pytest.approx(3.5 + 13.0)


def test_an_iteration_that_ends_when_the_device_is_lost_counts() -> None:
    scenario = Scenario(
        Cluster.of(2),
        Workload("random", trials=2, max_iterations=8),
        Runtimes("constant", 0.1),
        c=1,
        d=1,
        changes=(DeviceChange(0.6, lost=0),),  # 0.8 - 0.6 is a little more than 0.2
    )
    assert simulate(scenario, make_planner("fifo")).makespan == pytest.approx(0.8 + 0.2)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_may_be_replaced_in_one_instant(name: str) -> None:
    lost, back = DeviceChange(2.0, lost=0), DeviceChange(2.0, device=Device(0, speed=2.0))
    scenario = Scenario(Cluster.of(2), Workload("random", trials=2, max_iterations=6), Runtimes("constant"), c=1, d=1)
    rows = by_row(simulate(replace(scenario, changes=(lost, back)), make_planner(name), record=True))
    assert [(segment.start, segment.end, segment.devices) for segment in rows[0]] == [(0, 2, (0,)), (2, 4, (0,))]
    # The other way round, so that the last device is lost only once there is another one.
    scenario = Scenario(Cluster.of(1), Workload("random", trials=1, max_iterations=6), Runtimes("constant"))
    changes = (DeviceChange(2.0, device=Device(7, speed=2.0)), lost)
    rows = by_row(simulate(replace(scenario, changes=changes), make_planner(name), record=True))
    assert [(segment.start, segment.end, segment.devices) for segment in rows[0]] == [(0, 2, (0,)), (2, 4, (7,))]


@pytest.mark.parametrize("name", ["dynamic", "portfolio"])
def test_a_running_trial_spreads_over_gained_devices(name: str) -> None:
    scenario = Scenario(
        Cluster.of(1),
        Workload("random", trials=1, max_iterations=12),
        Runtimes("constant"),
        d=3,
        epsilon=0.25,
        changes=tuple(DeviceChange(0.5, device=Device(index)) for index in (1, 2, 3)),
    )
    result = simulate(scenario, make_planner(name), record=True)
    assert [segment.width for segment in result.segments] == [1.0, 3.0]
    assert result.makespan == pytest.approx(1.25 + 11 / 3)
    assert result.lower_bound == pytest.approx(4.0)


def test_trials_that_wait_for_more_devices_than_are_left_are_narrowed() -> None:
    rows = run_script(Script([4.0, 4.0]), 4, [8.0, 8.0], [2, 2], c=1, changes=(DeviceChange(1.0, lost=0),))
    assert [(segment.start, segment.devices) for segment in rows[1]] == [(1.0, (1, 2, 3))]
    assert [segment.width for segment in rows[0]] == [4.0, 1.0]
    assert rows[0][-1].end == pytest.approx(1.0 + 16 / 3 + 16)


# --- Resizes, step by step


class Paces(Runtimes):
    """Trial 0 takes the first number of seconds an iteration, trial 1 the second, ..."""

    def __init__(self, *seconds: float) -> None:
        super().__init__("constant")
        object.__setattr__(self, "_seconds", list(seconds))

    def draw(self, rng: np.random.Generator) -> float:
        return float(self._seconds.pop(0))  # type: ignore[attr-defined]


class Script(Planner):
    """Starts trials at given widths, and resizes as it is told to at each departure."""

    name = "script"

    def __init__(self, widths: Sequence[float], *resizes: Sequence[Resize]) -> None:
        super().__init__()
        self.widths = widths
        self.resizes = list(resizes)

    def arrange(self, instance: Instance) -> Arrangement:
        widths = np.array(self.widths, dtype=np.float64)
        return Arrangement(widths, np.arange(len(widths)), self, replan_at_start=False, name="script")

    def replanner(self) -> Script:
        return self

    def replan(self, running: Running) -> list[Resize]:
        return list(self.resizes.pop(0)) if self.resizes else []

    def make_room(self, running: Running, waiting: FloatArray) -> list[Resize]:
        return self.replan(running)


class Asks:
    """An algorithm that asks once."""

    def __init__(self, *iterations: int) -> None:
        self._asks = tuple(Ask(trial, count) for trial, count in enumerate(iterations))

    def start(self) -> list[GroupAsk]:
        return [GroupAsk("all", self._asks, stage=0)]

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupAsk]:
        return []


def run_script(
    planner: Script, devices: int | Cluster, paces: Sequence[float], iterations: Sequence[int], **fields: Any
) -> dict[int, list[Segment]]:
    """Runs trials of these paces and iterations; returns the segments of each."""
    cluster = Cluster.of(devices) if isinstance(devices, int) else devices
    scenario = Scenario(cluster, runtimes=Paces(*paces), **fields)
    with mock.patch.object(simulated, "make_algorithm", lambda *_: Asks(*iterations)):
        return by_row(simulate(scenario, planner, record=True))


def test_a_trial_is_widened_at_the_end_of_its_iteration() -> None:
    planner = Script([1.0, 1.0], [Resize(0, 2.0)])
    rows = run_script(planner, 2, [2.0, 1.0], [5, 3], epsilon=0.5)
    assert rows[0] == [Segment(0, 0.0, 4.0, (0,), 1.0), Segment(0, 4.0, 7.5, (0, 1), 2.0, pause=0.5)]


def test_a_newer_decision_replaces_one_that_still_waits() -> None:
    planner = Script([1.0, 1.0, 1.0], [Resize(0, 2.0)], [Resize(0, 3.0)])
    rows = run_script(planner, 3, [4.0, 1.0, 1.0], [5, 1, 2])
    assert [segment.width for segment in rows[0]] == [1.0, 3.0]
    planner = Script([1.0, 1.0, 1.0], [Resize(0, 2.0)], [])
    assert [segment.width for segment in run_script(planner, 3, [4.0, 1.0, 1.0], [5, 1, 2])[0]] == [1.0]


def test_joining_others_waits_for_the_end_of_the_iteration() -> None:
    # At 2.5 s trial 2 leaves the device it shared with trial 1, and trial 0 is to take its place.
    planner = Script([1.0, 0.5, 0.5], [Resize(0, 0.5)])
    rows = run_script(planner, 2, [1.0, 1.0, 1.0], [10, 10, 2], alpha=1.25)
    assert [(s.start, s.end, s.devices, s.width) for s in rows[0][:2]] == [
        (0.0, 3.0, (0,), 1.0),
        (3.0, pytest.approx(rows[0][1].end), (1,), 0.5),
    ]


def test_letting_others_in_does_not_wait() -> None:
    # At 1 s trial 1 ends and trial 2 takes its device; trial 0 lets trial 3 in, in the middle of an iteration.
    planner = Script([1.0, 1.0, 1.0, 0.5], [Resize(0, 0.5)])
    rows = run_script(planner, 2, [3.0, 1.0, 9.0, 1.0], [2, 1, 1, 1], alpha=1.25, epsilon=0.5)
    assert rows[0] == [Segment(0, 0.0, 1.0, (0,), 1.0), Segment(0, 1.0, pytest.approx(6.25), (0,), 0.5)]
    assert rows[3] == [Segment(3, 1.0, 2.25, (0,), 0.5)]


def test_a_boundary_moves_closer_when_company_leaves() -> None:
    # Trials 0 and 1 share a device and iterate in 1.25 s and 2 s. Both are to be moved; once trial 0 has gone at
    # 1.25 s, trial 1 ends its iteration at 1.85 s.
    planner = Script([0.5, 0.5, 1.0, 1.0], [Resize(0, 1.0), Resize(1, 2.0)])
    rows = run_script(planner, 3, [1.0, 1.6, 1.0, 1.0], [4, 4, 1, 1], alpha=1.25, c=2)
    assert [(segment.start, segment.devices) for segment in rows[0]] == [(0.0, (2,)), (pytest.approx(1.25), (0,))]
    assert [(segment.start, segment.devices) for segment in rows[1]] == [(0.0, (2,)), (pytest.approx(1.85), (2, 1))]


def test_a_boundary_moves_away_when_company_arrives() -> None:
    # Trial 0 runs alone at 1.6 s an iteration until trial 1 joins it at 1.25 s: its iteration ends at 1.6875 s.
    planner = Script([0.5, 1.0, 1.0], [Resize(1, 0.5), Resize(0, 2.0)], [Resize(0, 2.0)])
    rows = run_script(planner, 3, [1.6, 1.25, 1.0], [4, 4, 1], alpha=1.25, c=2)
    assert rows[1][1].start == pytest.approx(1.25)
    assert rows[1][1].devices == rows[0][0].devices
    assert rows[0][1].start == pytest.approx(1.6875)


def test_a_resize_that_no_longer_pays_is_dropped() -> None:
    # Trial 0 has one iteration of 4 s left when it could be widened, which costs 3 s.
    planner = Script([1.0, 1.0], [Resize(0, 2.0)])
    rows = run_script(planner, 2, [4.0, 1.0], [2, 2], epsilon=3.0)
    assert [segment.width for segment in rows[0]] == [1.0]


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
def test_whether_a_resize_pays_is_a_matter_of_the_devices_speed(speed: float) -> None:
    cluster = Cluster(tuple(Device(index, speed=speed) for index in range(2)))
    planner = Script([1.0, 1.0], [Resize(0, 2.0)])
    rows = run_script(planner, cluster, [1.0, 1.0], [6, 2], epsilon=0.5 / speed)
    assert [segment.width for segment in rows[0]] == [1.0, 2.0]
    assert rows[0][-1].end == pytest.approx((2.0 + 0.5 + 2.0) / speed)

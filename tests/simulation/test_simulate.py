"""Tests of fluid.simulation.simulate: the real engine on simulated devices."""

from __future__ import annotations

import doctest
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.forecasting.scenario import ALGORITHMS, DISTRIBUTIONS, DeviceChange, Runtimes, Scenario, Workload
from fluid.planners.portfolio import PLANNERS, make_planner
from fluid.planners.rollout import Segment
from fluid.policies.engine import EngineState
from fluid.resources import Cluster, Device
from fluid.simulation import simulate as simulation
from fluid.simulation import sweeps
from fluid.simulation.simulate import simulate
from fluid.simulation.workloads import Algorithm, GroupRequest, RunRequest
from fluid.testing.validate import validate_state

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
    mixed: bool = True,
    changes: bool = True,
    exact: bool = False,
) -> Scenario:
    """Small scenarios of every kind; ``exact`` ones have neither runtime errors nor early stops."""
    cluster = draw(clusters(mixed=mixed))
    return Scenario(
        cluster=cluster,
        workload=Workload(
            draw(st.sampled_from(algorithms)),
            trials=draw(st.integers(1, 12)),
            max_iterations=draw(st.sampled_from([1, 2, 9])),
            eta=draw(st.sampled_from([2, 3])),
            concurrency=draw(st.sampled_from([0, 3])),
            interval=draw(st.integers(1, 7)),
        ),
        runtimes=Runtimes(draw(st.sampled_from(DISTRIBUTIONS)), draw(st.sampled_from([0.25, 1.0])), 0.5),
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


@dataclass
class Spy:
    """Watches an algorithm: who is asked for, and who is reported to have ended."""

    algorithm: Algorithm
    asked: list[RunRequest]
    in_flight: dict[int, RunRequest]
    most_in_flight: int = 0

    def start(self) -> list[GroupRequest]:
        return self.note(self.algorithm.start())

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        assert [trial for trial, _ in trials] == sorted({trial for trial, _ in trials}), "in order of trial"
        for trial, _ in trials:
            del self.in_flight[trial]  # KeyError: it ended twice, or was never asked for
        return self.note(self.algorithm.ended(trials))

    def note(self, groups: list[GroupRequest]) -> list[GroupRequest]:
        for request in (request for group in groups for request in group.requests):
            assert request.trial not in self.in_flight
            self.in_flight[request.trial] = request
            self.asked.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return groups


@contextmanager
def spied() -> Iterator[list[Spy]]:
    """Puts a spy on every algorithm made meanwhile, and validates the engine after every event."""
    spies: list[Spy] = []
    make, handle = sweeps.make_algorithm, EngineState.handle

    def make_spied(*arguments: Any) -> Spy:
        spies.append(Spy(make(*arguments), [], {}))
        return spies[-1]

    def handle_and_validate(state: EngineState, *events: Any) -> Any:
        commands = handle(state, *events)
        validate_state(state)
        return commands

    with (
        mock.patch.object(sweeps, "make_algorithm", make_spied),
        mock.patch.object(EngineState, "handle", handle_and_validate),
    ):
        yield spies


# --- Determinism


@settings(max_examples=40)
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


def test_the_planner_is_left_as_it_was_and_the_scenarios_limits_count() -> None:
    planner = make_planner("portfolio", c=4, d=2)
    scenario = Scenario(Cluster.of(4), Workload("random", trials=1, max_iterations=8), Runtimes("constant"), d=4)
    assert simulate(scenario, planner).makespan == pytest.approx(2.0)
    assert (planner.c, planner.d) == (4, 2)


@settings(max_examples=40)
@given(scenario=scenarios(algorithms=LOCK_STEP, changes=False))
def test_lock_step_algorithms_run_the_same_trials_to_the_same_fates_under_every_planner(scenario: Scenario) -> None:
    results = [simulate(scenario, make_planner(name)) for name in NAMES]
    for result in results[1:]:
        assert (result.trials, result.stopped) == (results[0].trials, results[0].stopped)
        assert result.lower_bound == pytest.approx(results[0].lower_bound, rel=CLOSE)


# --- What always holds


@pytest.mark.slow
@settings(max_examples=120)
@given(scenario=scenarios(), name=names)
def test_every_run_is_sound(scenario: Scenario, name: str) -> None:
    with spied() as spies:
        result = simulate(scenario, make_planner(name), record=True)
    (spy,) = spies
    assert spy.in_flight == {}, "a trial was lost"
    assert len(spy.asked) == sum(group.trials for group in result.groups)
    assert result.trials == len({request.trial for request in spy.asked}) == len(result.trial_ids)
    assert {segment.row for segment in result.segments} == set(range(result.trials))
    assert 0.0 < result.lower_bound <= result.makespan * (1.0 + CLOSE)
    assert 0.0 < result.utilisation <= 1.0 + CLOSE
    assert result.busy_device_seconds <= result.device_hours * 3600.0 * (1.0 + CLOSE)
    assert result.makespan == pytest.approx(max(segment.end for segment in result.segments))
    assert min(segment.start for segment in result.segments) == 0.0
    assert all(0.0 <= group.submitted < group.finished <= result.makespan for group in result.groups)
    if scenario.workload.algorithm == "asha":
        assert spy.most_in_flight <= (scenario.workload.concurrency or len(scenario.cluster))
    assert scenario.early_stop or result.stopped == 0


@pytest.mark.slow
@settings(max_examples=120)
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
        assert 0.0 <= segment.pause <= scenario.epsilon * (1.0 + CLOSE)
        for device in segment.devices:
            on_device[device].append(segment)
            assert any(
                gained <= segment.start + CLOSE and segment.end <= lost + CLOSE for gained, lost in there[device]
            )
    for segments in on_device.values():
        for time in {segment.start for segment in segments}:
            present = [segment for segment in segments if segment.start <= time < segment.end]
            assert len(present) <= scenario.c
            assert len(present) == 1 or all(segment.width < 1.0 for segment in present)


@settings(max_examples=60)
@given(scenario=scenarios(), name=names)
def test_a_trial_is_in_one_place_at_a_time(scenario: Scenario, name: str) -> None:
    rows: dict[int, list[Segment]] = defaultdict(list)
    for segment in simulate(scenario, make_planner(name), record=True).segments:
        rows[segment.row].append(segment)
    for segments in rows.values():
        for before, after in itertools.pairwise(sorted(segments, key=lambda segment: segment.start)):
            assert before.end <= after.start + CLOSE


@settings(max_examples=60)
@given(scenario=scenarios(algorithms=["successive_halving", "syncbohb"]), name=names)
def test_no_stage_begins_before_the_one_before_has_ended(scenario: Scenario, name: str) -> None:
    groups = simulate(scenario, make_planner(name)).groups
    for before, after in itertools.pairwise(groups):
        assert after.submitted == before.finished


@settings(max_examples=60)
@given(scenario=scenarios(mixed=False, changes=False, exact=True))
def test_where_nothing_is_packed_or_widened_no_device_idles_while_trials_wait(scenario: Scenario) -> None:
    scenario = replace(scenario, c=1, d=1, workload=replace(scenario.workload, algorithm="random"))
    result = simulate(scenario, make_planner("fifo"), record=True)
    starts = [segment.start for segment in result.segments]
    ends = [segment.end for segment in result.segments]
    last_start, n = max(starts), len(scenario.cluster)
    for time in {time for time in (*starts, *ends) if time < last_start}:
        busy = sum(start <= time < end - CLOSE for start, end in zip(starts, ends, strict=True))
        assert busy >= min(n, len(starts)) or any(abs(time - start) < CLOSE for start in starts)


def test_the_rungs_of_successive_halving() -> None:
    scenario = Scenario(Cluster.of(4), Workload("successive_halving", trials=27, max_iterations=27))
    assert [group.trials for group in simulate(scenario, make_planner("portfolio")).groups] == [27, 9, 3, 1]


# --- Better than one trial a device


@pytest.mark.parametrize("algorithm", ["random", "successive_halving", "hyperband", "syncbohb"])
@pytest.mark.parametrize("n", [4, 16])
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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_portfolio_is_no_worse_than_the_papers_planners_in_the_mean(algorithm: str) -> None:
    logs: dict[str, list[float]] = {"static": [], "dynamic": []}
    for seed, n, error in itertools.product(range(3), (4, 8), (0.0, 0.3)):
        scenario = Scenario(
            Cluster.of(n),
            Workload(algorithm, trials=16, max_iterations=27),
            alpha=1.1,
            beta=1.05,
            epsilon=0.1,
            runtime_error=error,
            early_stop=error,
            seed=seed,
        )
        ours = simulate(scenario, make_planner("portfolio")).makespan
        for peer, against in logs.items():
            against.append(math.log(ours / simulate(scenario, make_planner(peer)).makespan))
    for against in logs.values():
        assert sum(against) / len(against) < math.log(1.02)


@pytest.mark.parametrize("name", ["fifo", "static", "dynamic"])
def test_where_nothing_can_be_packed_or_widened_the_papers_planners_run_first_come_first_served(name: str) -> None:
    scenario = Scenario(Cluster.of(3), Workload("random", trials=7, max_iterations=4), Runtimes("constant"), c=1, d=1)
    result = simulate(scenario, make_planner(name), record=True)
    assert result.makespan == 12.0
    assert result.utilisation == pytest.approx(28.0 / 36.0)
    assert result.device_hours == pytest.approx(36.0 / 3600.0)
    assert result.resizes == 0
    assert all(segment.width == 1.0 for segment in result.segments)


@pytest.mark.parametrize(
    ("n", "trials", "iterations", "one_by_one", "preempting"),
    [
        pytest.param(2, 3, 9, 18.0, 14.0, id="27 iterations on 2 devices"),
        pytest.param(3, 7, 4, 12.0, 10.0, id="28 on 3"),
        pytest.param(8, 9, 27, 54.0, 31.0, id="243 on 8"),
        pytest.param(2, 4, 9, 18.0, 18.0, id="none is left over"),
        pytest.param(4, 3, 9, 9.0, 9.0, id="there is a device for each"),
    ],
)
def test_preemption_lets_trials_that_outnumber_devices_end_together(
    n: int, trials: int, iterations: int, one_by_one: float, preempting: float
) -> None:
    workload = Workload("random", trials=trials, max_iterations=iterations)
    scenario = Scenario(Cluster.of(n), workload, Runtimes("constant"), c=1, d=1)
    assert simulate(scenario, make_planner("fifo")).makespan == one_by_one
    assert simulate(scenario, make_planner("portfolio")).makespan == preempting


@pytest.mark.parametrize("seed", range(3))
def test_brackets_that_lead_to_more_come_first(seed: int) -> None:
    workload = Workload("hyperband", max_iterations=27)
    scenario = Scenario(Cluster.of(4), workload, Runtimes("constant"), c=1, d=1, seed=seed)
    dynamic, portfolio = (simulate(scenario, make_planner(name)) for name in ("dynamic", "portfolio"))
    assert portfolio.device_hours < dynamic.device_hours
    assert portfolio.makespan < 0.95 * dynamic.makespan


# --- What is reported


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(simulation).attempted > 1
    assert not doctest.testmod(simulation).failed


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
    assert result.trial_ids == ("trial-0", "trial-1", "trial-2")


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


def test_a_device_that_came_back_slower_counts_with_its_greater_speed_in_the_lower_bound() -> None:
    scenario = Scenario(
        Cluster.of([Device(0, speed=4.0), Device(1)]),
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
    rows: dict[int, list[tuple[float, float, tuple[int, ...]]]] = defaultdict(list)
    for segment in result.segments:
        rows[segment.row].append((segment.start, segment.end, segment.devices))
    assert sorted(rows.values()) == [[(0.0, 3.5, (0,)), (8.0, 13.0, (1,))], [(0.0, 8.0, (1,))]]
    assert result.device_changes == ((3.5, 0, False),)


def test_an_iteration_that_ends_when_the_device_is_lost_counts() -> None:
    scenario = Scenario(
        Cluster.of(2),
        Workload("random", trials=2, max_iterations=8),
        Runtimes("constant", 0.1),
        c=1,
        d=1,
        changes=(DeviceChange(0.6, lost=0),),  # six times 0.1 is a little more than 0.6
    )
    assert simulate(scenario, make_planner("fifo")).makespan == pytest.approx(0.8 + 0.2)


def test_a_trial_that_loses_a_device_while_it_is_resized_leaves_its_other_lanes() -> None:
    # It starts elsewhere at the instant at which it is to leave them; the next trial there waits for their answers.
    speeds = (0.5, 0.5, 1.0, 0.5, 0.5, 0.5, 1.0)
    scenario = Scenario(
        Cluster(tuple(Device(index, speed=speed) for index, speed in enumerate(speeds))),
        Workload("random", trials=7, max_iterations=9),
        Runtimes("uniform"),
        c=2,
        d=4,
        epsilon=2.0,
        early_stop=1.0,
        changes=(
            DeviceChange(0.0, lost=1),
            DeviceChange(0.0, device=Device(1)),
            DeviceChange(7.75, lost=3),
            DeviceChange(7.75, device=Device(3)),
            DeviceChange(7.75, lost=1),
        ),
        seed=253,
    )
    assert simulate(scenario, make_planner("dynamic")).trials == 7


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
    widths = [segment.width for segment in result.segments]
    assert widths[0] == 1.0 and widths[-1] == 3.0
    assert result.makespan < 12.0
    assert result.lower_bound == pytest.approx(4.0)


# -- starts -------------------------------------------------------------------------------------------------------


def test_each_start_of_a_trial_costs_its_seconds() -> None:
    scenario = Scenario(Cluster.of(2), Workload("random", trials=6, max_iterations=5), Runtimes("constant"), c=1, d=1)
    assert simulate(scenario, make_planner("fifo")).makespan == pytest.approx(3 * 5.0)
    assert simulate(replace(scenario, start_s=0.5), make_planner("fifo")).makespan == pytest.approx(3 * 5.5)


def test_a_trial_that_goes_on_in_its_process_does_not_start_again() -> None:
    workload = Workload("successive_halving", trials=9, max_iterations=9, eta=3)
    scenario = Scenario(Cluster.of(9), workload, Runtimes("constant"), c=1, d=1, start_s=0.5)
    assert simulate(scenario, make_planner("fifo")).makespan == pytest.approx(0.5 + 9.0)


@pytest.mark.parametrize("value", [-0.5, float("nan"), "1"])
def test_a_start_that_takes_no_time_that_is_one_is_refused(value: Any) -> None:
    with pytest.raises(InvalidFieldError, match="start_s="):
        Scenario(Cluster.of(1), start_s=value)

"""Re-planners that know that runtimes are uncertain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import single
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import Scene, scenes

from fluid.planners.arrangement import Replanner, Running
from fluid.planners.instance import Instance, completion_of
from fluid.planners.portfolio import Portfolio
from fluid.planners.uncertain import UncertainEnds, as_certain
from fluid.planners.water_fill import Concentrate, WaterFill

SIGMAS = st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=12, max_size=12)


def uncertain(scene: Scene, sigmas: list[float]) -> Running:
    running = scene.running
    return replace(running, sigma=np.array(sigmas[: len(running)]))


@pytest.mark.parametrize("replanner", [WaterFill(), Concentrate()])
@given(scene=scenes(widths=(1, 2, 3), speeds=(1.0, 2.0), mixed=True))
def test_with_known_runtimes_nothing_changes(replanner: Replanner, scene: Scene) -> None:
    """What is worked out by odds is the same as what is worked out without, if all of them are 0 or 1."""
    known = replace(scene.running, sigma=np.zeros(len(scene.running)))
    assert replanner.replan(known) == replanner.replan(scene.running)


@given(scene=scenes(mixed=True, widths=(1, 2, 3), speeds=(1.0, 2.0)), sigmas=SIGMAS)
def test_no_more_than_the_idle_devices_are_handed_out(scene: Scene, sigmas: list[float]) -> None:
    _, taken = scene.after(WaterFill().replan(uncertain(scene, sigmas)))
    assert taken <= scene.free


@given(scene=scenes(pack=False, widths=(1, 2, 3)), sigmas=SIGMAS)
def test_the_last_end_is_expected_no_later_than_if_nothing_is_resized(scene: Scene, sigmas: list[float]) -> None:
    """With a device for each, an end is lognormal beside the pause. Idle devices may slow down who does not count."""
    running = uncertain(scene, sigmas)
    widths = dict(zip(running.rows.tolist(), running.widths.tolist(), strict=True)) | dict(WaterFill().replan(running))
    assert running.sigma is not None
    width = np.array([widths[row] for row in running.rows.tolist()])
    pause = np.where(width == running.widths, 0.0, scene.epsilon)
    rng = np.random.default_rng(0)
    work = running.remaining / running.speed * np.exp(running.sigma * rng.standard_normal((4000, len(running))))
    now = (work * running.beta ** (running.widths - 1.0) / running.widths).max(axis=1)
    then = (pause + work * running.beta ** (width - 1.0) / width).max(axis=1)
    # Left over devices go to those that by the medians end sooner so, which may be off by a pause.
    assert then.mean() <= now.mean() * 1.01 + 4.0 * (then - now).std() / 4000**0.5 + scene.epsilon


def test_the_device_goes_to_the_trial_that_is_likely_last() -> None:
    """It is the one with the shortest median, and the least certain."""
    running = replace(Scene((single(10.0), single(10.0), single(9.0)), free=1).running, sigma=np.array([0.1, 0.0, 0.6]))
    assert running.sigma is not None
    assert completion_of(running.remaining, running.sigma).odds_last.argmax() == 2
    assert [row for row, _ in WaterFill().replan(running)] == [running.rows[2]]


def test_left_over_devices_go_to_the_likely_last_first() -> None:
    """The longest cannot be widened; of the others, the one that may still outlast it is."""
    running = Scene((single(30.0, d=1), single(20.0), single(19.0)), free=1).running
    assert [row for row, _ in WaterFill().replan(running)] == [running.rows[1]]
    running = replace(running, sigma=np.array([0.0, 0.0, 0.3]))
    assert [row for row, _ in WaterFill().replan(running)] == [running.rows[2]]


def test_a_gain_lost_in_the_spread_of_the_last_end_is_noise() -> None:
    """Halving the first trial's 60 s brings the last end forward by 1.9 s of a spread of 55 s, and its 45 s by 0.5."""
    devices, held = np.array([2, 1]), np.array([1, 1])
    for seconds, expected in ((45.0, held), (60.0, devices)):
        running = replace(Scene((single(seconds), single(100.0, d=1)), free=1).running, sigma=np.array([0.0, 0.5]))
        ends = UncertainEnds(running, running.remaining)
        assert ends.best([held, devices], held).tolist() == expected.tolist()
        assert ends.odds_last(devices, held)[1] > ends.odds_last(held, held)[1]


def test_finish_times_are_compared_as_certain() -> None:
    running = replace(Scene((single(10.0), single(9.0)), free=1).running, sigma=np.array([0.0, 0.5]))
    late = as_certain(running)
    assert late.sigma is None and late.remaining.tolist() == pytest.approx([10.0, 9.0 * np.exp(0.5)])
    assert as_certain(late) is late


def test_trials_queue_by_what_each_exceeds_with_the_same_odds() -> None:
    """On arrival, and when they join others; alike ones are told apart by their sigma."""
    heights, sigma = [10.0, 9.0, 8.0, 7.0] * 3, [0.0, 0.0, 0.5, 0.0] * 3
    certain = Instance.build(heights, 2, c=1, d=1)
    unsure = Instance.build(heights, 2, c=1, d=1, sigma=sigma)
    for arrange in (Portfolio().arrange, lambda instance: Portfolio().join(instance, np.array([5.0]), 0)):
        assert arrange(certain).order.tolist()[:4] == [0, 4, 8, 1]
        assert arrange(unsure).order.tolist()[:4] == [2, 6, 10, 0]
    assert certain.late_heights is certain.heights

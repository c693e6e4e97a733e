"""What a trial holds while it does not run, as its lane tells it, against a stand-in for PyTorch's allocator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lane_messages as to
import pytest

from fluid.engine.events import IterationDone, LaneReady, StateMeasured, TrialPaused, TrialReleased
from fluid.resources import MemoryNeed
from fluid.trainables.pickling import dump_config

MB = 1e6
GPU = 10_000 * MB


class Training:
    """Holds 50 MB in tensors, in segments that grow by what the config says with each iteration, and takes 300 MB.

    The stand-in is one for all trials of a process, as PyTorch is.
    """

    def setup(self, config: dict[str, Any]) -> None:
        def stand_in() -> SimpleNamespace:
            known = SimpleNamespace(tensors=0.0, kept=0.0, reserved=0.0, peak=0.0, share=1.0, emptied=0)

            def empty_cache() -> None:
                known.emptied += 1
                known.reserved = max(known.tensors, known.kept)

            def stats(gpu: int) -> dict[str, dict[str, dict[str, float]]]:
                allocated = {"all": {"current": known.tensors, "peak": known.tensors}}
                return {
                    "allocated_bytes": allocated,
                    "reserved_bytes": {"all": {"current": known.reserved, "peak": known.peak}},
                }

            def reset_peak(gpu: int) -> None:
                known.peak = known.reserved

            def set_share(share: float, gpu: int) -> None:
                known.share = share

            known.cuda = SimpleNamespace(
                is_initialized=lambda: True,
                device_count=lambda: 1,
                synchronize=lambda gpu=0: None,
                reset_peak_memory_stats=reset_peak,
                memory_stats_as_nested_dict=stats,
                memory_reserved=lambda gpu: known.reserved,
                mem_get_info=lambda gpu: (8e9, 10e9),
                empty_cache=empty_cache,
                get_device_properties=lambda gpu: SimpleNamespace(total_memory=10e9),
                set_per_process_memory_fraction=set_share,
            )
            return known

        self.torch: Any = sys.modules.setdefault("torch", stand_in())  # type: ignore[arg-type]
        self.grows = config.get("grows", 0.0)
        self.share_in_setup = self.torch.share
        self.torch.tensors += 50e6
        self.torch.kept += 90e6
        self.torch.reserved = max(self.torch.reserved, self.torch.kept)

    def step(self) -> dict[str, Any]:
        self.torch.reserved = self.torch.peak = max(self.torch.reserved, self.torch.kept + 210e6)
        self.torch.kept += self.grows
        return {"share": self.torch.share, "share_in_setup": self.share_in_setup, "emptied": self.torch.emptied}

    def cleanup(self) -> None:
        self.torch.tensors -= 50e6
        self.torch.kept -= 90e6


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Callable[..., Any]:
    server = make_server()

    def make(**options: Any) -> Any:
        lane = fork(server, 0, **options)
        lane.receive(LaneReady)
        return lane

    return make


def held(lane: Any) -> dict[str, float]:
    """What was told since the last call, in MB, by trial."""
    told = [message for message in lane.messages if isinstance(message, StateMeasured)]
    lane.messages = [message for message in lane.messages if message not in told]
    return {message.trial_id: message.held_bytes / MB for message in told}


def pause(lane: Any, trial_id: str) -> dict[str, float]:
    lane.send(to.pause(trial_id, may_move=True))
    lane.receive(TrialPaused, trial_id)
    return held(lane)


def test_a_pause_tells_what_stays_reserved_once_the_cache_is_empty(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Training, {"grows": 30 * MB}, 3)
    done = [lane.receive(IterationDone) for _ in range(3)]
    assert done[0].memory == MemoryNeed(120 * MB, 180 * MB)
    assert pause(lane, "a") == {"a": 180.0}, "each of the later iterations has left 30 MB more"


def test_the_memory_is_given_back_before_the_driver_hears_of_the_pause(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Training, {}, 1000)
    lane.receive(IterationDone)
    assert pause(lane, "a") == {"a": 90.0}
    lane.messages.clear()
    lane.send(to.run("a", 1))
    assert lane.receive(IterationDone).metrics["emptied"] >= 2, "after the first iteration, and for the pause"


def test_a_trial_that_is_done_tells_it_once_the_lane_is_idle_and_only_changes_later(
    make_lane: Callable[..., Any],
) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Training, {}, 1)
    assert lane.receive(StateMeasured, "a").held_bytes == 90 * MB
    lane.send(to.run("a", 1))
    assert pause(lane, "a") == {}


def test_several_states_in_a_lane_are_told_apart(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Training, {}, 1)
    assert lane.receive(StateMeasured, "a").held_bytes == 90 * MB
    lane.start("b", Training, {"grows": 40 * MB}, 1)
    assert lane.receive(StateMeasured, "b").held_bytes == 130 * MB
    lane.send(to.release("a"))
    lane.receive(TrialReleased, "a")
    assert pause(lane, "b") == {}, "what the other one has left is no concern of this one"


def test_what_is_not_measured_is_not_told(make_lane: Callable[..., Any]) -> None:
    lane = make_lane()
    lane.start("a", Training, {}, 1)
    lane.receive(IterationDone)
    assert pause(lane, "a") == {}


@pytest.mark.parametrize(("limit", "share"), [(None, 1.0), (4000 * MB, 0.409)])
def test_a_limit_holds_from_the_set_up_on(make_lane: Callable[..., Any], limit: float | None, share: float) -> None:
    lane = make_lane(kind="gpu")
    lane.start("a", Training, {}, 1)
    lane.receive(IterationDone)
    lane.send(to.set_up("b", 0, dump_config({}), 1, limit_bytes=limit))
    metrics = lane.receive(IterationDone, "b").metrics
    assert metrics["share_in_setup"] == metrics["share"] == pytest.approx(share), "with what the other one holds"

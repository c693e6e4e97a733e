"""Who decides whether a trial has a process of its own: the trial, then the executor; conflicts are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, InvalidFieldError, Trial, TrialGroup
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.resources import Device
from fluid.session.options import ExecutorOptions
from fluid.session.specs import spec_of


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tells in which process it runs."""
    while True:
        yield {"pid": os.getpid()}


@pytest.fixture
def fusible() -> Any:
    """A trainable that can be fused. Nothing of it runs here."""
    return pytest.importorskip("fluid.fused", reason="needs PyTorch").FusedTrainable


#: Options by which trials share processes, each with how an error names it.
SHARING: list[tuple[dict[str, Any], str]] = [
    ({"packing": "lane"}, "packing='lane'"),
    ({"packing": "fused"}, "packing='fused'"),
    ({"rounds": True}, "rounds=True"),
    ({"lane_policy": "srtf"}, "lane_policy='srtf'"),
    ({"lane_policy": "fair"}, "lane_policy='fair'"),
]


def isolated(options: ExecutorOptions, **fields: Any) -> bool:
    """Whether a trial with these fields is to have a process of its own."""
    trial = Trial(fields.pop("trainable", train), **fields)
    return spec_of(trial, 1, keep_last=False, isolating=options.isolating, search=None).isolated


@pytest.mark.parametrize(("options", "name"), SHARING)
def test_an_executor_that_shares_and_isolates_is_refused(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"isolation='trial'.*pass \"lane\"") as refused:
        FluidExecutor("local", 1, isolation="trial", run_dir=tmp_path / "run", verbose=0, **options)
    assert name in str(refused.value)


@pytest.mark.parametrize(("options", "name"), SHARING)
def test_a_trial_that_is_not_to_share_is_refused_where_trials_share(
    options: dict[str, Any], name: str, fusible: Any
) -> None:
    trainable = fusible if options.get("packing") == "fused" else train
    made = ExecutorOptions.in_force(**options)
    assert not isolated(made, trainable=trainable) and not isolated(made, trainable=trainable, isolation="lane")
    with pytest.raises(InvalidFieldError, match=r"isolation='trial'.*leave isolation out") as refused:
        isolated(made, trainable=trainable, isolation="trial")
    assert name in str(refused.value)


def test_a_backend_object_whose_lanes_have_a_policy_of_their_own_shares_by_it() -> None:
    backend = SimulatedBackend(lambda *_: Truth(1.0), [Device(0)], lane_policy="srtf")
    with pytest.raises(InvalidFieldError, match=r"isolation='trial'.*lane_policy='srtf'"):
        ExecutorOptions.in_force(backend=backend, isolation="trial")
    assert not isolated(ExecutorOptions.in_force(backend=backend))


def test_only_trials_that_can_be_fused_share_by_fusing(fusible: Any) -> None:
    for options in (ExecutorOptions.in_force(packing="fused"), ExecutorOptions.in_force()):
        assert isolated(options) and isolated(options, isolation="trial")
        assert not isolated(options, trainable=fusible)
    assert isolated(ExecutorOptions.in_force(), trainable=fusible, isolation="trial"), "it is not fused then"
    assert isolated(ExecutorOptions.in_force(max_fused=1), trainable=fusible)
    assert isolated(ExecutorOptions.in_force(isolation="trial"), trainable=fusible)


@pytest.mark.parametrize("executor", [None, "trial", "lane"])
def test_a_trials_own_word_is_stronger_than_the_executors(executor: str | None) -> None:
    options = ExecutorOptions.in_force(isolation=executor)
    assert isolated(options) is (executor != "lane")
    assert isolated(options, isolation="trial") and not isolated(options, isolation="lane")


def test_a_refused_trial_disturbs_nothing(tmp_path: Path) -> None:
    with FluidExecutor("local", 1, packing="lane", run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, trial_id="a")]))
        with pytest.raises(InvalidFieldError, match=r"isolation='trial'.*packing='lane'"):
            handle.add(Trial(train, trial_id="b", isolation="trial"))
        with pytest.raises(InvalidFieldError, match=r"isolation='trial'.*packing='lane'"):
            executor.submit_trialgroup(TrialGroup([Trial(train, trial_id="b", isolation="trial")]))
        handle.add(Trial(train, trial_id="b"))
        assert {result.trial_id for result in handle.results()} == {"a", "b"}


@pytest.mark.slow
def test_isolated_trials_and_others_live_side_by_side(tmp_path: Path) -> None:
    shares = [Trial(train, trial_id=f"lane-{n}", isolation="lane") for n in range(3)]
    alone = [Trial(train, trial_id=f"trial-{n}", budget=2) for n in range(3)]
    mixed = [trial for pair in zip(shares, alone, strict=True) for trial in pair]
    with FluidExecutor("local", 1, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        pids: dict[str, set[int]] = {}
        for trial in mixed:
            for result in executor.submit_trialgroup(TrialGroup([trial])).results():
                pids.setdefault(result.trial_id, set()).add(result.metrics["pid"])
    assert all(len(found) == 1 for found in pids.values()), "a trial stays where it is"
    of_lane = [pids[trial.id] for trial in shares]
    assert of_lane[0] == of_lane[1] == of_lane[2]
    assert len(set.union(*pids.values())) == 1 + len(alone), "the others have a process each"

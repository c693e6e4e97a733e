"""What requests of Tune give to a trial, by table; without sweeps."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray.tune")

from ray.tune import PlacementGroupFactory
from ray.tune.execution.placement_groups import resource_dict_to_pg_factory

from fluid import Device, InvalidFieldError, MemoryNeed, Requires
from fluid.integrations.ray_tune.resources.requests import (
    Offer,
    OfferedNode,
    TrialNeeds,
    has_room,
    needs_of,
    omp_threads,
    stays_with_ray,
    trials_at_once,
    with_labels,
)

GIB = 2.0**30
H200 = "NVIDIA H200"
CORES = Offer(
    devices=tuple(Device(index) for index in range(4)),
    nodes=(OfferedNode("localhost", {"CPU": 8.0, "memory": 64 * GIB, "node:10.0.0.1": 1.0, "disk": 2.0}),),
)
GPUS = Offer(
    devices=tuple(Device(index, kind="gpu", model=H200) for index in range(4)),
    nodes=(OfferedNode("localhost", {"CPU": 16.0, "GPU": 4.0, "memory": 64 * GIB, "accelerator_type:H200": 1.0}),),
)
#: Two machines, of which one has a custom resource, the newer GPUs and more cores.
TWO = Offer(
    devices=(
        Device(0, host="localhost", kind="gpu", model="Tesla T4"),
        Device(1, host="10.0.0.2", kind="gpu", model="NVIDIA A100-SXM4-40GB", tags=("licence",)),
    ),
    nodes=(
        OfferedNode("localhost", {"CPU": 4.0, "GPU": 1.0, "memory": 8 * GIB, "node:10.0.0.1": 1.0, "disk": 1.0}),
        OfferedNode("10.0.0.2", {"CPU": 16.0, "GPU": 1.0, "memory": 64 * GIB, "node:10.0.0.2": 1.0, "licence": 1.0}),
    ),
)
MIXED = Offer(devices=(Device(0, kind="gpu"), Device(1)), nodes=(OfferedNode("localhost", {"CPU": 2.0, "GPU": 1.0}),))


def needs(request: dict[str, float], offer: Offer, **options: Any) -> TrialNeeds:
    """What a request as users write it gives."""
    factory = resource_dict_to_pg_factory(request)
    return needs_of(factory.required_resources, offer, **{"is_elastic": False, **options})


@pytest.mark.parametrize(
    ("request_", "rigid", "elastic"),
    [
        ({"cpu": 1}, TrialNeeds(), TrialNeeds()),
        ({"cpu": 2}, TrialNeeds(threads=2), TrialNeeds(devices=2)),
        ({"cpu": 2.9}, TrialNeeds(threads=2), TrialNeeds(devices=2)),
        ({"cpu": 1.5}, TrialNeeds(threads=1), TrialNeeds()),
        ({"cpu": 0.5}, TrialNeeds(devices=0.5), TrialNeeds(devices=0.5)),
        ({"cpu": 0, "memory": 2 * GIB}, TrialNeeds(memory=MemoryNeed(2 * GIB)), TrialNeeds(memory=MemoryNeed(2 * GIB))),
        (
            {"cpu": 4, "memory": 8 * GIB},
            TrialNeeds(threads=4, memory=MemoryNeed(8 * GIB)),
            TrialNeeds(devices=4, memory=MemoryNeed(2 * GIB)),
        ),
        ({"cpu": 1, "disk": 2}, TrialNeeds(threads=1), TrialNeeds()),
        ({"cpu": 1, "gpu": 1}, TrialNeeds(threads=1, requires=Requires(kind="gpu")), None),
    ],
)
def test_on_cpu_cores(request_: dict[str, float], rigid: TrialNeeds, elastic: TrialNeeds | None) -> None:
    assert needs(request_, CORES) == rigid
    assert needs(request_, CORES, is_elastic=True) == (elastic or rigid)


@pytest.mark.parametrize(
    ("request_", "rigid", "elastic"),
    [
        ({"cpu": 1}, TrialNeeds(), None),
        ({"gpu": 1}, TrialNeeds(), None),
        ({"cpu": 1, "gpu": 1}, TrialNeeds(threads=1), None),
        ({"cpu": 4}, TrialNeeds(threads=4), None),
        ({"cpu": 0.5}, TrialNeeds(threads=1), None),
        ({"cpu": 4, "gpu": 0.5}, TrialNeeds(devices=0.5, threads=4), None),
        ({"gpu": 0.7}, TrialNeeds(devices=0.7), None),
        ({"gpu": 2}, TrialNeeds(devices=2), None),
        ({"cpu": 8, "gpu": 4}, TrialNeeds(devices=4, threads=8), TrialNeeds(devices=4, threads=2)),
        ({"cpu": 1, "gpu": 4}, TrialNeeds(devices=4, threads=1), None),
        ({"gpu": 1, "memory": 8 * GIB}, TrialNeeds(), None),
        ({"gpu": 1, "accelerator_type:H200": 0.001}, TrialNeeds(requires=Requires(model="H200")), None),
    ],
)
def test_on_gpus(request_: dict[str, float], rigid: TrialNeeds, elastic: TrialNeeds | None) -> None:
    assert needs(request_, GPUS) == rigid
    assert needs(request_, GPUS, is_elastic=True) == (elastic or rigid)


@pytest.mark.parametrize(
    ("request_", "requires"),
    [
        ({"gpu": 1, "accelerator_type:A100": 0.001}, Requires(model="A100")),
        ({"gpu": 1, "accelerator_type:T4": 0.001}, Requires(model="T4")),
        ({"gpu": 1, "licence": 1}, Requires(tags=("licence",))),
        ({"gpu": 1, "disk": 1}, Requires(host="localhost")),
        ({"gpu": 1, "node:10.0.0.2": 0.001}, Requires(host="10.0.0.2")),
        ({"cpu": 8, "gpu": 1}, Requires(host="10.0.0.2")),
        ({"gpu": 1, "memory": 32 * GIB}, Requires(host="10.0.0.2")),
        ({"cpu": 8, "gpu": 1, "licence": 1}, Requires(host="10.0.0.2", tags=("licence",))),
        ({"cpu": 4, "gpu": 1}, None),
    ],
)
def test_nodes_that_lack_what_is_requested_are_ruled_out(request_: dict[str, float], requires: Requires | None) -> None:
    assert needs(request_, TWO).requires == requires


def test_gpus_are_told_from_the_cpu_cores_of_the_same_session() -> None:
    assert needs({"gpu": 1}, MIXED).requires == Requires(kind="gpu")
    assert needs({"cpu": 1}, MIXED).requires is None


@pytest.mark.parametrize(
    ("offer", "request_", "message"),
    [
        (GPUS, {"gpu": 1.5}, r"resources=\{'GPU': 1\.5\}: GPU must be a whole number, or a fraction of one GPU"),
        (CORES, {"cpu": 9}, r"resources=\{'CPU': 9\.0\}: no node has so much of CPU; one has 8 at most"),
        (CORES, {"memory": 65 * GIB}, r"no node has so much memory; one has 64 GiB at most"),
        (CORES, {"cpu": 1, "disk": 3}, r"no node has so much of disk; one has 2 at most"),
        (CORES, {"cpu": 1, "tape": 1}, r"no node has tape; there is disk"),
        (MIXED, {"cpu": 1, "tape": 1}, r"no node has tape; there is no custom resource"),
        (GPUS, {"gpu": 1, "accelerator_type:T4": 0.001}, r"no node has accelerator_type:T4; .*type:NVIDIA H200"),
        (TWO, {"gpu": 1, "disk": 1, "node:10.0.0.2": 0.001}, "no single node has all of it"),
    ],
)
def test_what_can_never_be_met_is_refused_with_what_there_is(
    offer: Offer, request_: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        needs(request_, offer)


def test_labels_are_resources_of_their_nodes() -> None:
    labelled = GPUS._replace(nodes=(OfferedNode("localhost", with_labels({"CPU": 4.0}, {"zone": "a"})),))

    def needs(zone: str) -> TrialNeeds:
        return needs_of(with_labels({"CPU": 1.0}, {"zone": zone}), labelled, is_elastic=False)

    assert needs("a") == TrialNeeds(threads=1)
    with pytest.raises(InvalidFieldError, match=r"no node has zone=b; there is .*zone=a"):
        needs("b")
    for selector in ("!b", "in(a, b)", "!in(a)"):
        with pytest.raises(InvalidFieldError, match="is not supported: a label must have one value"):
            needs(selector)


def test_what_further_nodes_may_bring_is_left_to_the_engine() -> None:
    growing = GPUS._replace(may_grow=True)
    wanted = {"cpu": 99, "gpu": 1, "accelerator_type:T4": 0.001, "tape": 1}
    assert needs(wanted, growing) == TrialNeeds(threads=99, requires=Requires(model="T4", tags=("tape",)))


def test_the_users_omp_num_threads_comes_before_the_requested_cpus() -> None:
    seven = CORES._replace(omp_threads=7)
    assert [needs({"cpu": cpus}, seven).threads for cpus in (1, 2, 0.5)] == [7, 7, 7]
    assert needs({"cpu": 4}, seven, is_elastic=True) == TrialNeeds(devices=4, threads=7)


@pytest.mark.parametrize(
    ("job", "driver", "threads"),
    [
        (None, None, None),
        (None, "5", 5),
        ("3", "5", 3),
        (" 4,2", None, 4),
        *((value, None, None) for value in ("", "0", "-1", "many", "2.5")),
    ],
)
def test_the_users_omp_num_threads(job: str | None, driver: str | None, threads: int | None) -> None:
    environments = ({} if value is None else {"OMP_NUM_THREADS": value} for value in (job, driver))
    assert omp_threads(*environments) == threads


@pytest.mark.parametrize(("devices", "at_once"), [(None, 4), (0.5, 8), (0.3, 12), (0.7, 4), (2, 2), (3, 1), (8, 1)])
def test_how_many_trials_run_at_once(devices: float | None, at_once: int) -> None:
    assert trials_at_once(TrialNeeds(devices=devices), 4) == at_once


@pytest.mark.parametrize(
    ("request_", "others", "fits"),
    [
        ({"CPU": 2}, [], True),
        ({"CPU": 9}, [], True),  # Alone, a trial runs whatever Ray was told of the machine.
        ({"CPU": 2}, [{"CPU": 2}], True),
        ({"CPU": 2}, [{"CPU": 2}] * 2, False),
        ({"CPU": 3}, [{"CPU": 1}] * 3, False),  # Two CPUs are left, of which each node has one.
        ({"CPU": 0.5}, [{"CPU": 0.5}] * 7, True),
        ({"CPU": 0.5}, [{"CPU": 0.5}] * 8, False),
        ({"CPU": 1, "licence": 1}, [{"CPU": 1}], True),
        ({"CPU": 1, "licence": 1}, [{"CPU": 1, "licence": 1}], False),
        ({"CPU": 1, "tape": 1}, [{"CPU": 1, "tape": 1}], True),  # A tag of devices; Ray knows none.
        ({"CPU": 1, "GPU": 1}, [{"CPU": 1, "GPU": 1}], True),
        ({"memory": 2 * GIB}, [{"memory": 3 * GIB}], True),
        ({"memory": 2 * GIB}, [{"memory": 3 * GIB}] * 2, False),
    ],
)
def test_ray_has_room_for_a_trial_beside_others(
    request_: dict[str, float], others: list[dict[str, float]], fits: bool
) -> None:
    nodes = [
        {"CPU": 2.0, "GPU": 1.0, "memory": 4 * GIB, "licence": 1.0},
        {"CPU": 2.0, "memory": 4 * GIB},
    ]
    assert has_room(request_, others, nodes) is fits


@pytest.mark.slow
def test_several_bundles_stay_with_ray() -> None:
    assert stays_with_ray(PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}]))
    assert stays_with_ray(PlacementGroupFactory([{}, {"CPU": 1}]))
    assert not stays_with_ray(PlacementGroupFactory([{"CPU": 4, "GPU": 2}]))

"""An elastic trainable on its own, at width 1: the class that Fluid, Ray Tune or a plain loop runs."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import Controller, make_groups, together  # noqa: E402
from elastic.trainables import LanguageModel, Regression  # noqa: E402

from fluid.elastic import ElasticTrainable  # noqa: E402
from fluid.elastic.members.member import ElasticMember  # noqa: E402
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError  # noqa: E402
from fluid.trainables.trainable import can_save, is_elastic, kind_of, make_resident  # noqa: E402


def made(cls: type[ElasticTrainable] = Regression, **config: Any) -> Any:
    trainable = cls()
    trainable.setup(config)
    return trainable


def test_fluid_knows_it() -> None:
    assert is_elastic(Regression) and can_save(Regression) and kind_of(Regression) == "class"


@pytest.mark.slow
def test_it_learns_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    one, other = made(optimizer="adamw"), made(optimizer="adamw", seed=9)
    for _ in range(2):
        one.step()
    one.save_checkpoint(str(tmp_path))
    expected = [one.step() for _ in range(2)]
    other.load_checkpoint(str(tmp_path))
    assert [other.step() for _ in range(2)] == expected
    assert other.iteration == 4


def test_as_a_resident_of_a_lane(tmp_path: Path) -> None:
    residents = [make_resident(Regression, trial_id="t", folder=str(tmp_path)) for _ in range(2)]
    for resident in residents:
        resident.setup({})
    residents[0].step()
    (tmp_path / "saved").mkdir()
    residents[0].save(str(tmp_path / "saved"))
    residents[1].restore(str(tmp_path / "saved"))
    assert residents[0].step() == residents[1].step()
    for resident in residents:
        resident.cleanup()


class Dropout(Regression):
    """Draws random numbers while it trains."""

    def build(self, config: dict[str, Any]) -> None:
        super().build(config)
        self.model.append(torch.nn.Dropout(0.5))


def test_an_iteration_can_be_repeated() -> None:
    one = made(Dropout)
    one.step()
    state = copy.deepcopy(one.elastic_state())
    first = one.step()
    torch.manual_seed(99)  # Whatever has been drawn meanwhile.
    one.load_elastic_state(state)
    assert one.step() == first
    one.load_elastic_state(state)
    one._elastic.seed += 1
    assert one.step() != first


def test_state_in_containers_and_under_two_names() -> None:
    class Several(ElasticTrainable):
        def build(self, config: dict[str, Any]) -> None:
            self.models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)]
            self.by_name = {"again": self.models[0], "scaler": torch.amp.GradScaler("cpu")}
            self.alias = self.models[1]

    assert list(made(Several).elastic_state()["parts"]) == ["models.0", "models.1", "by_name.scaler"]


def test_another_trainables_state_is_refused() -> None:
    with pytest.raises(FluidError, match=r"does not fit this Regression: .*scheduler differ"):
        made().load_elastic_state(made(LanguageModel).elastic_state())


def test_an_attribute_that_hides_a_method_is_refused_by_its_name() -> None:
    class Early(Regression):
        def build(self, config: dict[str, Any]) -> None:
            super().build(config)
            self.state = 3  # No method of the base class.
            self.train_batch = functools.partial(self.train_batch)  # type: ignore[method-assign]
            setattr(self, config.get("name", "other"), 0)

    class Late(Regression):
        def train_iteration(self) -> Any:
            self.means = 1  # type: ignore[assignment, method-assign]
            return {}

    with pytest.raises(FluidError, match=r"self\.step = 0 in Early hides the method step\(\) of ElasticTrainable"):
        Early().setup({"name": "step"})
    with pytest.raises(FluidError, match=r"self\.means = 1 in Late hides the method means\(\)"):
        made(Late).step()
    early = made(Early)
    early.step()
    assert early.state == 3 and early.elastic_state()["iteration"] == 1


def test_what_is_not_written_is_asked_for() -> None:
    class Empty(ElasticTrainable):
        pass

    class Half(ElasticTrainable):
        def build(self, config: dict[str, Any]) -> None:
            self.loader = self.make_loader([1, 2], 1)

    with pytest.raises(NotImplementedError, match=r"Empty must define build\(config\)"):
        made(Empty)
    with pytest.raises(NotImplementedError, match=r"Half must define train_batch\(batch\)"):
        made(Half).step()


def test_closures_are_refused_at_larger_widths() -> None:
    one = made()
    one.optimizer.step(lambda: 0.0)
    one._elastic.group = make_groups(2)[0]
    with pytest.raises(FluidError, match="closure"):
        one.optimizer.step(lambda: 0.0)


class Accumulating(Regression):
    """Two batches a step, the gradients of the first in a block of their own."""

    def train_iteration(self) -> Mapping[str, Any]:
        for number, (x, y) in enumerate(self.loader.take(4)):
            if number % 2 == 0:
                self.optimizer.zero_grad()
            with self.sync(self.optimizer):
                torch.nn.functional.mse_loss(self.model(x), y).backward()
            if number % 2 == 1:
                self.optimizer.step()
        self.weights = self.model[0].weight.detach().clone()
        return {"count": self.all_reduce_mean(float(self.count), 1), "rank": self.all_reduce_mean(self.rank, 1)}


def join(members: list[ElasticMember]) -> None:
    controller = Controller(generation=2)

    def join_as(member: ElasticMember) -> None:
        rank = members.index(member)
        member.join(controller.rendezvous(rank), rank, len(members), True)

    together(members, join_as)


def step_at_width_2(cls: type[ElasticTrainable], config: dict[str, Any], iterations: int) -> list[Any]:
    """Two trainables in two threads, driven by members."""
    # One after the other: seeds are the process's.
    members = [ElasticMember(made(cls, **config), group) for group in make_groups(2)]
    join(members)

    def run(member: ElasticMember) -> Any:
        for _ in range(iterations):
            done = member.iterate(lambda: True)
        return done

    results = together(members, run)
    assert all(not isinstance(result, Exception) for result in results), results
    return [(member.trainable, result) for member, result in zip(members, results, strict=True)]


def test_adding_up_the_gradients_of_batches_of_any_size() -> None:
    expected = made(Accumulating, samples=45)  # Batches of 13, 13, 13 and 6.
    expected.step()
    for trainable, done in step_at_width_2(Accumulating, {"samples": 45}, 1):
        assert torch.allclose(trainable.weights, expected.weights, atol=1e-6)
        assert done.metrics == {"count": 3.0, "rank": 0.5}


def test_members_agree_on_when_to_stop() -> None:
    members = [ElasticMember(made(), group) for group in make_groups(2)]
    join(members)
    votes = {0: [True, True], 1: [True, False]}

    def run(member: ElasticMember) -> list[bool]:
        left = list(votes[member.trainable.rank])
        return [member.iterate(lambda: left.pop(0)).go_on for _ in range(2)]

    assert together(members, run) == [[True, False]] * 2


def test_columns_need_a_device_each() -> None:
    one = made(LanguageModel)
    one._elastic.group = type("Six", (), {"rank": 0, "size": 6})()
    with pytest.raises(FluidError, match="5 columns cannot be split over 6 devices"):
        one.shard(torch.zeros(7, 5), dim=1)
    with pytest.raises(FluidError, match="5 columns"):
        one._elastic.scatter(torch.zeros(2, 5), 1)


def test_a_model_with_converted_layers_can_be_copied() -> None:
    one = made(batch_norm="sync")
    average = copy.deepcopy(one.model)
    x = torch.randn(5, 6)
    assert torch.equal(average(x), one.model(x))
    assert average.state_dict().keys() == one.model.state_dict().keys()
    assert {type(layer).__name__ for layer in one.model} == {"Linear", "SyncBatchNorm", "Tanh"}


@pytest.mark.slow
def test_importing_it_loads_neither_ray_nor_what_it_does_not_need() -> None:
    def loaded(statement: str) -> set[str]:
        code = f"import sys; {statement}; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split()) & {"torch", "ray", "horovod", "numpy"}

    assert loaded("import fluid.elastic, fluid.elastic.members.controller, fluid.elastic.run") == set()
    assert loaded("from fluid.elastic import ElasticTrainable") == {"torch", "numpy"}


def test_every_public_name_can_be_loaded() -> None:
    import fluid.elastic

    assert sorted(fluid.elastic.__all__) == sorted(dir(fluid.elastic))
    assert all(getattr(fluid.elastic, name) is not None for name in fluid.elastic.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fluid.elastic.no_such_name


def test_what_is_no_elastic_trainable_cannot_be_given_to_ray_tune() -> None:
    from fluid.elastic.tune import require_elastic_class

    with pytest.raises(InvalidFieldError, match="trainable"):
        require_elastic_class(dict)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_tune_the_error_says_how_to_get_it() -> None:
    from fluid.elastic import as_tune_trainable

    with pytest.raises(MissingDependencyError, match=r"pip install 'ray\[tune\]"):
        as_tune_trainable(Regression)


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_for_ray_tune(tmp_path: Path) -> None:
    from fluid.elastic import as_tune_trainable
    from fluid.elastic.tune import require_elastic_class

    tune_class = as_tune_trainable(Regression)
    assert require_elastic_class(tune_class) is Regression
    assert kind_of(tune_class) == "ray_class" and is_elastic(tune_class) and can_save(tune_class)
    residents = [make_resident(tune_class, trial_id="t", folder=str(tmp_path)) for _ in range(2)]
    for resident in residents:
        resident.setup({})
    first = residents[0].step()
    assert first.metrics is not None and first.metrics["loss"] == made().step()["loss"]
    (tmp_path / "saved").mkdir()
    residents[0].save(str(tmp_path / "saved"))
    residents[1].restore(str(tmp_path / "saved"))
    metrics = [resident.step().metrics for resident in residents]
    assert metrics[0]["loss"] == metrics[1]["loss"]  # type: ignore[index]
    for resident in residents:
        resident.cleanup()

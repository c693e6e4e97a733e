"""Gradients that are sent during the backward pass, over real groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import Controller, make_groups, together  # noqa: E402

from fluid.elastic import ElasticTrainable  # noqa: E402
from fluid.elastic.gradients import GradientAverager, Overlap  # noqa: E402
from fluid.elastic.groups.torch_group import TorchGroup  # noqa: E402
from fluid.elastic.members.member import ElasticMember  # noqa: E402


@pytest.fixture(autouse=True)
def a_bucket_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.gradients._BUCKET", 1)
    monkeypatch.setattr("fluid.elastic.gradients._FIRST_BUCKET", 1)


class Rank:
    """A model, and its optimizer's averager, of one of two ranks."""

    def __init__(self, group: TorchGroup, may_overlap: bool = True) -> None:
        self.group = group
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view(parameter.shape))
        self.averager = GradientAverager(
            group, list(self.model.parameters()), lambda: 0.25 + 0.5 * group.rank, Overlap(may_overlap)
        )
        #: Sums that were started by the end of the backward pass, by step.
        self.early: list[int] = []
        self._started = 0
        start = group.start_all_reduce
        group.start_all_reduce = lambda tensor: self._count(start, tensor)  # type: ignore[method-assign]

    def _count(self, start: Callable[[Any], Any], tensor: Any) -> Any:
        self._started += 1
        return start(tensor)

    def step(self, number: int, between: Callable[[], Any] = lambda: None, frozen: bool = False) -> list[Any]:
        self.model.zero_grad()
        self._started = 0
        x = torch.full((2, 3), 0.1 * (number + self.group.rank))
        hidden = self.model[:2](x)
        self.model[2](hidden.detach() if frozen else hidden).square().mean().backward()
        self.early.append(self._started)
        between()
        self.averager.average()
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def run(steps: Callable[[Rank], Any], backend: str = "gloo", **options: Any) -> list[Any]:
    results = together(make_groups(2, backend=backend), lambda group: steps(Rank(group, **options)))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_buckets_are_sent_in_the_backward_pass_with_the_same_bits() -> None:
    def six(rank: Rank) -> Any:
        return [rank.step(number) for number in range(6)], rank.early, rank.averager.overlaps

    overlapped, plain = run(six), run(six, may_overlap=False)
    assert [result[1:] for result in overlapped] == [([0, 0, 0, 4, 4, 4], True)] * 2
    assert [result[1:] for result in plain] == [([0] * 6, False)] * 2
    for ours, other in zip(overlapped, plain, strict=True):
        for got, expected in zip(ours[0], other[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_processes_of_one_machine_do_not_overlap() -> None:
    assert run(lambda rank: [rank.step(n) for n in range(5)] and rank.early, "auto") == [[0] * 5] * 2


def test_a_gradient_that_is_missing_on_one_rank() -> None:
    def steps(rank: Rank) -> Any:
        for number in range(4):
            rank.step(number)
        return rank.step(4, frozen=rank.group.rank == 1), rank.early[-1]

    (ours, early), (others, late) = run(steps)
    assert (early, late) == (4, 2) and all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))
    assert ours[0].any(), "rank 0's gradient of the first layer counts"


@pytest.mark.parametrize(
    "change",
    [
        lambda rank: rank.group.all_reduce(torch.ones(3)),
        lambda rank: torch.nn.utils.clip_grad_norm_(rank.model.parameters(), 0.1),
        lambda rank: rank.model(torch.ones(1, 3)).sum().backward(),
        lambda rank: setattr(rank.model[0].weight, "grad", torch.ones(4, 3)),
        lambda rank: [parameter.grad.data.mul_(0.5) for parameter in rank.model.parameters()],
    ],
    ids=["exchanges", "clips", "accumulates", "replaces", "changes without a version"],
)
def test_steps_that_do_more_than_one_backward_pass(change: Callable[[Rank], Any]) -> None:
    def steps(rank: Rank) -> Any:
        return [rank.step(number, lambda: change(rank)) for number in range(5)], rank.early

    def expected(rank: Rank) -> Any:
        return [rank.step(number, lambda: change(rank)) for number in range(5)]

    for (got, early), other in zip(run(steps), run(expected, may_overlap=False), strict=True):
        assert early == [0] * 5
        assert all(torch.equal(a, b) for x, y in zip(got, other, strict=True) for a, b in zip(x, y, strict=True))


class Changing(ElasticTrainable):
    """From one batch on it accumulates two backward passes, or scales, or exchanges something, before each step."""

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.config = config
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
        self.loader = self.make_loader(torch.utils.data.TensorDataset(data), 4)
        self.batches = 0

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.batches += 1
        if self.batches > 9:  # Of the second iteration of 6.
            if self.config["change"] == "accumulate":
                self.model(batch[0]).abs().mean().backward()
            elif self.config["change"] == "exchange":
                self.all_reduce_mean(1.0)
            elif self.config["change"] == "scale" or self._is_last_of_rank_zero():
                for parameter in self.model.parameters():
                    parameter.grad.data.mul_(0.5)
        self.optimizer.step()
        if self.batches > 9 and self.config.get("fails") and self._elastic.overlap.is_used:
            raise ValueError("what gradients that were sent too early made of the model")
        return {"loss": loss}

    def _is_last_of_rank_zero(self) -> bool:
        return self.config["change"] == "scale the last of rank 0" and self.batches == 12 and self.rank == 0

    def train_iteration(self) -> Mapping[str, Any]:
        if self.config["change"] != "scale the last of rank 0":
            return super().train_iteration()
        for batch in self.loader:  # Nothing is exchanged after the last step.
            self.train_batch(batch)
        return {"loss": self.model.state_dict()["0.weight"].sum().item()}

    def extra_state(self) -> Any:
        return self.batches

    def load_extra_state(self, state: Any) -> None:
        self.batches = state


def make_members(config: dict[str, Any], may_overlap: bool = True) -> list[ElasticMember]:
    members = []
    for group in make_groups(2):
        trainable = Changing()
        trainable.setup(config)
        trainable._elastic.overlap = Overlap(may_overlap)
        members.append(ElasticMember(trainable, group))
    return members


def join(members: list[ElasticMember], generation: int) -> None:
    controller = Controller(generation)

    def join_as(member: ElasticMember) -> None:
        rank = members.index(member)
        member.join(controller.rendezvous(rank), rank, 2, True)

    assert together(members, join_as) == [None, None]


def iterate(member: ElasticMember) -> float:
    try:
        return float(member.iterate(lambda: True).metrics["loss"])
    except Exception:
        member.abort(2)  # As the controller has the others do.
        raise


def losses_of(members: list[ElasticMember]) -> list[Any]:
    """The losses of four iterations, of which the second is repeated."""
    join(members, 2)
    losses = [together(members, iterate)]
    broken = together(members, iterate)
    assert [type(error).__name__ for error in broken] == ["GenerationBrokenError"] * 2
    assert [member.iteration for member in members] == [1, 1]
    join(members, 3)
    return losses + [together(members, iterate) for _ in range(3)]


@pytest.mark.parametrize("change", ["accumulate", "exchange", "scale"])
def test_an_iteration_in_which_gradients_were_sent_too_early_is_repeated(change: str) -> None:
    alone = Changing()
    alone.setup({"change": change})
    expected = [alone.step()["loss"] for _ in range(4)]
    for (one, other), alone_loss in zip(losses_of(make_members({"change": change})), expected, strict=True):
        assert one == other == pytest.approx(alone_loss, rel=1e-5)


def test_a_change_on_one_rank_in_the_last_step_is_found_by_both_before_the_iteration_counts() -> None:
    change = {"change": "scale the last of rank 0"}
    plain = make_members(change, may_overlap=False)
    join(plain, 2)
    expected = [together(plain, iterate) for _ in range(4)]
    assert losses_of(make_members(change)) == expected and all(one == other for one, other in expected)


def test_an_error_that_gradients_sent_too_early_have_caused_is_none_of_the_trials() -> None:
    losses = losses_of(make_members({"change": "scale", "fails": True}))
    assert all(one == other and isinstance(one, float) for one, other in losses)

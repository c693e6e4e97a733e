"""Copies of a state in host memory; with CPU tensors in place of a GPU's, where that makes no difference."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.test_state import same  # noqa: E402
from elastic.trainables import Regression  # noqa: E402

from fluid.elastic import host_copies  # noqa: E402
from fluid.elastic.host_copies import HostCopies  # noqa: E402
from fluid.elastic.trainable import STATE_FILE  # noqa: E402

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def state(device: str = "cpu") -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4, device=device)).square().sum().backward()
    optimizer.step()
    large = torch.arange(12.0, device=device)
    return {
        "parts": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "types": [torch.arange(5, device=device).to(dtype) for dtype in TYPES],
        "odd": (torch.ones((), device=device), torch.empty(0, 4, device=device), torch.nn.Parameter(large.clone())),
        "views": [large, large[3:9], large.view(3, 4).t()],
        "conjugate": torch.tensor([1 + 2j], device=device).conj(),
        "sparse": torch.eye(3, device=device).to_sparse(),
        "rest": OrderedDict(a=1, b=[None, "text", {2.5}]),
    }


def written(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_a_copy_is_what_was_there_and_stays_so() -> None:
    live = state()
    expected = {name: value for name, value in state().items() if name != "parts"}
    copied = HostCopies("cpu").take(live)
    assert copied is not None
    assert same(copied.state, live)
    assert copied.state["parts"]["model"]._metadata == live["parts"]["model"]._metadata
    assert isinstance(copied.state["odd"][2], torch.nn.Parameter)
    assert copied.state["views"][2].stride() == (1, 4)
    for tensor in (*live["types"], *live["views"], *live["parts"]["model"].values()):
        tensor.zero_()
    live["rest"]["b"].append("more")
    del copied.state["parts"]
    assert same(copied.state, expected)


def test_tensors_share_their_storage_as_before_and_are_written_once() -> None:
    live = state()
    copied = HostCopies("cpu").take(live)
    assert copied is not None
    model, (whole, part, turned) = copied.state["parts"]["model"], copied.state["views"]
    assert model["0.weight"].data_ptr() == model["2.weight"].data_ptr()
    assert part.data_ptr() == whole.data_ptr() + 12 and turned.data_ptr() == whole.data_ptr()
    assert model["0.weight"].untyped_storage().nbytes() == 64, "not all that is copied"
    assert abs(written(copied.state) - written(live)) < 1000


def test_memory_is_used_again_once_the_copy_is_gone() -> None:
    copies = HostCopies("cpu")
    before = HostCopies.taken
    first = copies.take(state())
    assert first is not None
    place = first.state["views"][0].data_ptr()
    assert copies.take(state()) is None, "it is being written"
    del first
    second = copies.take(state())
    assert second is not None and second.state["views"][0].data_ptr() == place
    assert HostCopies.taken > before
    del copies, second
    assert HostCopies.taken == before


class Uncopied:
    """Can be pickled, and so written."""

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise ValueError("there is only one")


@pytest.mark.parametrize(
    "why", ["no room", "little memory", "no memory", "no tensors", "other devices", "a graph", "a value"]
)
def test_what_cannot_be_copied_is_left(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    live: Any = {"weights": torch.ones(8)}
    if why == "no room":
        monkeypatch.setattr(HostCopies, "taken", 4 * 2**30)
    elif why == "little memory":
        monkeypatch.setattr(host_copies, "memory_left", lambda: 100)
    elif why == "no memory":
        for name, value in (("_MOST_BYTES", 2**60), ("memory_left", lambda: 2**60), ("ALIGNMENT", 2**50)):
            monkeypatch.setattr(host_copies, name, value)  # More than there are addresses.
    elif why == "no tensors":
        live = {"weights": 1}
    elif why == "a value":
        live["counter"] = Uncopied()
    elif why == "a graph":
        live["made"] = [(torch.ones(2, requires_grad=True) * 2).to_sparse()]
    assert HostCopies("cuda" if why == "other devices" else "cpu").take(live) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_checkpoint_is_the_state_in_which_it_was_begun(tmp_path: Path, kind: str) -> None:
    trial, other = Regression(), Regression()
    for each in (trial, other):
        each.setup({"optimizer": "adamw"})
    trial._elastic_copies = HostCopies(kind)
    trial.step()
    expected = torch.load(_saved(trial, tmp_path / "now"), weights_only=False)
    write = trial.fluid_begin_checkpoint()
    if kind == "cuda":
        assert write is None, "on a CPU there is no further copy"
        return
    assert write is not None
    trial.step()
    (tmp_path / "later").mkdir()
    write(str(tmp_path / "later"))
    found = torch.load(tmp_path / "later" / STATE_FILE, weights_only=False)
    assert same(found, expected)
    other._elastic_copies = HostCopies(kind)
    other.load_checkpoint(str(tmp_path / "later"))
    assert STATE_FILE not in Path("/proc/self/maps").read_text(), "what stays on the CPU does not keep the file"
    other.step()
    assert same(other.elastic_state()["parts"], trial.elastic_state()["parts"])


def test_a_value_that_cannot_be_copied_is_saved_and_loaded(tmp_path: Path) -> None:
    class WithValue(Regression):
        loaded: Any = None

        def extra_state(self) -> Any:
            return Uncopied()

        def load_extra_state(self, state: Any) -> None:
            self.loaded = state

    trial = WithValue()
    trial.setup({})
    trial._elastic_copies = HostCopies("cpu")
    folder = _saved(trial, tmp_path / "saved").parent
    trial.load_checkpoint(str(folder))
    assert isinstance(trial.loaded, Uncopied)


def _saved(trial: Regression, folder: Path) -> Path:
    folder.mkdir()
    trial.save_checkpoint(str(folder))
    return folder / STATE_FILE


def test_a_class_that_writes_its_own_checkpoint_does_so_at_once() -> None:
    class Own(Regression):
        def save_checkpoint(self, checkpoint_dir: str) -> None: ...

    trial = Own()
    trial.setup({})
    trial._elastic_copies = HostCopies("cpu")
    assert trial.fluid_begin_checkpoint() is None


@pytest.mark.gpu
def test_the_state_of_a_gpu() -> None:
    copies, live = HostCopies(), state("cuda")
    for _ in range(3):  # The second time the memory is locked.
        live["views"][0].add_(1)
        copied = copies.take(live)
        assert copied is not None
        at_first = [tensor.cpu() for tensor in live["views"]]
        live["views"][0].add_(1)
        assert all(tensor.device.type == "cpu" for tensor in copied.state["views"])
        assert same(copied.state["views"], at_first)
        model = copied.state["parts"]["model"]
        assert all(torch.equal(model[name], value.cpu()) for name, value in live["parts"]["model"].items())
        del copied
    assert copies._memory is not None and copies._memory.is_pinned()

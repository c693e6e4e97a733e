"""Adapters as PEFT's files: what is in them, and that PEFT and Fluid compute the same with each other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from fused.lora_trainables import Adapted, Transformer, matrices  # noqa: E402
from fused.trainables import Classifier, made  # noqa: E402
from torch import nn  # noqa: E402

from fluid._imports import try_import  # noqa: E402
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError  # noqa: E402
from fluid.fused import FusedPack, LoraSpec, LoraTrainable, load_adapter, save_adapter  # noqa: E402

CONFIG: dict[str, Any] = {
    "rank": 3,
    "seed": 1,
    "lora": {
        "alpha": 6,
        "dropout": 0.1,
        "target_modules": ["q_proj", "mlp.2", "embed"],
        "modules_to_save": ["classifier"],
    },
}
TOKENS = torch.arange(33).view(3, 11) % 11


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS)


def trained(config: dict[str, Any] = CONFIG) -> Any:
    trial = made(Adapted, config)
    trial.step()
    return trial


def test_the_format(tmp_path: Path) -> None:
    trial = trained()
    save_adapter(trial, tmp_path / "a" / "b")
    config = json.loads((tmp_path / "a" / "b" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config == {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "modules_to_save": ["classifier"],
        "peft_type": "LORA",
        "r": 3,
        "target_modules": ["q_proj", "mlp.2", "embed"],
        "task_type": None,
    }
    tensors = safetensors.load_file(tmp_path / "a" / "b" / "adapter_model.safetensors")
    shapes = {name.removeprefix("base_model.model."): tuple(tensor.shape) for name, tensor in tensors.items()}
    blocks = {
        f"blocks.{number}.{name}": shape
        for number in range(2)
        for name, shape in {
            "attention.q_proj.lora_A.weight": (3, 8),
            "attention.q_proj.lora_B.weight": (8, 3),
            "mlp.2.lora_A.weight": (3, 16),
            "mlp.2.lora_B.weight": (8, 3),
        }.items()
    }
    head = {"classifier.weight": (3, 8), "classifier.bias": (3,)}
    assert shapes == {"embed.lora_embedding_A": (3, 11), "embed.lora_embedding_B": (8, 3), **head, **blocks}
    own = trial.model.embed.lora_embedding_B
    assert own.shape == (8, 4)
    assert torch.equal(tensors["base_model.model.embed.lora_embedding_B"], own[:, :3])


def test_trials_in_packs_and_checkpoints_give_the_same_files(tmp_path: Path) -> None:
    pack = FusedPack.of(Adapted, [CONFIG, CONFIG | {"seed": 2}])
    pack.step()
    trial = pack.trials[1]
    for folder in ("checkpoint", "empty"):
        (tmp_path / folder).mkdir()
    trial.save_checkpoint(str(tmp_path / "checkpoint"))
    sources = {
        "trial": trial,
        "model": trial.model,
        "path": tmp_path / "checkpoint",
        "str": str(tmp_path / "checkpoint"),
    }
    for name, source in sources.items():
        save_adapter(source, tmp_path / name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert len({(tmp_path / name / file).read_bytes() for name in sources}) == 1
    (alone,) = pack.leave([1])
    fresh = made(Adapted, CONFIG | {"seed": 9})
    load_adapter(fresh, tmp_path / "path")
    torch.testing.assert_close(scores(fresh.model), scores(alone.model), rtol=1e-12, atol=1e-12)
    assert not fresh.model.embed.lora_embedding_B[:, 3:].any()


def test_a_build_may_begin_with_an_adapter(tmp_path: Path) -> None:
    class Continued(Adapted):
        def build(self, config: dict[str, Any]) -> nn.Module:
            model = super().build(config)
            load_adapter(model, tmp_path)
            return model

    trial = trained()
    save_adapter(trial, tmp_path)
    begun = made(Continued, CONFIG)
    assert all(torch.equal(tensor, matrices(trial)[name]) for name, tensor in matrices(begun).items())
    pack = FusedPack([begun, made(Continued, CONFIG | {"seed": 2})])
    assert pack.step()[0] == pytest.approx(made(Continued, CONFIG).step(), rel=1e-7)


# -- bad input ----------------------------------------------------------------------------------------------------


def test_sources_without_adapters_are_refused(tmp_path: Path) -> None:
    other = made(Classifier, {})
    other.save_checkpoint(str(tmp_path))
    for source in (other.model, tmp_path):
        with pytest.raises(InvalidFieldError, match="has no adapter"):
            save_adapter(source, tmp_path / "out")
    with pytest.raises(InvalidFieldError, match=r"it has no elastic\.pt"):
        save_adapter(tmp_path / "nothing", tmp_path / "out")
    for wrong in (other, 3):
        with pytest.raises(InvalidFieldError, match="must be a LoraTrainable"):
            save_adapter(wrong, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match="has no adapters"):
        load_adapter(other.model, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "r=3 there, and 4"),
        ({"lora": {"alpha": 7}}, "lora_alpha=6 there, and 7"),
        ({"lora": {"modules_to_save": []}}, "only it has classifier"),
        ({"lora": {"target_modules": ["q_proj", "k_proj", "mlp.2", "embed"]}}, "only this trial has .*k_proj"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_adapter(made(Adapted, CONFIG), tmp_path)
    lora = CONFIG["lora"] | change.get("lora", {})
    other = made(Adapted, {**CONFIG, **change, "lora": lora})
    before = matrices(other)
    with pytest.raises(InvalidFieldError, match=message):
        load_adapter(other, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in matrices(other).items())


def test_other_widths_and_settings_are_refused(tmp_path: Path) -> None:
    class Wide(Adapted):
        def base(self, config: dict[str, Any]) -> nn.Module:
            return Transformer(16).double()

    trial = made(Adapted, CONFIG)
    save_adapter(trial, tmp_path)
    with pytest.raises(InvalidFieldError, match=r"embedding_B is \(8, 3\) there, and \(16, 3\) in this trial"):
        load_adapter(made(Wide, CONFIG), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for change in ({"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 8}}, {"peft_type": "IA3"}):
        file.write_text(json.dumps(config | change), encoding="utf-8")
        with pytest.raises(InvalidFieldError, match="is not supported"):
            load_adapter(trial, tmp_path)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidFieldError, match="cannot be read"):
        load_adapter(trial, tmp_path)
    file.unlink()
    with pytest.raises(InvalidFieldError, match=r"has no adapter_config\.json"):
        load_adapter(trial, tmp_path)


def test_a_trial_in_a_pack_takes_no_adapter(tmp_path: Path) -> None:
    pack = FusedPack.of(Adapted, [CONFIG])
    save_adapter(pack.trials[0], tmp_path)
    with pytest.raises(FluidError, match="leave the pack"):
        load_adapter(pack.trials[0], tmp_path)


def test_without_safetensors_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with try_import("safetensors", extra="lora") as missing:
        raise ImportError("No module named 'safetensors'")
    monkeypatch.setattr("fluid.fused.lora_files._imports", missing)
    trial = made(Adapted, CONFIG)
    for call in (save_adapter, load_adapter):
        with pytest.raises(MissingDependencyError, match=r"safetensors.*pip install"):
            call(trial, tmp_path)
    assert not list(tmp_path.iterdir())


# -- PEFT itself --------------------------------------------------------------------------------------------------


class Gpt2(LoraTrainable):
    """A small GPT-2 of transformers, whose linear layers have transposed weights."""

    def base(self, config: dict[str, Any]) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        shape = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        settings = transformers.GPT2Config(**shape, **tokens, attn_pdrop=0.0, attn_implementation="eager")
        return transformers.GPT2LMHeadModel(settings)

    def lora(self, config: dict[str, Any]) -> LoraSpec:
        return LoraSpec(rank=3, alpha=5, target_modules=["c_attn", "wte"], dropout=0.1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found = model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0]), use_cache=False).logits
        return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    optimizer = Adapted.optimizer
    data = Adapted.data


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", [Adapted, Gpt2])
def test_peft_and_fluid_load_each_others_adapters(cls: type[LoraTrainable], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pack = FusedPack.of(cls, [CONFIG, CONFIG | {"seed": 2}])
    for _ in range(3):
        pack.step()
    trial = pack.trials[1]
    save_adapter(trial, tmp_path / "ours")
    expected = outputs(trial.model)
    theirs = peft.PeftModel.from_pretrained(cls().base({}), tmp_path / "ours")
    missing = theirs.base_model.model.load_state_dict(base_state(trial, theirs), strict=False)
    assert not missing.unexpected_keys
    torch.testing.assert_close(outputs(theirs), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(outputs(trial._elastic_base), expected, atol=1e-3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora" in name:
                parameter.add_(torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    other = made(cls, CONFIG | {"seed": 5})
    load_adapter(other, tmp_path / "theirs")
    torch.testing.assert_close(outputs(other.model), outputs(theirs), rtol=1e-4, atol=1e-5)


def outputs(model: nn.Module) -> torch.Tensor:
    found = scores(model)
    return getattr(found, "logits", found)


def base_state(trial: Any, theirs: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a trial's base, by the names in PEFT's model of it: its base was made with other numbers."""
    own = dict(trial._elastic_base.state_dict())
    names = {name.replace(".base_layer", ""): name for name in theirs.base_model.model.state_dict()}
    return {names[name]: value for name, value in own.items() if name in names}

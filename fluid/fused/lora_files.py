"""Adapters as PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``, at their true rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fluid._imports import try_import
from fluid.elastic.trainable import STATE_FILE
from fluid.errors import InvalidFieldError
from fluid.fused.lora import ADAPTER, LoraTrainable, is_named

with try_import("safetensors", extra="lora") as _imports:
    from safetensors.torch import load_file, save_file

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
#: Before the names of all tensors in PEFT's file.
_PREFIX = "base_model.model."
#: Which dimension of a matrix is the rank, by the end of its name.
_RANK_DIMENSIONS = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}
#: Settings of PEFT under which an adapter computes something else, and those of them that change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    **dict.fromkeys(("lora_bias", "use_dora", "use_qalora", "use_rslora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("megatron_config", "target_parameters", "trainable_token_indices"), (None,)),
}


def save_adapter(source: LoraTrainable | torch.nn.Module | str | PathLike[str], folder: str | PathLike[str]) -> None:
    """Writes the adapter of a trial for PEFT: ``PeftModel.from_pretrained(base, folder)`` loads it.

    Args:
        source: a trial, alone or in a pack; its model; or the folder of a checkpoint of a trial, such as
            ``result.best.checkpoint``.
        folder: is made if needed; files of these names in it are replaced.

    Raises:
        InvalidFieldError: the source has no adapter.
        MissingDependencyError: safetensors is not installed.

    Example:
        >>> import os, tempfile, torch
        >>> from fluid.fused import SGD, LoraSpec, LoraTrainable, TensorData, load_adapter, save_adapter
        >>> class Adapted(LoraTrainable):
        ...     def base(self, config):
        ...         return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        ...     def lora(self, config):
        ...         return LoraSpec(rank=3, alpha=6, target_modules=["0"])
        ...     def loss(self, model, batch):
        ...         return model(batch[0]).square().mean()
        ...     def optimizer(self, config):
        ...         return SGD(lr=0.1)
        ...     def data(self, config, seed):
        ...         return TensorData([torch.ones(4, 4)], batch_size=2, seed=seed)
        >>> trial, other = Adapted(), Adapted()
        >>> trial.setup({"seed": 1})
        >>> other.setup({"seed": 2})
        >>> loss = trial.step()["loss"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(trial, folder)
        ...     load_adapter(other, folder)
        ...     sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
        >>> bool(trial.loss(trial.model, [torch.ones(1, 4)]) == other.loss(other.model, [torch.ones(1, 4)]))
        True
    """
    _imports.check()
    state = _state_of(source)
    facts = state.get(ADAPTER)
    if facts is None:
        raise InvalidFieldError("source", source, "has no adapter: it is not of a LoraTrainable")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        _file_name(name): _at_rank(name, tensor.detach().cpu(), facts["r"]).contiguous().clone()
        for name, tensor in state.items()
        if name != ADAPTER and _belongs(name, facts)
    }
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})
    config = {"peft_type": "LORA", "bias": "none", "inference_mode": True, "task_type": None, **facts}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_adapter(target: LoraTrainable | torch.nn.Module, folder: str | PathLike[str]) -> None:
    """Gives a trial the adapter that PEFT or :func:`save_adapter` wrote. Its optimizer and its position stay.

    Example:
        >>> import tempfile, torch
        >>> from fluid.fused import SGD, LoraSpec, LoraTrainable, TensorData, load_adapter, save_adapter
        >>> class Adapted(LoraTrainable):
        ...     def base(self, config):
        ...         return torch.nn.Sequential(torch.nn.Linear(4, 1))
        ...     def lora(self, config):
        ...         return LoraSpec(rank=2, alpha=4, target_modules=["0"])
        ...     def loss(self, model, batch):
        ...         return model(batch[0]).square().mean()
        ...     def optimizer(self, config):
        ...         return SGD(lr=0.1)
        ...     def data(self, config, seed):
        ...         return TensorData([torch.ones(4, 4)], batch_size=2, seed=seed)
        >>> trained, fresh = Adapted(), Adapted()
        >>> for trial in (trained, fresh):
        ...     trial.setup({"seed": 1})
        >>> first, second = (trained.step()["loss"] for _ in range(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(trained, folder)
        ...     load_adapter(fresh, folder)
        >>> fresh.step()["loss"] < first
        True

    Trials of a session can begin with one if their ``build`` loads it: ``model = super().build(config)``, then
    ``load_adapter(model, folder)``.

    Args:
        target: a trial, in no pack, or its model. Its rank, alpha, layers and modules to save are those of the adapter.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        InvalidFieldError: there is no adapter in the folder, or it does not fit.
        MissingDependencyError: safetensors is not installed.
    """
    _imports.check()
    if isinstance(target, LoraTrainable):
        target._require_no_pack("load_adapter()")
        target = target.model
    state = _state_of(target)
    facts = state.get(ADAPTER)
    if facts is None:
        raise InvalidFieldError("target", target, "has no adapters: it is not of a LoraTrainable")
    folder = Path(folder)
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except FileNotFoundError as error:
        raise InvalidFieldError("folder", str(folder), f"has no {Path(error.filename or _TENSORS).name}") from None
    except Exception as error:
        raise InvalidFieldError("folder", str(folder), f"cannot be read: {error}") from error
    for field, plain in _PLAIN.items():
        if config.get(field, plain[0]) not in plain:
            raise InvalidFieldError("folder", str(folder), f"{field}={config[field]!r} is not supported")
    for field in ("r", "lora_alpha"):
        if config.get(field) != facts[field]:
            raise InvalidFieldError(
                "folder", str(folder), f"{field}={config.get(field)} there, and {facts[field]} in this trial"
            )
    _fill(state, facts, tensors, folder)
    target.load_state_dict(state)


def _state_of(source: Any) -> dict[str, Any]:
    if isinstance(source, LoraTrainable):
        source = source.model
    if isinstance(source, torch.nn.Module):
        return dict(source.state_dict())
    if not isinstance(source, (str, PathLike)):
        raise InvalidFieldError("source", source, "must be a LoraTrainable, its model, or the folder of a checkpoint")
    path = Path(source) / STATE_FILE
    if not path.is_file():
        raise InvalidFieldError("source", str(source), f"is no checkpoint of a LoraTrainable: it has no {STATE_FILE}")
    parts = torch.load(path, map_location="cpu", weights_only=False)["parts"]  # As the trial itself loads it.
    return dict(parts.get("model", {}))


def _belongs(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether an entry of a state dict is part of the adapter: a matrix, or of a module that is trained whole."""
    *modules, last = name.split(".")
    whole = facts["modules_to_save"] or ()
    return last in _RANK_DIMENSIONS or any(is_named(".".join(modules[: end + 1]), whole) for end in range(len(modules)))


def _file_name(name: str) -> str:
    is_linear = name.endswith((".lora_A", ".lora_B"))
    return f"{_PREFIX}{name}.weight" if is_linear else f"{_PREFIX}{name}"


def _at_rank(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the part of a padded matrix that is trained; other tensors as they are."""
    dimension = _RANK_DIMENSIONS.get(name.rpartition(".")[2])
    return tensor if dimension is None else tensor.narrow(dimension, 0, rank)


def _fill(state: dict[str, Any], facts: Mapping[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Puts the tensors of a file into a state dict."""
    wanted = {_file_name(name): name for name in state if name != ADAPTER and _belongs(name, facts)}
    odd = sorted(wanted.keys() ^ tensors.keys())
    if odd:
        where = "it" if odd[0] in tensors else "this trial"
        raise InvalidFieldError("folder", str(folder), f"only {where} has {odd[0].removeprefix(_PREFIX)}")
    for file_name, name in wanted.items():
        # What is padded stays 0.
        state[name] = state[name].clone()
        part = _at_rank(name, state[name], facts["r"])
        if part.shape != tensors[file_name].shape:
            shapes = f"{tuple(tensors[file_name].shape)} there, and {tuple(part.shape)} in this trial"
            raise InvalidFieldError("folder", str(folder), f"{name} is {shapes}")
        part.copy_(tensors[file_name])

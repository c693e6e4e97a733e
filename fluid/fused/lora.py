"""Fused LoRA: several trials train adapters of one frozen model, which is in memory once."""

from __future__ import annotations

import copy
import hashlib
import math
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle
import torch
from torch.nn import functional

from fluid.elastic.runtime import seed_everything
from fluid.errors import FluidError, InvalidFieldError, require_integer, require_number
from fluid.fused.dropout import Dropout
from fluid.fused.randomness import Purpose, own_generator, own_seed
from fluid.fused.trainable import FusedTrainable

# -- lora layers ---------------------------------------------------------------------------------
#
# LoRA adapters: frozen layers with a trained product of two thin matrices beside each.
#
# LoRA is described in "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021, arXiv:2106.09685. Layers
# and names are those of PEFT (https://github.com/huggingface/peft), so that adapters can be exchanged with it.


#: The entry in the state dict of a model with adapters that says how they were made.
ADAPTER = "lora"


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The adapters of one trial, in the terms of PEFT's ``LoraConfig``.

    An adapter adds ``B(A(dropout(x))) * alpha / rank`` to the output of its layer. In memory, A and B are padded with
    zeros to the rank ``pad_to``, which does not change the numbers of a trial: trials whose ranks are padded to the
    same can be fused.

    Args:
        rank: of A and B, PEFT's ``r``.
        alpha: PEFT's ``lora_alpha``.
        target_modules: the layers that get an adapter: names, each of which stands for itself and for all that end with
            it after a dot; or a regular expression that matches whole names. Layers may be ``nn.Linear``,
            ``nn.Embedding``, and ``Conv1D`` of transformers.
        dropout: PEFT's ``lora_dropout``. Trials with numbers may be fused, also 0, but not with one of ``None``, which
            draws no masks and is faster.
        modules_to_save: names of modules that are trained whole, such as a new head, and saved with the adapters.
        pad_to: by default the next power of two, so at most twice the rank.

    Raises:
        InvalidFieldError: an argument cannot be used.

    Example:
        >>> from fluid.fused import LoraSpec
        >>> spec = LoraSpec(rank=3, alpha=6, target_modules=["q_proj", "v_proj"])
        >>> spec.scale, spec.padded_rank
        (2.0, 4)
    """

    rank: int
    alpha: float
    target_modules: str | Sequence[str]
    dropout: float | None = None
    modules_to_save: Sequence[str] = ()
    pad_to: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", require_integer("rank", self.rank, at_least=1))
        require_number("alpha", self.alpha, at_least=0.0)
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise InvalidFieldError(
                    "target_modules", self.target_modules, f"no regular expression: {error}"
                ) from None
        else:
            _require_names("target_modules", self.target_modules)
            if not self.target_modules:
                raise InvalidFieldError("target_modules", self.target_modules, "must name at least one layer")
        _require_names("modules_to_save", self.modules_to_save)
        if self.dropout is not None and require_number("dropout", self.dropout, at_least=0.0) >= 1.0:
            raise InvalidFieldError("dropout", self.dropout, "must be below 1")
        if self.pad_to is not None:
            object.__setattr__(self, "pad_to", require_integer("pad_to", self.pad_to, at_least=self.rank))

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank

    @property
    def padded_rank(self) -> int:
        """The rank of the matrices in memory."""
        return 1 << (self.rank - 1).bit_length() if self.pad_to is None else self.pad_to

    def is_target(self, name: str) -> bool:
        """Whether a layer of this name gets an adapter."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        return is_named(name, self.target_modules)

    def is_saved(self, name: str) -> bool:
        """Whether a module of this name is trained whole."""
        return is_named(name, self.modules_to_save)


def _require_names(field: str, names: Any) -> None:
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise InvalidFieldError(field, names, "must be a list of names of modules")


def is_named(name: str, wanted: Sequence[str]) -> bool:
    """Whether a module is one of those wanted, or ends with one after a dot."""
    return any(name == each or name.endswith(f".{each}") for each in wanted)


class LoraLayer(torch.nn.Module):  # type: ignore[misc]
    """A frozen layer with an adapter.

    Rows of A and columns of B beyond the trial's rank are 0 and stay so: the gradient of each has the other as a
    factor, and no optimizer moves a 0 with a gradient of 0.

    Attributes:
        base_layer: the frozen layer.
        lora_scale: a buffer, as it may differ between the rows of a pack.
    """

    def __init__(self, base_layer: torch.nn.Module, spec: LoraSpec) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.padded_rank = spec.padded_rank
        dtype = base_layer.weight.dtype
        #: As in PEFT, adapters of layers in half precision are in single precision.
        self.dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self.register_buffer("lora_scale", torch.tensor(spec.scale, dtype=self.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The frozen layer's, which some models look at."""
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The frozen layer's."""
        bias: torch.Tensor | None = getattr(self.base_layer, "bias", None)
        return bias

    def _matrix(self, values: torch.Tensor, padded: tuple[int, int]) -> torch.nn.Parameter:
        """Pads first values, which do not depend on the padding."""
        matrix = torch.zeros(padded, dtype=self.dtype)
        matrix[: values.shape[0], : values.shape[1]] = values
        return torch.nn.Parameter(matrix)


class LoraLinear(LoraLayer):
    """For ``nn.Linear``, and ``Conv1D`` of transformers, whose weight is transposed.

    Attributes:
        lora_A: ``(padded rank, inputs)``.
        lora_B: ``(outputs, padded rank)``.
    """

    def __init__(self, base_layer: torch.nn.Module, spec: LoraSpec, generator: torch.Generator) -> None:
        super().__init__(base_layer, spec)
        outputs, inputs = reversed(base_layer.weight.shape) if is_transposed(base_layer) else base_layer.weight.shape
        self.in_features = inputs
        self.out_features = outputs
        first = torch.empty(spec.rank, inputs)
        torch.nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        self.lora_A = self._matrix(first, (spec.padded_rank, inputs))
        self.lora_B = self._matrix(torch.zeros(outputs, spec.rank), (outputs, spec.padded_rank))
        self.dropout = None if spec.dropout is None else Dropout(spec.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output with that of the adapter."""
        result = self.base_layer(x)
        x = x.to(self.dtype)
        if self.dropout is not None:
            x = self.dropout(x)
        low = functional.linear(x, self.lora_A) * self.lora_scale
        return (result + functional.linear(low, self.lora_B)).to(result.dtype)


class LoraEmbedding(LoraLayer):
    """For ``nn.Embedding``; as in PEFT, it has no dropout, and A begins with zeros.

    Attributes:
        lora_embedding_A: ``(padded rank, embeddings)``.
        lora_embedding_B: ``(width, padded rank)``.
    """

    def __init__(self, base_layer: torch.nn.Embedding, spec: LoraSpec, generator: torch.Generator) -> None:
        super().__init__(base_layer, spec)
        count, width = base_layer.weight.shape
        self.lora_embedding_A = self._matrix(torch.zeros(spec.rank, count), (spec.padded_rank, count))
        first = torch.randn(width, spec.rank, generator=generator)
        self.lora_embedding_B = self._matrix(first, (width, spec.padded_rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output with that of the adapter."""
        result = self.base_layer(x)
        low = functional.embedding(x, self.lora_embedding_A.mT, self.base_layer.padding_idx) * self.lora_scale
        return (result + functional.linear(low, self.lora_embedding_B)).to(result.dtype)


def is_transposed(layer: torch.nn.Module) -> bool:
    """Whether a layer is the ``Conv1D`` of transformers: a linear layer with the weight ``(inputs, outputs)``."""
    return (type(layer).__module__, type(layer).__name__) == ("transformers.pytorch_utils", "Conv1D")


def adapted(base: torch.nn.Module, spec: LoraSpec, generator: torch.Generator) -> torch.nn.Module:
    """Returns a copy of a model with adapters; only these and ``modules_to_save`` are trained.

    The copy has the parameters of the base itself, frozen, where they are not trained, and buffers of its own. Its
    ``nn.Dropout`` modules become :class:`~fluid.fused.Dropout`, which can be fused. Its state dict has no frozen
    parameters, and an entry ``lora`` with what PEFT writes to ``adapter_config.json``.

    Args:
        base: the model.
        spec: which adapters.
        generator: on the CPU; draws the adapters' first values.

    Raises:
        InvalidFieldError: the model does not have what the spec names, or cannot have an adapter there.
    """
    base.requires_grad_(False)
    saved = _saved_parameters(base, spec)
    frozen = {id(parameter): parameter for parameter in base.parameters() if id(parameter) not in saved}
    model = copy.deepcopy(base, dict(frozen))
    transposed = False
    for parent, name, layer in _targets(model, spec):
        transposed |= is_transposed(layer)
        kind = LoraEmbedding if isinstance(layer, torch.nn.Embedding) else LoraLinear
        setattr(parent, name, kind(layer, spec, generator))
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout and child.p:
                setattr(module, name, Dropout(child.p))
        if not isinstance(module, LoraLayer):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(id(parameter) not in frozen)
    names = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    _AdapterState(names, _facts(base, spec, transposed)).register(model)
    return model


def _targets(model: torch.nn.Module, spec: LoraSpec) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Returns the layers that get an adapter, with the modules that hold them, and their names there."""
    found = []
    for name, layer in list(model.named_modules()):
        if not name or not spec.is_target(name):
            continue
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        kind = type(layer).__name__
        if not (isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)) or is_transposed(layer)):
            raise InvalidFieldError(
                "target_modules", spec.target_modules, f"{name} is a {kind}, not a Linear, an Embedding or a Conv1D"
            )
        if isinstance(parent, torch.nn.MultiheadAttention):
            raise InvalidFieldError(
                "target_modules", spec.target_modules, f"{name} is part of a MultiheadAttention, which does not call it"
            )
        if not layer.weight.is_floating_point():
            raise InvalidFieldError("target_modules", spec.target_modules, f"the weight of {name} is quantized")
        if any(spec.is_saved(".".join(name.split(".")[: end + 1])) for end in range(name.count(".") + 1)):
            raise InvalidFieldError("modules_to_save", spec.modules_to_save, f"{name} has an adapter already")
        found.append((parent, own_name, layer))
    if not found:
        raise InvalidFieldError("target_modules", spec.target_modules, "the base has no such layer")
    return iter(found)


def _saved_parameters(base: torch.nn.Module, spec: LoraSpec) -> set[int]:
    """Returns the ids of the parameters that are trained whole."""
    modules = {name: module for name, module in base.named_modules() if name and spec.is_saved(name)}
    for wanted in spec.modules_to_save:
        if not any(is_named(name, [wanted]) for name in modules):
            raise InvalidFieldError("modules_to_save", spec.modules_to_save, f"the base has no module {wanted!r}")
    saved = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if id(parameter) in saved and not any(name.startswith(f"{module}.") for module in modules):
            raise InvalidFieldError("modules_to_save", spec.modules_to_save, f"{name} is one of its parameters, too")
    return saved


def _facts(base: torch.nn.Module, spec: LoraSpec, transposed: bool) -> dict[str, Any]:
    """Returns what PEFT must know to load the adapters, by the names in its ``adapter_config.json``."""
    named = spec.target_modules
    config = getattr(base, "config", None)
    return {
        "base_model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "fan_in_fan_out": transposed,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else float(spec.alpha),
        "lora_dropout": float(spec.dropout or 0.0),
        "modules_to_save": [*spec.modules_to_save] or None,
        "r": spec.rank,
        "target_modules": named if isinstance(named, str) else [*named],
    }


class _AdapterState:
    """Hooks by which a model's state dict has its adapters, and not the frozen parameters.

    Args:
        frozen: names of the parameters that the state dict does not have.
        facts: the entry that says how the adapters were made.
    """

    def __init__(self, frozen: set[str], facts: dict[str, Any]) -> None:
        self._frozen = frozen
        self._facts = facts

    def register(self, model: torch.nn.Module) -> None:
        """Makes them the model's."""
        # PyTorch 2.4 has the first two under these names only.
        model._register_state_dict_hook(self.leave_out)
        model._register_load_state_dict_pre_hook(self.check)
        model.register_load_state_dict_post_hook(self.allow_missing)

    def leave_out(self, model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Takes the frozen parameters out of a state dict."""
        for name in self._frozen:
            state.pop(prefix + name, None)
        state[prefix + ADAPTER] = copy.deepcopy(self._facts)

    def check(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Refuses adapters of another rank, of which some parts would lie in the padding."""
        facts = state.pop(prefix + ADAPTER, None)
        if facts is not None and facts["r"] != self._facts["r"]:
            raise FluidError(
                f"the state has adapters of rank {facts['r']}, and this trial those of rank {self._facts['r']}: "
                "a trial can only continue from one of its own rank"
            )

    def allow_missing(self, model: torch.nn.Module, keys: Any) -> None:
        """Has PyTorch accept that a state dict has no frozen parameters."""
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in self._frozen]


# -- lora ----------------------------------------------------------------------------------------


class LoraTrainable(FusedTrainable):
    """Training of LoRA adapters on a frozen model. Trials that can be fused compute with it as one batch.

    Derive from it and define :meth:`base` and :meth:`lora` in place of :meth:`FusedTrainable.build`, and ``loss``,
    ``optimizer``, ``data`` and ``evaluate`` as in any :class:`FusedTrainable`. The optimizer has the adapters'
    parameters, and those of ``modules_to_save``.

    **The base** is made once per process, and its parameters are shared by all trials there, alone or in a pack.
    :meth:`base` cannot make one for each trial: it sees only the fields of the config that :attr:`base_fields` names,
    is seeded with 0, and runs on an instance of its own, so it cannot set attributes of the trial. Trials with equal
    values of these fields have one base.

    **Trials fuse** if their ranks are padded to the same, to the next power of two unless :class:`LoraSpec` says
    otherwise. Rank, alpha and dropout may differ then, as well as everything else that may differ in a pack.

    **A checkpoint** has the adapters, buffers and the optimizer, and not the base. A trial can continue from one of its
    own rank only. :func:`~fluid.fused.save_adapter` writes the adapter of a trial, or of a checkpoint, for PEFT.

    Attributes:
        base_fields: names of the config's fields that :meth:`base` needs.

    Example:
        >>> import torch
        >>> from fluid.fused import Adam, FusedPack, LoraSpec, LoraTrainable, TensorData
        >>> class Adapted(LoraTrainable):
        ...     def base(self, config):
        ...         return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        ...     def lora(self, config):
        ...         return LoraSpec(rank=config["rank"], alpha=8, target_modules=["0", "2"])
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(model(x), y)
        ...     def optimizer(self, config):
        ...         return Adam(lr=config["lr"])
        ...     def data(self, config, seed):
        ...         x = torch.arange(32.0).reshape(8, 4) / 32
        ...         return TensorData([x, x[:, :1]], batch_size=4, seed=seed)
        >>> pack = FusedPack.of(Adapted, [{"rank": rank, "lr": 0.01} for rank in (5, 7, 8)])
        >>> first, last = (pack.step(), [pack.step() for _ in range(4)][-1])
        >>> all(after["loss"] < before["loss"] for before, after in zip(first, last))
        True
        >>> sorted(pack.trials[0].model.state_dict())
        ['0.lora_A', '0.lora_B', '2.lora_A', '2.lora_B', 'lora']
    """

    base_fields: ClassVar[tuple[str, ...]] = ()

    #: The base, so that it stays as long as its trials. Names with this beginning are no part of the trial's state.
    _elastic_base: torch.nn.Module

    def base(self, config: dict[str, Any]) -> torch.nn.Module:
        """Makes the model to adapt, on the CPU; ``config`` has the fields that :attr:`base_fields` names."""
        raise NotImplementedError(f"{type(self).__name__} must define base(config), which returns the frozen model")

    def lora(self, config: dict[str, Any]) -> LoraSpec:
        """Returns the trial's adapters."""
        raise NotImplementedError(f"{type(self).__name__} must define lora(config), which returns a LoraSpec")

    def build(self, config: dict[str, Any]) -> torch.nn.Module:
        """Makes the base with adapters."""
        spec = self.lora(config)
        if not isinstance(spec, LoraSpec):
            raise InvalidFieldError("lora", spec, "must return a LoraSpec")
        self._elastic_base = _shared_base(type(self), config)
        # Not the global generator: what it has drawn depends on whether the base was there.
        generator = own_generator("cpu", self._elastic_trial_seed, Purpose.MODEL)
        return adapted(self._elastic_base, spec, generator)


#: By class and values of its base fields: the bases that trials have, and the newest of all, for the trials to come.
_bases: weakref.WeakValueDictionary[tuple[type[LoraTrainable], str], torch.nn.Module] = weakref.WeakValueDictionary()
_newest: list[torch.nn.Module] = []


def _shared_base(trainable: type[LoraTrainable], config: dict[str, Any]) -> torch.nn.Module:
    """Returns the base of a trial, the same object for all trials that have it in common."""
    missing = [name for name in trainable.base_fields if name not in config]
    if missing:
        raise InvalidFieldError("base_fields", trainable.base_fields, f"the config has no {missing[0]!r}")
    fields = {name: config[name] for name in sorted(trainable.base_fields)}
    key = (trainable, hashlib.sha256(cloudpickle.dumps(fields)).hexdigest())
    base = _bases.get(key)
    if base is None:
        seed_everything(own_seed(0, Purpose.MODEL), 0, 0)
        base = trainable().base(fields)
        if not isinstance(base, torch.nn.Module):
            raise InvalidFieldError("base", base, "must return a torch.nn.Module")
        _bases[key] = base
    _newest[:] = [base]
    return base

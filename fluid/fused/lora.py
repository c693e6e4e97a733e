"""Fused LoRA: several trials train adapters of one frozen model, which is in memory once."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, ClassVar

import cloudpickle
import torch

from fluid.elastic.runtime import seed_everything
from fluid.errors import InvalidFieldError
from fluid.fused.lora_layers import LoraSpec, adapted
from fluid.fused.randomness import Purpose, own_generator, own_seed
from fluid.fused.trainable import FusedTrainable


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

"""The fusion key: what must be equal for trials to train in one pack."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.utils._pytree import tree_flatten

from fluid.elastic.sync_batch_norm import SyncBatchNorm
from fluid.fused.data import Data, TensorData
from fluid.fused.dropout import Dropout
from fluid.fused.obstacles import FusionError, one_line
from fluid.fused.optimizers import SGD, OptimizerSpec
from fluid.fused.stacked_model import named_tensors
from fluid.fused.trainable import FusedTrainable


class FusionKey(NamedTuple):
    """What cannot differ between the rows of a pack. Trials with equal keys may be fused.

    Hyperparameters of the optimizer, the seed, the p of a :class:`~fluid.fused.Dropout` and the values of parameters
    and buffers are no part of it.

    Attributes:
        trainable: the class.
        attributes: what ``build``, ``optimizer`` and ``data`` have set on ``self``, as digests.
        modules: of the model: names, types, and the attributes that are not tensors, as digests.
        parameters: names, shapes and types of the model's parameters and buffers.
        optimizer: its kind, and flags.
        data: shapes, types and sizes of batches.
        iteration: training batches in an iteration.
        settings: of PyTorch, which are in force for all rows of a step: default dtype and device, precision of matrix
            products, and whether algorithms are deterministic.

    Example:
        >>> from fluid.fused import FusionKey
        >>> key = FusionKey(*[("the same",)] * 8)
        >>> key.difference(key._replace(optimizer=("Adam",)))
        'the trials differ in their optimizer: the same; Adam'
    """

    trainable: tuple[str, ...]
    attributes: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    optimizer: tuple[str, ...]
    data: tuple[str, ...]
    iteration: tuple[str, ...]
    settings: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Stands for the key in other processes: equal there for trials of a class of the same name, and equal keys."""
        (named, *_), rest = self.trainable, self[1:]
        return hashlib.sha256(repr((named.rpartition(" ")[0], rest)).encode()).hexdigest()[:16]

    def difference(self, other: FusionKey) -> str | None:
        """Returns what differs first between two keys, in one line; ``None`` if nothing does."""
        for field, ours, theirs in zip(self._fields, self, other, strict=True):
            for one, two in zip_longest(ours, theirs, fillvalue="nothing"):
                if one != two:
                    return f"the trials differ in their {field}: {one}; {two}"
        return None


def fusion_key(trainable: type[FusedTrainable], config: Mapping[str, Any]) -> FusionKey:
    """Returns the key of a trial; sets it up for that.

    Raises:
        FusionError: an attribute cannot be pickled, and so not be compared.
        Exception: what the user's code raises.

    Example:
        >>> import torch
        >>> from fluid.fused import SGD, FusedTrainable, TensorData, fusion_key
        >>> class Net(FusedTrainable):
        ...     def build(self, config):
        ...         return torch.nn.Linear(config["width"], 1)
        ...     def loss(self, model, batch):
        ...         return model(batch[0]).square().mean()
        ...     def optimizer(self, config):
        ...         return SGD(lr=config["lr"])
        ...     def data(self, config, seed):
        ...         return TensorData([torch.ones(4, config["width"])], batch_size=2, seed=seed)
        >>> key = fusion_key(Net, {"width": 2, "lr": 0.1})
        >>> key == fusion_key(Net, {"width": 2, "lr": 0.5}), key == fusion_key(Net, {"width": 3, "lr": 0.1})
        (True, False)
    """
    trial = trainable()
    trial.setup(dict(config))
    return key_of(trial)


def key_of(trial: FusedTrainable) -> FusionKey:
    """Returns the key of a trial that is set up.

    Raises:
        FusionError: an attribute cannot be pickled.
    """
    state = trial._fused
    cls = type(trial)
    own = {name: value for name, value in vars(trial).items() if name not in _OWN and not name.startswith("_elastic")}
    return FusionKey(
        trainable=(f"{cls.__module__}.{cls.__qualname__} {id(cls)}",),
        attributes=tuple(f"self.{name} {_digest(f'self.{name}', value)}" for name, value in sorted(own.items())),
        modules=tuple(_modules(trial.model)),
        parameters=tuple(_parameters(trial.model)),
        optimizer=tuple(_optimizer(state.spec)),
        data=tuple(_data(state.data)),
        iteration=(f"{state.iteration_batches} batches",),
        settings=tuple(_settings()),
    )


#: Attributes of a trial that its key has in other parts.
_OWN = frozenset({"model", "torch_optimizer", "_fused"})
#: Attributes that every module has: its parameters, hooks and so on.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def _digest(name: str, value: Any) -> str:
    if _is_plain(value):
        return repr(value)
    try:
        content = b"".join(_contents(value))
    except Exception as error:
        raise FusionError(f"{name} cannot be compared with other trials': {one_line(error)}") from error
    return f"{type(value).__name__} {hashlib.sha256(content).hexdigest()[:16]}"


def _contents(value: Any) -> Iterator[bytes]:
    """Yields what an attribute consists of, as bytes that are equal in all processes.

    Containers are taken apart: pickle writes an object that occurs twice once, and sets in an order of the process.
    """
    if isinstance(value, (str, bytes)) or _is_plain(value):
        yield f"{value!r};".encode(errors="surrogatepass")
    elif isinstance(value, enum.Enum):
        yield f"{type(value).__module__}.{value};".encode()
    elif type(value) in (list, tuple, torch.Size):
        yield f"{type(value).__name__}{len(value)}:".encode()
        for item in value:
            yield from _contents(item)
    elif type(value) in (set, frozenset):
        yield f"{type(value).__name__}{len(value)}:".encode()
        yield from sorted(b"".join(_contents(item)) for item in value)
    elif type(value) is dict:
        yield f"dict{len(value)}:".encode()
        yield from sorted(b"".join((*_contents(key), *_contents(item))) for key, item in value.items())
    elif isinstance(value, torch.Tensor) and not value.is_sparse:
        yield f"{value.dtype}{tuple(value.shape)}{value.device.type}:".encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield cloudpickle.dumps(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _modules(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
        if isinstance(module, Dropout):
            del values["p"]
        if isinstance(module, SyncBatchNorm):  # The devices that the trial trains on: in a pack, one.
            del values["_members"]
        if isinstance(module, torch.nn.RNNBase):  # References to its parameters.
            values = {key: value for key, value in values.items() if not key.startswith("_flat_weight")}
        shown = [f"{key}={_digest(f'{name}.{key}', value)}" for key, value in sorted(values.items())]
        kind = type(module)
        yield f"{name or 'the model'} {kind.__module__}.{kind.__qualname__}({', '.join(shown)})"


def _parameters(model: torch.nn.Module) -> Iterator[str]:
    for name, tensor in named_tensors(model):
        frozen = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else " frozen"
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}{frozen}"


def _optimizer(spec: OptimizerSpec) -> Iterator[str]:
    yield type(spec).__qualname__
    yield f"learning rates of {', '.join(module or 'the model' for module in spec.modules)}"
    if isinstance(spec, SGD):
        yield f"nesterov={spec.nesterov}"


def _settings() -> Iterator[str]:
    yield f"default dtype {torch.get_default_dtype()}"
    yield f"default device {torch.get_default_device()}"
    try:
        yield f"matmul precision {torch.get_float32_matmul_precision()}, TF32 {torch.backends.cudnn.allow_tf32}"
    except RuntimeError:  # Set in PyTorch's newer way, in which each backend has its own.
        backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)
        yield f"precision {[backend.fp32_precision for backend in backends]}"
    yield f"deterministic {torch.are_deterministic_algorithms_enabled()}, {torch.backends.cudnn.deterministic}"


def _data(data: Data) -> Iterator[str]:
    yield type(data).__qualname__
    yield f"{len(data)} batches"
    if isinstance(data, TensorData):
        for part, tensors in (("train", data.train), ("evaluation", data.evaluation)):
            yield from (f"{part} {tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        yield f"batch_size={data.batch_size}"
        yield f"evaluation_batch_size={data.evaluation_batch_size}"
        yield f"drop_last={data.drop_last}"
        return
    leaves, structure = tree_flatten(next(iter(data.train_batches(0, 0))))
    yield str(structure)
    yield from (f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves if isinstance(leaf, torch.Tensor))

"""The self-check: trains a few steps of two trials in a pack and alone, and compares."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fluid.elastic.sync_batch_norm import SyncBatchNorm
from fluid.errors import InvalidFieldError, require_integer
from fluid.fused.data import Data, map_batch, samples_in
from fluid.fused.obstacles import FusionError, one_line
from fluid.fused.optimizers import SGD, Adam
from fluid.fused.pack import FusedPack
from fluid.fused.randomness import global_random_state_kept
from fluid.fused.stacked_model import named_tensors, trained_parameters
from fluid.fused.trainable import FusedTrainable

#: Steps that are compared.
_STEPS = 3
#: The largest difference, relative to the norm of what is compared, by type of the parameters, with SGD and with Adam.
#: On GPUs, batched kernels may sum in lower precision (TF32), so at least the last row is allowed there.
_TOLERANCES = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-2, 3e-2),
    torch.bfloat16: (3e-2, 1e-1),
}
_ON_GPU = (1e-3, 1e-2)
#: In single precision, rounding alone may make as large a difference, as where it decides on which side of a kink of
#: ReLU or max pooling a value is. It is rounding if the same training in double precision makes none.
_AMPLIFIED = 0.1
#: Adam divides gradients by their own size, so that it makes large steps of what is mere rounding, as in a bias before
#: batch normalization. In the check its eps is at least this: far above rounding errors, so that these stay small.
_LEAST_EPS = 1e-3


def why_not_fused(
    trainable: type[FusedTrainable],
    config: Mapping[str, Any],
    other: Mapping[str, Any] | None = None,
    *,
    steps: int = _STEPS,
) -> str | None:
    """Says why two trials should not be fused: because they cannot, or because their results would differ.

    Sets both up twice, trains some steps of them in a pack and alone, and compares losses, parameters and buffers, and
    what ``evaluate`` returns for one batch. Differences of rounding are allowed: relative to the norm of each tensor,
    1e-5 with SGD in float32 on a CPU, 1e-4 with Adam, 1e-9 and 1e-8 in float64, 3e-2 and 0.1 in bfloat16, and at least
    1e-3 and 1e-2 on a GPU. Adam's eps is at least 0.001 in the check. It changes no state outside.

    Training may amplify rounding. So differences of up to 0.1 in float32 are allowed if those of the same training in
    float64 are, by its tolerances.

    Args:
        trainable: the class.
        config: of one trial.
        other: of the other; by default the same with the next seed.
        steps: how many, at least 1.

    Returns:
        The reason in one line; ``None`` if they can be fused.

    Raises:
        InvalidFieldError: an argument cannot be used.
        OutOfMemoryError: PyTorch's; the trials of the check do not fit on the device at present.
        Exception: what the user's code raises in a trial that trains alone.

    Example:
        >>> import torch
        >>> from fluid.fused import SGD, FusedTrainable, TensorData, why_not_fused
        >>> class Net(FusedTrainable):
        ...     def build(self, config):
        ...         return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(config["p"]))
        ...     def loss(self, model, batch):
        ...         return model(batch[0]).square().mean()
        ...     def optimizer(self, config):
        ...         return SGD(lr=0.1)
        ...     def data(self, config, seed):
        ...         return TensorData([torch.ones(4, 2)], batch_size=2, seed=seed)
        >>> why_not_fused(Net, {"p": 0.5})
        '1 (Dropout) draws random numbers: only fluid.fused.Dropout can be fused'
        >>> why_not_fused(Net, {"p": 0.0}) is None
        True
    """
    steps = require_integer("steps", steps, at_least=1)
    if not isinstance(trainable, type) or not issubclass(trainable, FusedTrainable):
        raise InvalidFieldError("trainable", trainable, "must be a subclass of fluid.fused.FusedTrainable")
    configs = (config, {**config, "seed": config.get("seed", 0) + 1} if other is None else other)

    def train(prepare: Callable[[FusedTrainable], None]) -> _Trained:
        return _Trained.of([[_set_up(trainable, each, prepare) for each in configs] for _ in range(2)], steps)

    try:
        trained = train(lambda trial: None)
    except FusionError as error:
        return str(error)
    reason = trained.difference(trained.tolerance)
    if reason is None or not trained.may_differ_by_rounding:
        return reason
    del trained  # There may be no memory for both.
    try:
        in_double = train(_to_double)
    except torch.cuda.OutOfMemoryError:  # That says nothing about fusing.
        raise
    except Exception:  # The model, its loss or its data cannot be in double precision.
        return reason
    return reason if in_double.difference(in_double.tolerance_in_double) else None


def why_alike_not_fused(one: FusedTrainable, two: FusedTrainable | None) -> str | None:
    """:func:`why_not_fused` for new trials like one or two that are set up, which stay as they are."""
    return why_not_fused(type(one), one._fused.config, None if two is None else two._fused.config)


class _Trained(NamedTuple):
    """Trials that were trained some steps alone, and their twins in a pack.

    Attributes:
        alone: the trials.
        fused: their twins.
        losses: of each, alone and in the pack.
        evaluations: of each, alone and in the pack.
        steps: that they were trained.
    """

    alone: Sequence[FusedTrainable]
    fused: Sequence[FusedTrainable]
    losses: Sequence[tuple[float, float]]
    evaluations: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
    steps: int

    @classmethod
    def of(cls, trials: Sequence[Sequence[FusedTrainable]], steps: int) -> _Trained:
        """Trains the first trials alone, and the second ones in a pack.

        Raises:
            FusionError: they cannot train in a pack.
            Exception: what the user's code raises in a trial that trains alone.
        """
        alone, fused = trials
        pack = FusedPack(fused)
        try:
            with torch.no_grad(), global_random_state_kept():
                losses, found = pack._train(steps), pack._evaluate(limit=1)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            for trial in alone:  # If the trial alone raises, too, that is the user's error.
                _train_alone(trial, steps)
            if isinstance(error, FusionError):
                raise
            raise FusionError(f"in a pack, the trials raise {one_line(error)}") from error
        both = [(_train_alone(trial, steps), loss) for trial, loss in zip(alone, losses, strict=True)]
        evaluations = [
            (trial._evaluate(limit=1), {name: values[row] for name, values in found.items()})
            for row, trial in enumerate(alone)
        ]
        return cls(alone, fused, both, evaluations, steps)

    @property
    def tolerance(self) -> float:
        """What is allowed for parameters of these types, on this device."""
        trial = self.alone[0]
        allowed = [_TOLERANCES[dtype][self._column] for dtype in _types(trial) if dtype in _TOLERANCES]
        if trial.device.type != "cpu":
            allowed.append(_ON_GPU[self._column])
        return max(allowed)

    @property
    def tolerance_in_double(self) -> float:
        """What is allowed where everything is in double precision, on any device."""
        return _TOLERANCES[torch.float64][self._column]

    @property
    def may_differ_by_rounding(self) -> bool:
        """Whether parameters are in single precision, and differ by so little that rounding may be the reason."""
        return torch.float32 in _types(self.alone[0]) and self.difference(_AMPLIFIED) is None

    @property
    def _column(self) -> int:
        return 0 if isinstance(self.alone[0]._fused.spec, SGD) else 1

    def difference(self, tolerance: float) -> str | None:
        """Says in what the results differ by more than is allowed."""
        for trial, twin, losses, evaluations in zip(self.alone, self.fused, self.losses, self.evaluations, strict=True):
            for what, one, two in _pairs(trial, twin, *losses):
                distance = _distance(one, two)
                if not distance <= tolerance:
                    return (
                        f"after {self.steps} steps, {what} differs by {distance:.1e} between a pack and the trial "
                        f"alone, where {tolerance:.0e} is allowed"
                    )
            expected, found = evaluations
            for name in sorted(expected.keys() | found.keys()):
                if not _is_near(expected.get(name), found.get(name), trial, tolerance):
                    return f"evaluate() gives {name}={found.get(name)} fused, and {expected.get(name)} alone"
        return None


def _set_up(
    trainable: type[FusedTrainable], config: Mapping[str, Any], prepare: Callable[[FusedTrainable], None]
) -> FusedTrainable:
    trial = trainable()
    trial.setup(dict(config))
    spec = trial._fused.spec
    if isinstance(spec, Adam):
        trial._fused.spec = replace(spec, eps=max(spec.eps, _LEAST_EPS))
        trial._fused.spec.set_values(trial.torch_optimizer)
    prepare(trial)
    return trial


def _to_double(trial: FusedTrainable) -> None:
    """Gives a new trial a copy of its model, and its data, in double precision. Trials may share the model's parts."""
    members = {id(part._members): part._members for part in trial.model.modules() if isinstance(part, SyncBatchNorm)}
    trial.model = copy.deepcopy(trial.model, members).double()
    trial.torch_optimizer = trial._fused.spec.make(trained_parameters(trial.model))
    trial._fused.data = _InDouble(trial._fused.data)


class _InDouble:
    """Data in double precision, as far as it is in single precision."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def train_batches(self, epoch: int, start: int) -> Iterator[Any]:
        return map(self._converted, self._data.train_batches(epoch, start))

    def evaluation_batches(self) -> Iterator[Any]:
        return map(self._converted, self._data.evaluation_batches())

    @staticmethod
    def _converted(batch: Any) -> Any:
        return map_batch(lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor, batch)


def _train_alone(trial: FusedTrainable, steps: int) -> float:
    means = trial.means()
    with global_random_state_kept():
        trial._train(steps, means)
    return means.result()["loss"]


def _types(trial: FusedTrainable) -> set[torch.dtype]:
    return {parameter.dtype for parameter in trial.model.parameters() if parameter.requires_grad}


def _pairs(
    alone: FusedTrainable, fused: FusedTrainable, loss: float, fused_loss: float
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield "the loss", torch.tensor(loss), torch.tensor(fused_loss)
    theirs = dict(named_tensors(fused.model))
    for name, tensor in named_tensors(alone.model):
        yield name, tensor.detach(), theirs[name].detach()


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """The norm of the difference, relative to that of ``one``; where neither is finite, nothing differs."""
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()):
        return float("inf")
    one, two = one[finite].double(), two[finite].double()
    difference = torch.linalg.vector_norm(one - two)
    return float(difference / torch.linalg.vector_norm(one).clamp(min=1e-30)) if difference else 0.0


def _is_near(one: float | None, two: float | None, trial: FusedTrainable, tolerance: float) -> bool:
    """Whether two means over the first evaluation batch are equal but for rounding, or for two samples' decisions."""
    if one is None or two is None or not (math.isfinite(one) and math.isfinite(two)):
        return one is not None and two is not None and math.isfinite(one) == math.isfinite(two)
    samples = samples_in(next(iter(trial._fused.data.evaluation_batches())))
    return abs(one - two) <= max(100 * tolerance, 2.0 / samples) * max(1.0, abs(one))

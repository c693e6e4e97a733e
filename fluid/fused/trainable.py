"""The class of trials that can be fused. Its training loop is Fluid's: alone, elastic, or in a pack."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_flatten

from fluid.elastic.averaging import Means
from fluid.elastic.loader import Shard
from fluid.elastic.runtime import seed_everything
from fluid.elastic.state import is_plain_tensor
from fluid.elastic.trainable import ElasticTrainable
from fluid.errors import FluidError, InvalidFieldError, require_integer
from fluid.fused.data import (
    Data,
    Position,
    TensorData,
    batches_from,
    can_be_shared,
    is_on,
    map_batch,
    once_on,
    samples_in,
    share_no_more,
    shared_tensors,
    structure_key,
    sum_of_bits,
    tensor_bytes,
)
from fluid.fused.dropout import (
    CountedMasks,
    MaskPlan,
    Site,
    drawing,
    handing_out,
    has_dropout,
    probabilities,
    recording,
)
from fluid.fused.optimizers import OptimizerSpec
from fluid.fused.randomness import Purpose, global_random_state_kept, own_generator, own_seed, seed_of
from fluid.fused.stacked_model import trained_parameters


class LossModule(torch.nn.Module):  # type: ignore[misc]
    """A trainable's function of a model and a batch, as a module; so it can be called with other parameters."""

    def __init__(self, model: torch.nn.Module, function: Any) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, batch: Any) -> Any:
        """Calls the function."""
        return self._function(self.model, batch)


class FusedTrainable(ElasticTrainable):
    """Training of which several trials of one shape can run as one batched model, in a :class:`FusedPack`.

    Derive from it and define :meth:`build`, :meth:`loss`, :meth:`optimizer`, :meth:`data` and, if wanted,
    :meth:`evaluate` and :meth:`summarize`. There is no loop to write. An iteration is an epoch, and reports the mean
    training loss as ``loss``, with what :meth:`evaluate` returns after it.

    The class is an ordinary trainable, too: its trials train alone under ``fluid.run`` or Ray Tune, and on several
    devices as those of any :class:`~fluid.elastic.ElasticTrainable`. A checkpoint is the same in each case.

    **Methods are pure.** :meth:`loss` and :meth:`evaluate` compute with tensors only, of the model and the batch that
    they are given; one trial's config reaches them through the model: in its parameters, its buffers, and a
    :class:`~fluid.fused.Dropout`. A model may write to its buffers, but not to parameters that require no gradient:
    trials of a process share equal ones.

    **Random numbers** all follow from one seed: the model's first values, the order of the data, and the masks of
    :class:`~fluid.fused.Dropout`. It is ``config["seed"]``; without one, that of the trial, and 0 outside a session.
    The global generators are as before after each call.

    Attributes:
        iteration_batches: training batches in an iteration; ``None`` for an epoch.
        model: what :meth:`build` made, on the trial's device.
        torch_optimizer: PyTorch's optimizer of its parameters.

    Example:
        A linear regression, alone:

        >>> import torch
        >>> from fluid.fused import SGD, FusedTrainable, TensorData
        >>> class Line(FusedTrainable):
        ...     def build(self, config):
        ...         return torch.nn.Linear(1, 1)
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(model(x), y)
        ...     def optimizer(self, config):
        ...         return SGD(lr=config["lr"])
        ...     def data(self, config, seed):
        ...         x = torch.arange(8.0).reshape(8, 1) / 8
        ...         return TensorData([x, 3 * x], batch_size=4, seed=seed)
        >>> line = Line()
        >>> line.setup({"lr": 0.1, "seed": 1})
        >>> losses = [line.step()["loss"] for _ in range(3)]
        >>> losses[-1] < losses[0], line.iteration
        (True, 3)
    """

    #: Tells Fluid that trials of this class may train in one step with others.
    fluid_fusible: ClassVar[bool] = True
    iteration_batches: ClassVar[int | None] = None

    model: torch.nn.Module
    torch_optimizer: torch.optim.Optimizer
    _fused: FusedState
    _elastic_trial_seed: int

    # -- methods that users write -------------------------------------------------------------------------------

    def build(self, config: dict[str, Any]) -> torch.nn.Module:
        """Makes the model, on the CPU. The global generators are seeded with the trial's seed meanwhile."""
        raise NotImplementedError(f"{type(self).__name__} must define build(config), which returns the model")

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Returns the mean loss over a batch, a tensor with one number."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def optimizer(self, config: dict[str, Any]) -> OptimizerSpec:
        """Returns a :class:`~fluid.fused.SGD`, :class:`~fluid.fused.Adam` or :class:`~fluid.fused.AdamW`."""
        raise NotImplementedError(f"{type(self).__name__} must define optimizer(config)")

    def data(self, config: dict[str, Any], seed: int) -> Data:
        """Returns a :class:`~fluid.fused.TensorData`, or another :class:`~fluid.fused.Data`."""
        raise NotImplementedError(f"{type(self).__name__} must define data(config, seed)")

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Returns means over an evaluation batch, by name: tensors with one number, none of them named ``loss``."""
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, Any]:
        """Returns an iteration's metrics, given its mean training loss and the means of :meth:`evaluate`.

        By default they are these means. Define it for what follows from means, such as a perplexity. It is called
        once for each trial and iteration, with numbers, also in a pack.
        """
        return means

    # -- the interface to Fluid and Ray Tune ---------------------------------------------------------------------

    def setup(self, config: dict[str, Any]) -> None:
        """Builds everything. Override :meth:`build`, :meth:`optimizer` and :meth:`data`, not this."""
        with global_random_state_kept():
            super().setup(config)

    def step(self) -> dict[str, Any]:
        """Runs one iteration, or returns the metrics of one that a pack ran, if they were handed out."""
        handed_out, self._fused.handed_out = self._fused.handed_out, None
        if handed_out is not None:
            return handed_out
        self._require_no_pack("step()")
        with global_random_state_kept():
            return super().step()

    def hand_out(self, metrics: dict[str, Any]) -> None:
        """Has the next call of :meth:`step` return these: a class that wraps this one calls it after a pack's step."""
        self._fused.handed_out = metrics

    def train_iteration(self) -> Mapping[str, Any]:
        """Runs one iteration. It cannot be overridden in trials that are to be fused."""
        means = self.means()
        self._train(self._fused.iteration_batches, means)
        self.replicate_buffers()
        evaluation = self._evaluate()
        if (written := self._fused.frozen.find_written()) is not None:
            _writers.add(type(self))  # Trials that are set up from now on have their own.
            self._fused.frozen.require_own(written)
        return self.summarize(self._fused.metrics(means.result(), evaluation))

    def extra_state(self) -> dict[str, int]:
        """Returns the position in the data, and the optimizer's steps."""
        epoch, batch = self._fused.position
        return {"epoch": epoch, "batch": batch, "steps": self._fused.steps}

    def load_extra_state(self, state: Any) -> None:
        """Continues from where :meth:`extra_state` was called. The hyperparameters stay those of the trial's config."""
        self._fused.position, self._fused.steps = Position(state["epoch"], state["batch"]), state["steps"]
        self._fused.spec.set_values(self.torch_optimizer)

    def elastic_state(self) -> dict[str, Any]:
        """Returns the state at the end of an iteration; in a pack, with copies of this trial's part of its tensors."""
        state = super().elastic_state()
        if self._fused.pack is not None:
            parts = state["parts"]
            for name, value in parts["model"].items():  # Not a new dict: this one holds versions of modules, too.
                parts["model"][name] = map_batch(torch.clone, value)
            optimizer = parts["torch_optimizer"]
            optimizer["state"] = {
                number: map_batch(torch.clone, of_parameter) for number, of_parameter in optimizer["state"].items()
            }
        return state

    def load_elastic_state(self, state: Mapping[str, Any]) -> None:
        """Loads a state that :meth:`elastic_state` returned, here or on another device."""
        self._require_no_pack("load_checkpoint()")
        loaded = state["parts"].get("model", {})
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad and name in loaded:
                # A pack may have shared it with other trials, to which loading would write.
                parameter.data = parameter.data.clone()
        try:
            super().load_elastic_state(state)
        finally:
            self._fused.frozen = self._share_frozen(self.model)

    def _elastic_build(self, config: dict[str, Any]) -> None:
        seed = self._elastic_trial_seed = seed_of(config)
        seed_everything(own_seed(seed, Purpose.MODEL), 0, 0)
        model = self.build(config)
        self._check_fused_names()
        if not isinstance(model, torch.nn.Module):
            raise InvalidFieldError("build", model, "must return a torch.nn.Module")
        spec = self.optimizer(config)
        if not isinstance(spec, OptimizerSpec):
            raise InvalidFieldError("optimizer", spec, "must return an SGD, Adam or AdamW of fluid.fused")
        data = self.data(config, seed)
        if not isinstance(data, Data):
            raise InvalidFieldError("data", data, "must return a TensorData, or an object with the methods of Data")
        frozen = self._share_frozen(model)
        self.model = model.to(self.device)
        parameters = trained_parameters(self.model)
        if not parameters:
            raise InvalidFieldError("build", model, "must return a model with parameters to train")
        self.torch_optimizer = spec.make(parameters)
        if isinstance(data, TensorData):
            data.move_to(self.device)
        self._fused = FusedState(config, seed, self.model, spec, data, self.iteration_batches, frozen)

    def _share_frozen(self, model: torch.nn.Module) -> SharedParameters:
        """Moves the parameters that are not trained to the device, where trials of this process share equal ones."""
        if type(self) in _writers:
            return SharedParameters({})
        # Memory that is also a buffer's, or a trained parameter's, is written to.
        written = filter(is_plain_tensor, (*model.buffers(), *trained_parameters(model).values()))
        own = {tensor.untyped_storage().data_ptr() for tensor in written}
        shared = {}
        for name, parameter in model.named_parameters():
            value = parameter.detach()
            is_frozen = not parameter.requires_grad and can_be_shared(value)
            if is_frozen and value.untyped_storage().data_ptr() not in own:
                shared[name] = parameter.data = once_on(value, self.device)
        return SharedParameters(shared)

    @property
    def shareable_bytes(self) -> int:
        """Bytes on the device that trials of a pack share if theirs are equal: data, and what is not trained."""
        data = self._fused.data
        return tensor_bytes((*shared_tensors([data]), *self._fused.frozen.tensors.values()))

    # -- training alone ------------------------------------------------------------------------------------------

    def _train(self, count: int, means: Means) -> None:
        """Trains on the next batches, and adds their losses to the means."""
        state = self._fused
        self.model.train()
        masks_of = self._masks(count) if state.has_dropout else lambda part: nullcontext()
        for batch in batches_from(state.data, state.position, count):
            part = self._own_part(batch)
            self.torch_optimizer.zero_grad()
            with self.sync(self.torch_optimizer), masks_of(part):
                loss = self.loss(self.model, part)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise InvalidFieldError("loss", loss, "must return a tensor with one number")
                loss.backward()
            state.spec.step(self.torch_optimizer, state.steps)
            state.steps += 1
            means.add({"loss": loss}, self.count)
        state.position = state.position.after(count, len(state.data))

    def _evaluate(self, limit: int | None = None) -> dict[str, float]:
        """Evaluates on the evaluation batches, or on so many of them."""
        if type(self).evaluate is FusedTrainable.evaluate:
            return {}
        means = self.means()
        found: Mapping[str, Any] = {}
        self.model.eval()
        with torch.no_grad():
            for batch in islice(self._fused.data.evaluation_batches(), limit):
                found = self.evaluate(self.model, self._own_part(batch))
                means.add(found, self.count)
        self.model.train()
        return means.result() if found else {}

    def _own_part(self, batch: Any) -> Any:
        """Returns this device's part of a global batch, on the device."""
        shard = Shard.of(samples_in(batch), self.rank, self.size)
        self._elastic.begin_batch(shard)
        if self.size > 1:
            batch = map_batch(shard.take, batch)
        device = self.device
        return batch if is_on(batch, device) else map_batch(lambda tensor: tensor.to(device), batch)

    def _masks(self, count: int) -> Callable[[Any], AbstractContextManager[None]]:
        """Returns what hands out the masks of each of the next batches to the model."""
        state = self._fused
        if self.size > 1:  # No pack equals it. And no dry run: parts differ in shape, and layers may communicate.
            generator = own_generator(self.device, state.seed, Purpose.DROPOUT, self.iteration, self.rank)
            return lambda part: drawing(generator)
        keys = torch.tensor([state.mask_key], device=self.device)
        begun = state.steps
        masks = CountedMasks(keys, torch.tensor([begun]), count)

        def of(part: Any) -> AbstractContextManager[None]:
            shape = shape_of(part)
            if shape not in state.mask_plans:
                sites = record_sites(self, part)
                state.mask_plans[shape] = MaskPlan(sites, 1, self.device)
                state.mask_plans[shape].set_probabilities([probabilities(self.model, sites)])
            found = masks.of(state.steps - begun, state.mask_plans[shape])
            return handing_out([mask[0] for mask in found])

        return of

    def _require_no_pack(self, call: str) -> None:
        if self._fused.pack is not None:
            raise FluidError(f"{call} of a trial in a FusedPack: let it leave the pack first")

    def _check_fused_names(self) -> None:
        """Refuses attributes that hide what the class needs, such as ``self.loss = ...``."""
        hidden = vars(self).keys() & (_METHODS | {"model", "torch_optimizer"})
        if hidden:
            name = min(hidden)
            raise FluidError(
                f"self.{name} in {type(self).__name__} hides {name} of FusedTrainable: give the attribute another name"
            )


class SharedParameters:
    """The parameters of a trial that are not trained, which it may share with other trials of the process.

    Args:
        tensors: by name.

    Attributes:
        tensors: as above.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._sums = sum_of_bits(tensors.values())
        self._was_checked = False
        #: One that another trial has found to be written to.
        self._spoilt: str | None = None
        _shared.add(self)

    def find_written(self) -> str | None:
        """Returns the name of one that was written to, if any; called after each iteration.

        Later ones are looked at only while other trials share them: a write of a trial by itself harms no other.
        """
        if self._spoilt is not None or (self._was_checked and not self._sharers()):
            return self._spoilt
        self._was_checked = True
        sums = zip(self.tensors, self._sums, sum_of_bits(self.tensors.values()), strict=True)
        return next((name for name, before, now in sums if now != before), None)

    def require_own(self, written: str) -> None:
        """Makes those of a trial that writes to one of them its own. It fails, and so do those that share any.

        Raises:
            FluidError: others share them.
        """
        for other in self._sharers():
            self._spoilt = written
            other._spoilt = written if written in other.tensors else next(iter(other.tensors))
        if self._spoilt is not None:
            raise FluidError(
                f"a model has written to {written}, which requires no gradient and so is shared with other trials of "
                "its process: make it a buffer (register_buffer), of which each trial has its own"
            )
        for tensor in self.tensors.values():
            share_no_more(tensor)

    def _sharers(self) -> list[SharedParameters]:
        """Returns those of other trials that have any of these tensors."""
        mine = {id(tensor) for tensor in self.tensors.values()}
        others = [other for other in _shared if other is not self]
        return [other for other in others if any(id(each) in mine for each in other.tensors.values())]


#: The parameters of all trials of this process, and the classes of those that were seen to write to theirs.
_shared: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
_writers: weakref.WeakSet[type] = weakref.WeakSet()


class FusedState:
    """What a fused trainable has beside its model and its optimizer.

    Attributes:
        config: the trial's.
        seed: the trial's.
        spec: the values of its optimizer.
        data: its data.
        iteration_batches: training batches in an iteration.
        position: the next batch.
        steps: the optimizer's steps so far.
        pack: the pack that trains it; ``None`` if it trains alone.
        handed_out: metrics that the next call of ``step`` returns; ``None`` if it runs an iteration.
        has_dropout: whether the model has a :class:`~fluid.fused.Dropout`.
        mask_plans: how to draw masks, by shape of the batch.
        frozen: parameters that are not trained, which other trials of the process may share.
    """

    def __init__(
        self,
        config: dict[str, Any],
        seed: int,
        model: torch.nn.Module,
        spec: OptimizerSpec,
        data: Data,
        iteration_batches: int | None,
        frozen: SharedParameters,
    ) -> None:
        self.config = config
        self.frozen = frozen
        self.seed = seed
        self.spec = spec
        self.data = data
        length = len(data) if iteration_batches is None else iteration_batches
        self.iteration_batches = require_integer("iteration_batches", length, at_least=1)
        self.position = Position()
        self.steps = 0
        self.pack: object = None
        self.handed_out: dict[str, Any] | None = None
        self.has_dropout = has_dropout(model)
        self.mask_plans: dict[Any, MaskPlan] = {}

    @cached_property
    def mask_key(self) -> int:
        """The key of the random numbers of its masks."""
        return own_seed(self.seed, Purpose.DROPOUT)

    @staticmethod
    def metrics(training: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, float]:
        """Returns an iteration's means.

        Raises:
            InvalidFieldError: :meth:`FusedTrainable.evaluate` has returned a ``loss``.
        """
        if training.keys() & evaluation.keys():
            raise InvalidFieldError("evaluate", sorted(evaluation), "'loss' is the training loss: use another name")
        return {**training, **evaluation}


def shape_of(batch: Any, begin: int = 0) -> tuple[Any, ...]:
    """Returns what distinguishes batches for which a model may call its Dropouts with other shapes.

    Args:
        batch: of a trial, or of rows, which are the first dimension.
        begin: the first dimension that matters.
    """
    leaves, structure = tree_flatten(batch)
    shapes = ((leaf.shape[begin:], leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return structure_key(structure), *shapes


def record_sites(trainable: FusedTrainable, batch: Any) -> list[Site]:
    """Returns the calls of Dropouts for a batch of this shape; a dry run, which changes nothing."""
    program = LossModule(trainable.model, trainable.loss)
    buffers = {name: buffer.clone() for name, buffer in program.named_buffers()}
    with torch.no_grad(), global_random_state_kept(), recording(program) as sites:
        functional_call(program, buffers, (batch,))
    return [site._replace(module=site.module.removeprefix("model.")) for site in sites]


#: The methods that users write, which attributes must not hide.
_METHODS = frozenset({"loss", "optimizer", "data", "evaluate", "summarize"})

"""PyTorch Lightning on Fluid: a Trainer trains each trial, and an epoch is an iteration.

:func:`sweep` runs a sweep of a module, :func:`fit` trains in a function of your own, and :class:`LightningCallback` is
what both add to the Trainer: it reports each epoch, and saves by ``trainer.save_checkpoint``. Both packages serve,
``lightning.pytorch`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fluid
from fluid._given_executor import closes_executor
from fluid._imports import try_import
from fluid.directions import direction_of
from fluid.errors import InvalidFieldError, require_integer
from fluid.integrations.options import require_options
from fluid.random_state import read_random_state, write_random_state
from fluid.sweeping.algorithms import named
from fluid.trainables.trial_code import TrialEnded

if TYPE_CHECKING:
    from fluid.results.sweep import SweepResult

#: Arguments for the Trainer of a trial, with which it leaves no files but Fluid's checkpoints, prints nothing, and
#: trains on the device of its lane. :func:`sweep` uses them but for what it is given, and what callbacks need.
TRAINER_DEFAULTS: Mapping[str, Any] = {
    "devices": 1,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": False,
    "num_sanity_val_steps": 0,
}

#: The files of a checkpoint: the Trainer's, and what the Trainer does not save.
CHECKPOINT_FILE = "lightning.ckpt"
_STATE_FILE = "fluid.pkl"
#: Lightning's two packages, each with classes of its own, and what they stand on.
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
#: Where a Trainer, its callbacks, loggers and profiler keep the folders they write to.
_FOLDERS = ("_default_root_dir", "_root_dir", "_save_dir", "dirpath")


@closes_executor
def sweep(
    module: Callable[..., Any],
    space: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    *,
    datamodule: Any = None,
    trainer: Mapping[str, Any] | Callable[[dict[str, Any]], Any] | None = None,
    metric: str | list[str],
    budget: int | None = None,
    seed: int | None = 0,
    name: str | None = None,
    **options: Any,
) -> SweepResult:
    """Runs a sweep of a LightningModule: :func:`fluid.run` on trials that a Trainer trains.

    A class is called with those hyperparameters that its ``__init__`` names, a function with the whole config.

    Example:
        >>> import lightning as L
        >>> import torch
        >>> from fluid import FluidExecutor
        >>> from fluid.integrations.lightning import sweep
        >>> class Line(L.LightningModule):
        ...     def __init__(self, lr):
        ...         super().__init__()
        ...         self.lr, self.layer = lr, torch.nn.Linear(1, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         loss = ((self.layer(batch) - 2 * batch) ** 2).mean()
        ...         self.log("loss", loss, on_step=False, on_epoch=True)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), self.lr)
        >>> data = torch.utils.data.DataLoader(torch.linspace(0, 1, 8).reshape(8, 1), batch_size=4)
        >>> with FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = sweep(Line, {"lr": [0.001, 0.1]}, data, metric="loss", budget=2, algorithm="grid")
        >>> result.best.config, result.best.iteration
        ({'lr': 0.1}, 2)

    Args:
        module: the LightningModule's class, or a function that makes one of a config.
        space: the hyperparameters, as for :func:`fluid.run`.
        train_dataloaders: as for ``Trainer.fit``; or a function that makes them of a config. Trials that share a
            process (``isolation="lane"``) share loaders that are objects: one with a ``torch.Generator`` of its own
            must then be made by a function.
        val_dataloaders: the same.
        datamodule: a LightningDataModule, of which each trial gets a copy; its class, or a function that makes one of a
            config.
        trainer: arguments of each trial's Trainer besides :data:`TRAINER_DEFAULTS`; or a function that makes these
            arguments, or the Trainer itself, of a config. What the Trainer would write at or below the working
            directory is below the trial's folder (:func:`fluid.trial_dir`). It has a logger that hands what is logged
            to Fluid, unless one is given.
        metric: name, in ``trainer.callback_metrics``, of what the module logs and trials are compared by. Its ``mode``,
            if ``options`` have none, is that of a callback in ``trainer`` that monitors it, else what its name says.
        budget: most epochs of a trial, and ``max_epochs`` of its Trainer, unless ``trainer`` has another one; ``None``,
            the default, for the ``max_epochs`` in ``trainer``, which must say a number then.
        seed: of the configs, and of the random numbers in each trial; ``None`` for others in each call.
        name: of the sweep, as reports show it; ``None``, the default, for one of the module and the algorithm.
        options: further arguments of :func:`fluid.run`, such as ``samples`` and ``algorithm``.

    Returns:
        What :func:`fluid.run` returns. ``result.best.load_checkpoint() / "lightning.ckpt"`` is a checkpoint for
        ``load_from_checkpoint`` and ``Trainer.fit``.

    Raises:
        InvalidFieldError: an argument cannot be used.
        SweepFailedError: all trials have failed.
    """
    if not callable(module) or isinstance(module, _loaded_types("LightningModule")):
        raise InvalidFieldError("module", f"a {type(module).__name__}", "must be a class, or a function of a config")
    data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
    _check(module, space, data, trainer)
    require_options(fluid.run, options)
    if budget is None:
        budget = _epochs_of(trainer)
    if isinstance(trainer, Mapping) and (every := trainer.get("check_val_every_n_epoch")):
        options.setdefault("min_budget", min(every, budget))  # Before, what is validated has no value.
    trial = _LightningTrial(
        module=module,
        data=data,
        trainer={} if trainer is None else trainer,
        max_epochs=budget,
        seed=seed,
    )
    if name is None:
        name = f"{trial.__name__}-{named(options.get('algorithm', 'asha'))}"
    if options.get("mode") is None:
        options["mode"] = _modes_said(metric, trainer)
    return fluid.run(trial, space, metric=metric, budget=budget, seed=seed, name=name, **options)


def _modes_said(metric: Any, trainer: Any) -> list[str | None] | None:
    """The modes in which callbacks of a Trainer's arguments monitor the metrics of a sweep.

    Raises:
        InvalidFieldError: one has Lightning's default ``"min"`` for a metric of which more is better.
    """
    given = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
    callbacks: Iterable[Any] = given if isinstance(given, (list, tuple)) else [given]
    said = {
        each.monitor: each.mode
        for each in callbacks
        if getattr(each, "monitor", None) is not None and getattr(each, "mode", None) in ("min", "max")
    }
    names = [metric] if isinstance(metric, str) else metric
    if not isinstance(names, (list, tuple)) or not names:
        return None
    for name in names:
        if said.get(name) == "min" and direction_of(name) == "max":
            reason = f"a callback monitors {name!r} with mode 'min', but more of it is better; pass mode= to both"
            raise InvalidFieldError("mode", None, reason)
    return [said.get(name) for name in names]


def fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Calls ``trainer.fit`` in the function of a trial: each epoch is reported, and a trial goes on where it was saved.

    A Trainer without a ``default_root_dir`` of its own has the trial's folder (:func:`fluid.trial_dir`), so that
    Lightning's own loggers and checkpoints of two trials do not mix. Outside a trial it is ``trainer.fit``.
    With ``reload_dataloaders_every_n_epochs`` above 1, Lightning counts from the epoch at which a trial went on.

    Example:
        >>> import lightning as L
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fluid.integrations.lightning import TRAINER_DEFAULTS, fit
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", limit_train_batches=2, **TRAINER_DEFAULTS)
        >>> fit(trainer, BoringModel())
        >>> trainer.current_epoch
        1

    Args:
        trainer: a Trainer; a :class:`LightningCallback` is put before its callbacks, unless it has one.
        model: the LightningModule.
        args: further arguments of ``trainer.fit``.
        kwargs: the same by name. ``ckpt_path`` is where a trial begins.

    Raises:
        TrialEnded: the trial has ended, and the Trainer, too, as it does after its last epoch; derives from
            ``BaseException``. Let it pass.
    """
    callback = next((found for found in trainer.callbacks if isinstance(found, LightningCallback)), None)
    if callback is None:
        callback = LightningCallback()
        trainer.callbacks.insert(0, callback)
    if callback.ckpt_path is not None:
        kwargs["ckpt_path"] = callback.ckpt_path
        if "weights_only" in inspect.signature(trainer.fit).parameters:
            kwargs["weights_only"] = False  # The checkpoint is the trial's own, and holds all that callbacks keep.
    callback.raises_in_fit = False
    _move_folders(trainer, os.getcwd(), subfolders=False)
    trainer.fit(model, *args, **kwargs)
    if callback.ended is not None:
        raise callback.ended


class LightningCallback:
    """A callback for a Trainer in the function of a trial: it reports each epoch to Fluid.

    Make it before the data, so that what is drawn at random for them is the same when the trial goes on elsewhere. For
    a training loop that :func:`fit` cannot call, pass :attr:`ckpt_path` to ``trainer.fit``. An object is of the
    ``Callback`` classes of all of Lightning's packages that are loaded.

    Example:
        >>> import lightning as L
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fluid.integrations.lightning import TRAINER_DEFAULTS, LightningCallback
        >>> callback = LightningCallback()
        >>> limits = {"max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu"}
        >>> trainer = L.Trainer(callbacks=[callback], **limits, **TRAINER_DEFAULTS)
        >>> trainer.fit(BoringModel(), ckpt_path=callback.ckpt_path)
        >>> isinstance(callback, L.Callback)
        True

    Attributes:
        ckpt_path: the Trainer's checkpoint that the trial goes on from; ``None`` if it begins, and outside a trial.
        raises_in_fit: whether the end of the trial is raised at once, as an error within ``trainer.fit``; otherwise
            the Trainer ends as it does after its last epoch.
        ended: the end of the trial, which the caller of ``trainer.fit`` raises; ``None`` if it was raised already.
    """

    def __new__(cls) -> LightningCallback:
        """Makes an object of a subclass that is Lightning's, too."""
        kind: Any = cls  # Classes are hashable, which mypy does not see.
        if cls is LightningCallback:
            kind = _mixed(kind, *_loaded_types("Callback"))
        made: LightningCallback = object.__new__(kind)
        return made

    def __init__(self) -> None:
        folder = fluid.get_checkpoint()
        self.ckpt_path = None if folder is None else str(folder / CHECKPOINT_FILE)
        self.raises_in_fit = True
        self.ended: TrialEnded | None = None
        #: Until the first epoch begins: the states of the generators to go on with.
        self._resumed: Mapping[str, Any] | None = None
        #: The newest of each; a :class:`_FluidLogger` adds to them.
        self._metrics: dict[str, float] = {}
        #: Whether an epoch has ended that was not reported.
        self._has_news = False
        if folder is not None:
            self._resumed = pickle.loads((folder / _STATE_FILE).read_bytes())
            self._metrics = self._resumed["metrics"]
            write_random_state(self._resumed["begun"])
        #: The states of the random generators at the beginning.
        self._begun = read_random_state()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves out the sanity check of a trial that goes on."""
        if self._resumed is not None:
            trainer.num_sanity_val_steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lets a trial that goes on begin with a new epoch.

        With ``max_steps``, Lightning takes every checkpoint for one from within an epoch.
        """
        if self._resumed is not None:
            trainer.fit_loop._restarting = False
            trainer.fit_loop.epoch_loop.restarting = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Reports the epoch before: only now have schedulers that follow a metric made their step."""
        if self._resumed is not None:
            self._restore_random(trainer, self._resumed)
            self._resumed = None
        self._report(trainer)
        if self.ended is not None:
            raise StopIteration  # Ends Lightning's loop of epochs.

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Records that there is an epoch to report."""
        self._has_news = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Reports the last epoch."""
        self._report(trainer)

    def _report(self, trainer: Any) -> None:
        if self._has_news:
            self._has_news = False
            self._metrics.update((name, value.item()) for name, value in trainer.callback_metrics.items())
            try:
                fluid.report(dict(self._metrics), save=functools.partial(self._save, trainer))
            except TrialEnded as end:
                if self.raises_in_fit:
                    raise
                self.ended = end

    def _save(self, trainer: Any, folder: Path) -> None:
        progress = trainer.fit_loop.epoch_progress
        counts = (progress.current, progress.total)
        ready = [count.ready for count in counts]
        for count in counts:  # The next epoch is not part of the checkpoint.
            count.ready = count.completed
        try:
            trainer.save_checkpoint(str(folder / CHECKPOINT_FILE))
        finally:
            for count, number in zip(counts, ready, strict=True):
                count.ready = number
        states = {
            "begun": self._begun,
            "now": read_random_state(),
            "loaders": [generator.get_state() for generator in _generators(trainer)],
            "metrics": self._metrics,
        }
        (folder / _STATE_FILE).write_bytes(pickle.dumps(states))

    @staticmethod
    def _restore_random(trainer: Any, states: Mapping[str, Any]) -> None:
        for generator, state in zip(_generators(trainer), states["loaders"], strict=True):
            generator.set_state(state)
        write_random_state(states["now"])
        if getattr(trainer.fit_loop, "is_resuming", False):
            # An epoch begins with new iterators, which draw random numbers. Lightning has made them earlier here.
            iter(trainer.fit_loop._data_fetcher)


class _FluidLogger:
    """The logger of a trial that is given none: what is logged is reported, and any other call does nothing.

    An object is a ``DummyLogger`` of Lightning's, too.

    Args:
        metrics: to add to.
    """

    def __init__(self, metrics: dict[str, float]) -> None:
        super().__init__()
        self._metrics = metrics

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keeps the newest of each number."""
        for name, value in metrics.items():
            if name != "epoch":  # Lightning adds it.
                with suppress(TypeError, ValueError, RuntimeError):
                    self._metrics[name] = float(value)

    @property
    def save_dir(self) -> str:
        """Where callbacks write that write beside the logger."""
        return str(fluid.trial_dir())


class _LightningTrial:
    """The trainable of :func:`sweep`."""

    def __init__(
        self,
        *,
        module: Callable[..., Any],
        data: Mapping[str, Any],
        trainer: Mapping[str, Any] | Callable[[dict[str, Any]], Any],
        max_epochs: int,
        seed: int | None,
    ) -> None:
        self.__name__ = getattr(module, "__name__", type(module).__name__)
        self._module = module
        self._data = data
        self._trainer = trainer
        self._max_epochs = max_epochs
        self._seed = seed
        self._home = os.getcwd()

    def __call__(self, config: dict[str, Any]) -> None:
        _silence()
        if self._seed is not None:
            _loaded()[0].seed_everything(self._seed, workers=True)
        callback = LightningCallback()
        taken: set[str] = set()
        data = {name: _made(maker, config, taken) for name, maker in self._data.items() if maker is not None}
        model = _made(self._module, config, taken)
        trainer = self._make_trainer(config, model, taken, callback)
        if unused := sorted(config.keys() - taken):
            raise TypeError(f"neither the module nor the data take {', '.join(unused)}: pass a function of a config")
        trainer.callbacks.insert(0, callback)
        fit(trainer, model, **data)

    def _make_trainer(self, config: dict[str, Any], model: Any, taken: set[str], callback: LightningCallback) -> Any:
        made = self._trainer
        # Arguments may hold callbacks, which have a state.
        made = _made(made, config, taken) if callable(made) else copy.deepcopy(dict(made))
        if not isinstance(made, Mapping):
            return made
        package = next(package for package in _loaded() if isinstance(model, package.LightningModule))
        environments = importlib.import_module(f"{_FABRICS[package.__name__]}.plugins.environments")
        callbacks = made.get("callbacks") or ()
        callbacks = [callbacks] if isinstance(callbacks, package.Callback) else callbacks
        own = {
            "max_epochs": self._max_epochs,
            "plugins": [environments.LightningEnvironment()],
            "logger": _mixed(_FluidLogger, package.loggers.logger.DummyLogger)(callback._metrics),
            "enable_checkpointing": any(isinstance(one, package.callbacks.Checkpoint) for one in callbacks),
            "enable_progress_bar": any(isinstance(one, package.callbacks.ProgressBar) for one in callbacks),
        }
        trainer = package.Trainer(**{**TRAINER_DEFAULTS, **own, **made})
        _move_folders(trainer, self._home, subfolders=True)
        return trainer


def _made(maker: Any, config: dict[str, Any], taken: set[str]) -> Any:
    """Makes an object of a config, and adds the names of the hyperparameters that it may use to those taken."""
    names = _names_for(maker, config)
    taken.update(names)
    if inspect.isclass(maker):
        return maker(**{name: config[name] for name in names})
    if callable(maker):
        return maker(config)
    return copy.copy(maker) if isinstance(maker, _loaded_types("LightningDataModule")) else maker


def _names_for(maker: Any, names: Iterable[str]) -> list[str]:
    """Returns those names of hyperparameters that a class takes, a function all, and any other object none."""
    if not inspect.isclass(maker):
        return list(names) if callable(maker) else []
    parameters = inspect.signature(maker).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in names if takes_all or name in parameters]


def _epochs_of(trainer: Any) -> int:
    """Returns how many epochs a trial has at most, as the arguments of its Trainer say."""
    arguments = trainer if isinstance(trainer, Mapping) else {}
    if (epochs := arguments.get("max_epochs")) is not None and epochs != -1:
        return require_integer("trainer['max_epochs']", epochs, at_least=1)
    others = [f"trainer[{name!r}]" for name in ("max_epochs", "max_steps", "max_time") if name in arguments]
    reason = "must be given, or max_epochs in trainer=: the most epochs of a trial"
    if others:
        reason += f", which {' and '.join(others)} {'does' if len(others) == 1 else 'do'} not say"
    raise InvalidFieldError("budget", None, reason)


def _check(module: Any, space: Any, data: Mapping[str, Any], trainer: Any) -> None:
    """Refuses what would fail in each trial."""
    if trainer is not None and not callable(trainer) and not isinstance(trainer, Mapping):
        reason = "must be a dict of a Trainer's arguments, or a function of a config"
        raise InvalidFieldError("trainer", trainer, reason)
    if data["datamodule"] is not None and (data["train_dataloaders"], data["val_dataloaders"]) != (None, None):
        raise InvalidFieldError("datamodule", data["datamodule"], "cannot be given besides loaders")
    if isinstance(trainer, Mapping):
        known = {name for package in _loaded() for name in inspect.signature(package.Trainer).parameters}
        for name in trainer.keys() - known:
            raise InvalidFieldError(f"trainer[{name!r}]", trainer[name], "is no argument of a Trainer")
        for name in ("devices", "num_nodes"):
            if isinstance(number := trainer.get(name), int) and number > 1:
                reason = "must be 1, or be left out: a trial trains in one process, on the device of its lane"
                raise InvalidFieldError(f"trainer[{name!r}]", number, reason)
    if isinstance(space, Mapping):
        taken = [name for maker in (module, trainer, *data.values()) for name in _names_for(maker, space)]
        for name in sorted(space.keys() - set(taken)):
            reason = "is taken neither by the module nor by the data; or pass a function of a config"
            raise InvalidFieldError(f"space[{name!r}]", space[name], reason)


def _silence() -> None:
    """Leaves out what Lightning tells each time that a Trainer is made and begins."""
    for name in (*_FABRICS, *_FABRICS.values()):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Of Lightning's own code.


def _loaded() -> list[Any]:
    """Returns those of Lightning's packages that are loaded; loads one if none is."""
    if not any(name in sys.modules for name in _FABRICS):
        with try_import("PyTorch Lightning", extra="lightning") as imports:
            importlib.import_module(next(iter(_FABRICS)))
        imports.check()
    return [sys.modules[name] for name in _FABRICS if name in sys.modules]


def _loaded_types(name: str) -> tuple[type, ...]:
    return tuple(getattr(package, name) for package in _loaded())


@functools.cache
def _mixed(own: type, *theirs: type) -> Any:
    """Returns the subclass of a class of this module and of Lightning's classes."""
    return type(own.__name__, (own, *theirs), {"__module__": __name__})


def _move_folders(trainer: Any, home: str, *, subfolders: bool) -> None:
    """Lets a Trainer write into the trial's folder what it would write into the program's working directory.

    Args:
        trainer: with its callbacks, loggers and profiler.
        home: the working directory.
        subfolders: whether folders below it are moved, too. Where it is the root of the file system, they are not:
            every folder is below it.
    """
    folder, home = os.path.realpath(fluid.trial_dir()), os.path.realpath(home)
    if folder == home:
        return
    for owner in (trainer, *trainer.callbacks, *trainer.loggers, trainer.profiler):
        for name in _FOLDERS:
            path = getattr(owner, "__dict__", {}).get(name)
            if not isinstance(path, (str, os.PathLike)) or "://" in str(path):
                continue
            path = os.path.realpath(os.path.join(home, path))
            if path == home or (
                subfolders and home != os.sep and _is_below(path, home) and not _is_below(path, folder)
            ):
                setattr(owner, name, os.path.normpath(os.path.join(folder, os.path.relpath(path, home))))


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _generators(trainer: Any) -> list[Any]:
    """Returns the generators of random numbers that loaders of training data have of their own."""
    fetcher = trainer.fit_loop._data_fetcher
    found: dict[int, Any] = {}
    for loader in [] if fetcher is None else fetcher.combined_loader.flattened:
        for owner in (loader, getattr(loader, "sampler", None)):
            if (generator := getattr(owner, "generator", None)) is not None:
                found[id(generator)] = generator
    return list(found.values())

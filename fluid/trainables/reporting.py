"""How the function of a trial reports an iteration where it cannot yield, as in the callback of a framework's trainer.

The function calls :func:`report` at the end of each iteration, and waits in it until the trial may run the next one.
:func:`trial_dir` is for the code of any trial.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluid.trainables.driver_link import driver_link, in_trial
from fluid.trainables.resident import TrainableFormError
from fluid.trainables.script_link import CHECKPOINT_DIR, LINK, TRIAL_DIR, is_in_script
from fluid.trainables.trial_code import Reporter, Save, current_trial
from fluid.user_calls import user_call


@user_call
def report(metrics: Mapping[str, Any], save: Save | None = None) -> None:
    """Ends an iteration of the trial whose function calls it, and waits until the trial may go on.

    For functions whose training loop belongs to a framework; a loop of your own can ``yield`` its metrics instead. The
    function may call it in any of its threads: a call between two iterations waits for the next one. Outside a trial it
    does nothing, so that the same code also runs alone; in a trial of Ray Tune alone it reports to Ray Tune. In a
    script that ``fluid run`` started it reports to Fluid.

    Args:
        metrics: of this iteration; ``"done": True`` in them ends the trial.
        save: writes the state that the function can go on from into the empty folder that it is given. It is called
            before ``report`` returns, and only if the state is to be saved now. ``None``, the default, if the state
            cannot be saved: the trial is then not moved, and begins again if its process dies.

    Raises:
        TypeError: the metrics are no mapping, or ``save`` is no function.
        FluidError: a class, a generator function or a forked process calls it.
        TrialEnded: the trial has ended, at each call; derives from ``BaseException``. Let it pass.

    Example:
        >>> import fluid
        >>> def train(config):
        ...     folder, weight = fluid.get_checkpoint(), 0.0
        ...     if folder is not None:
        ...         weight = float((folder / "weight").read_text())
        ...     while True:
        ...         weight += config["lr"] * (1.0 - weight)
        ...         fluid.report({"loss": 1.0 - weight}, save=lambda to: (to / "weight").write_text(repr(weight)))
        >>> trial = fluid.Trial(train, {"lr": 0.5}, budget=3)
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     handle = executor.submit_trialgroup(fluid.TrialGroup([trial]))
        ...     [result.metrics["loss"] for result in handle.results()]
        [0.5, 0.25, 0.125]
    """
    if not isinstance(metrics, Mapping):
        raise TrainableFormError(
            f"fluid.report() takes a dict of metrics, not {type(metrics).__name__}: fluid.report({{'loss': ...}})"
        )
    if save is not None and not callable(save):
        raise TrainableFormError(f"fluid.report() takes as save a function of a folder, not {type(save).__name__}")
    reporter = _reporter()
    if reporter is not None:
        reporter.report(metrics, save)
    elif _is_in_ray_session():
        _report_to_ray(metrics, save)
    elif in_trial():
        raise TrainableFormError(
            "fluid.report() is for functions that neither yield nor return their metrics: the step() of a class returns"
            " them, a generator function yields them, an objective of Optuna calls trial.report()"
        )
    elif is_in_script():
        LINK.report(metrics, "fluid", save)


def get_checkpoint() -> Path | None:
    """Returns the folder that an earlier ``save`` of :func:`report` filled, from which the trial goes on.

    Returns:
        The folder, which the function must not change; ``None`` if the trial begins, and outside a trial.

    Raises:
        FluidError: a forked process calls it.
        TrialEnded: the trial has ended.

    Example:
        >>> import fluid
        >>> fluid.get_checkpoint() is None
        True
    """
    reporter = _reporter()
    if reporter is not None:
        return reporter.checkpoint
    if not _is_in_ray_session():
        return Path(os.environ[CHECKPOINT_DIR]) if CHECKPOINT_DIR in os.environ and not in_trial() else None
    checkpoint = _ray_tune().get_checkpoint()
    if checkpoint is None:
        return None
    is_local = type(checkpoint.filesystem).__name__ == "LocalFileSystem"
    return Path(checkpoint.path if is_local else checkpoint.to_directory())


def trial_dir() -> Path:
    """Returns the folder of the running trial's own files, which exists.

    It is the trial's alone, and stays for as long as the run folder, in which ``result.trials[n].folder`` finds it. A
    trial that is tried again, or goes on in a resumed session, has the same one, with what is in it. Where a machine
    does not share the run folder, it is a folder of that machine. In a trial of Ray Tune it is Tune's folder of the
    trial. Outside a trial it is the working directory, so that the same code also runs alone.

    Example:
        >>> import fluid
        >>> def train(config):
        ...     _ = (fluid.trial_dir() / "notes.txt").write_text(f"lr is {config['lr']}")
        ...     yield {"loss": config["lr"]}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, {"lr": [0.1, 0.2]}, metric="loss", algorithm="grid")
        >>> (result.best.trial.folder / "notes.txt").read_text()
        'lr is 0.1'
    """
    if in_trial():
        folder = Path(driver_link().folder)
    elif _is_in_ray_session():
        folder = Path(_ray_tune().get_context().get_trial_dir())
    elif is_in_script():
        folder = Path(os.environ[TRIAL_DIR])
    else:
        return Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _reporter() -> Reporter | None:
    """The reporter of the caller's trial; ``None`` if it has none."""
    code = current_trial()
    if code is None:
        return None
    if code.reporter is not None or code.ended:
        code.check()
    return code.reporter


def _is_in_ray_session() -> bool:
    module: Any = sys.modules.get("ray.train._internal.session")
    return module is not None and module.get_session() is not None


def _ray_tune() -> Any:
    tune = importlib.import_module("ray.tune")
    return tune if hasattr(tune, "report") and hasattr(tune, "get_checkpoint") else importlib.import_module("ray.train")


def _report_to_ray(metrics: Mapping[str, Any], save: Save | None) -> None:
    """Ray Tune decides about checkpoints once they are reported: each one is written."""
    tune = _ray_tune()
    if save is None:
        tune.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))

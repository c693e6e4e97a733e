"""Fluid: a hyperparameter tuning execution engine.

A search algorithm submits the trials to run as a :class:`TrialGroup`. Fluid decides how to run them: it packs small
trials on one device, spreads large ones over several, and re-plans as trials end.

Names are loaded on first use, so that ``import fluid`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from fluid._version import __version__

if sys.platform != "linux":
    _is_command = os.path.splitext(os.path.basename(next(iter(sys.argv), "")))[0] == "fluid"
    # pip installs a wheel of Python on every system. The command says it without a traceback.
    raise (SystemExit if _is_command else ImportError)(
        f"Fluid runs on Linux, and this is {sys.platform}: on Windows, install and run it in WSL2 (wsl --install); "
        "elsewhere, in a Linux container (docker run -it python:3.11 bash)"
    )

if TYPE_CHECKING:
    from fluid.dynamic_fluid import DynamicFluid
    from fluid.errors import FluidError, Infeasible, InvalidFieldError, MissingDependencyError
    from fluid.executor import FluidExecutor, submit_trialgroup
    from fluid.keeping import Keep
    from fluid.measure.profile import Profile
    from fluid.packing import Sharing
    from fluid.planners.instance import Instance
    from fluid.planners.portfolio import Fifo, Portfolio
    from fluid.resources import Cluster, Device, MemoryNeed, Placement, Requires
    from fluid.results.best import BestTrial
    from fluid.results.checkpoints import KeptCheckpoint, kept_checkpoints
    from fluid.results.loading import load
    from fluid.results.records import Result, TrialResult
    from fluid.results.sweep import SweepResult
    from fluid.search_shape import SearchShape
    from fluid.session.facts import Forecast
    from fluid.session.handle import TrialGroupHandle
    from fluid.session.listeners import (
        CallFailedError,
        LimitReachedError,
        SweepInterrupted,
        TrialFailedError,
        TrialListener,
    )
    from fluid.session.output import Output
    from fluid.shared_data.loading import shared
    from fluid.sizing.goals import Goals
    from fluid.static_fluid import StaticFluid
    from fluid.sweep import run
    from fluid.sweeping.plan import SweepFailedError
    from fluid.trainables.reporting import get_checkpoint, report, trial_dir
    from fluid.trialgroup import Search, Shown, Trial, TrialGroup

_HOME = {
    "BestTrial": "fluid.results.best",
    "CallFailedError": "fluid.session.listeners",
    "Cluster": "fluid.resources",
    "Device": "fluid.resources",
    "DynamicFluid": "fluid.dynamic_fluid",
    "Fifo": "fluid.planners.portfolio",
    "FluidError": "fluid.errors",
    "FluidExecutor": "fluid.executor",
    "Forecast": "fluid.session.facts",
    "Goals": "fluid.sizing.goals",
    "Infeasible": "fluid.errors",
    "Instance": "fluid.planners.instance",
    "InvalidFieldError": "fluid.errors",
    "Keep": "fluid.keeping",
    "KeptCheckpoint": "fluid.results.checkpoints",
    "LimitReachedError": "fluid.session.listeners",
    "MemoryNeed": "fluid.resources",
    "MissingDependencyError": "fluid.errors",
    "Output": "fluid.session.output",
    "Placement": "fluid.resources",
    "Portfolio": "fluid.planners.portfolio",
    "Profile": "fluid.measure.profile",
    "Requires": "fluid.resources",
    "Result": "fluid.results.records",
    "Search": "fluid.trialgroup",
    "SearchShape": "fluid.search_shape",
    "Sharing": "fluid.packing",
    "Shown": "fluid.trialgroup",
    "StaticFluid": "fluid.static_fluid",
    "SweepFailedError": "fluid.sweeping.plan",
    "SweepInterrupted": "fluid.session.listeners",
    "SweepResult": "fluid.results.sweep",
    "Trial": "fluid.trialgroup",
    "TrialFailedError": "fluid.session.listeners",
    "TrialGroup": "fluid.trialgroup",
    "TrialGroupHandle": "fluid.session.handle",
    "TrialListener": "fluid.session.listeners",
    "TrialResult": "fluid.results.records",
    "get_checkpoint": "fluid.trainables.reporting",
    "kept_checkpoints": "fluid.results.checkpoints",
    "load": "fluid.results.loading",
    "report": "fluid.trainables.reporting",
    "run": "fluid.sweep",
    "shared": "fluid.shared_data.loading",
    "submit_trialgroup": "fluid.executor",
    "trial_dir": "fluid.trainables.reporting",
}

__all__ = [
    "BestTrial",
    "CallFailedError",
    "Cluster",
    "Device",
    "DynamicFluid",
    "Fifo",
    "FluidError",
    "FluidExecutor",
    "Forecast",
    "Goals",
    "Infeasible",
    "Instance",
    "InvalidFieldError",
    "Keep",
    "KeptCheckpoint",
    "LimitReachedError",
    "MemoryNeed",
    "MissingDependencyError",
    "Output",
    "Placement",
    "Portfolio",
    "Profile",
    "Requires",
    "Result",
    "Search",
    "SearchShape",
    "Sharing",
    "Shown",
    "StaticFluid",
    "SweepFailedError",
    "SweepInterrupted",
    "SweepResult",
    "Trial",
    "TrialFailedError",
    "TrialGroup",
    "TrialGroupHandle",
    "TrialListener",
    "TrialResult",
    "__version__",
    "get_checkpoint",
    "kept_checkpoints",
    "load",
    "report",
    "run",
    "shared",
    "submit_trialgroup",
    "trial_dir",
]


#: Packages that are loaded like names, as in ``fluid.search.uniform``.
_PACKAGES = ("search", "tune")


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"fluid.{name}")
    if name not in _HOME:
        raise importlib.import_module("fluid.user_calls").missing_name("fluid", name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__

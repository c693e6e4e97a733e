"""Callbacks of a sweep that may ask for a checkpoint when they are given a result.

A callback is given each result itself, and Tune then looks whether ``should_checkpoint`` is set in it. A trial that has
run ahead has no such checkpoint any more.
"""

from __future__ import annotations

from typing import Any

#: Packages whose callbacks only read results, and those in them that are examples of users' code.
_READERS, _EXAMPLES = ("ray.", "fluid."), (".examples.", ".tests.")

#: What callbacks are told of a checkpoint with, and where methods of these names do not read it. Those of
#: ``ray.air.integrations`` upload it.
_GIVEN_CHECKPOINTS = ("on_checkpoint", "on_trial_save", "log_trial_save")
_SILENT = ("ray.tune.", "fluid.")


def may_ask_for_checkpoints(controller: Any) -> bool:
    """Whether a callback of the sweep may do more with a result than to read it.

    Tune's own callbacks and the loggers, which are the users' subclasses of ``LoggerCallback`` that do not replace its
    ``on_trial_result``, only read.
    """
    return not all(map(_only_reads, controller._callbacks._callbacks))


def _only_reads(callback: Any) -> bool:
    # Through the object and not its class: the method may have been replaced on the object alone.
    module = str(getattr(callback.on_trial_result, "__module__", ""))
    return module.startswith(_READERS) and not any(part in module for part in _EXAMPLES)


def may_read_checkpoints(controller: Any) -> bool:
    """Whether a callback of the sweep may read the files of each checkpoint when Tune is given it."""
    return any(
        not str(getattr(getattr(callback, method, None), "__module__", None) or "ray.tune.").startswith(_SILENT)
        for callback in controller._callbacks._callbacks
        for method in _GIVEN_CHECKPOINTS
    )

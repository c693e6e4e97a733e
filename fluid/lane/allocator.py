"""How PyTorch's allocator takes memory from a lane's GPU."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any

#: Variables by which users configure the allocator; with one of them set, it stays as they have chosen.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: What PyTorch raises where it knows no such setting, or the driver refuses it.
_REFUSALS = (RuntimeError, ValueError, AttributeError, AssertionError)
_SETTING = "expandable_segments"


def expand_segments(torch: Any) -> None:
    """Lets the allocator's segments grow and shrink, so that it can return what tensors have freed.

    Otherwise a segment is kept as long as a single tensor is in it, and no other process can use the rest. Changes
    nothing if the user has configured the allocator, or if this PyTorch or the GPU's driver does not support it. By
    call rather than by variable: releases of PyTorch differ in the variables that they read, and warn about others.

    Args:
        torch: the module, before CUDA is used.
    """
    change = getattr(getattr(torch, "_C", None), "_accelerator_setAllocatorSettings", None)
    change = change or getattr(getattr(torch.cuda, "memory", None), "_set_allocator_settings", None)
    if change is None or any(name in os.environ for name in _VARIABLES):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change(f"{_SETTING}:True")
        torch.zeros(1, device="cuda:0")
    except _REFUSALS:  # As under WSL; or the GPU cannot be used at all.
        with suppress(*_REFUSALS):
            change(f"{_SETTING}:False")

"""Settings of a process: what one trial sets is in force while it runs, and no longer."""

from __future__ import annotations

import decimal
import gc
import logging
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fluid.lane.output import LaneStreams
from fluid.lane.process.settings import ProcessSettings
from fluid.lane.process.state import ProcessState
from fluid.lane.process.threads import LaneThreads
from fluid.trial_fields import TrialProcess


@pytest.fixture
def settings() -> Iterator[ProcessSettings]:
    made = ProcessSettings()
    yield made
    made.put_back()


def _handler(*_: object) -> None:
    raise TimeoutError("too long")


def set_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600.0)


def set_handler() -> None:
    signal.signal(signal.SIGALRM, _handler)


def lower_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1, hard))


def use_gc() -> None:
    (gc.disable if gc.isenabled() else gc.enable)()


def use_umask() -> None:
    os.umask(0o037)


def read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def add_log_file() -> None:
    logging.getLogger("a.logger.of.a.trial").addHandler(logging.NullHandler())
    logging.getLogger().addHandler(logging.NullHandler())


def log_handlers() -> Any:
    return len(logging.getLogger("a.logger.of.a.trial").handlers), len(logging.getLogger().handlers)


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "stdout": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "environment": (lambda: os.environ.update(FLUID_TRIED="1"), lambda: os.environ.get("FLUID_TRIED")),
    "removed variable": (lambda: os.environ.pop("HOME"), lambda: os.environ.get("HOME")),
    "path": (lambda: sys.path.append("/nowhere"), lambda: list(sys.path)),
    "warnings": (lambda: warnings.simplefilter("ignore"), lambda: warnings.filters[0]),
    "handler": (set_handler, lambda: signal.getsignal(signal.SIGALRM)),
    "timer": (
        lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 3600.0),  # The tests have an alarm of their own.
        lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0.0,
    ),
    "limit": (lower_limit, lambda: resource.getrlimit(resource.RLIMIT_CORE)),
    "umask": (use_umask, read_umask),
    "gc": (use_gc, gc.isenabled),
    "recursion": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "decimal": (lambda: setattr(decimal.getcontext(), "prec", 5), lambda: decimal.getcontext().prec),
    "errstate": (lambda: np.seterr(all="raise"), np.geterr),
    "disabled logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "level": (lambda: logging.getLogger("x.y").setLevel(7), lambda: logging.getLogger("x.y").level),
    "handlers": (add_log_file, log_handlers),
    "start method": (
        lambda: multiprocessing.set_start_method("spawn", force=True),
        lambda: multiprocessing.get_start_method(allow_none=True),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trial_sets_is_its_own(settings: ProcessSettings, name: str) -> None:
    change, look = CHANGES[name]
    before = look()
    change()
    changed = look()
    assert changed != before
    own = settings.take()
    assert settings.put()
    assert look() == before, "another trial does not see it"
    settings.take()
    settings.put(own)
    assert look() == changed, "the trial goes on with it"
    assert settings.put_back() == [] and look() == before


_ENTERED: list[Any] = []


def enter_inference(torch: Any) -> None:
    _ENTERED.append(torch.inference_mode())
    _ENTERED[-1].__enter__()


TORCH: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any]]] = {
    "dtype": (lambda torch: torch.set_default_dtype(torch.float64), lambda torch: torch.ones(1).dtype),
    "device": (lambda torch: torch.set_default_device("meta"), lambda torch: torch.ones(1).device.type),
    "gradients": (lambda torch: torch.set_grad_enabled(False), lambda torch: torch.is_grad_enabled()),
    "inference": (
        enter_inference,
        lambda torch: torch.ones(1, requires_grad=True).exp().is_inference(),
    ),
    "autocast": (
        lambda torch: torch.autocast("cpu", torch.bfloat16).__enter__(),
        lambda torch: torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype,
    ),
    "reduction": (
        lambda torch: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        lambda torch: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    "benchmark": (
        lambda torch: setattr(torch.backends.cudnn, "benchmark", True),
        lambda torch: torch.backends.cudnn.benchmark,
    ),
    "TF32": (
        lambda torch: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda torch: torch.backends.cuda.matmul.allow_tf32,
    ),
    "precision": (
        lambda torch: torch.set_float32_matmul_precision("medium"),
        lambda torch: torch.get_float32_matmul_precision(),
    ),
    "deterministic": (
        lambda torch: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda torch: torch.are_deterministic_algorithms_enabled(),
    ),
    "anomalies": (lambda torch: torch.autograd.set_detect_anomaly(True), lambda torch: torch.is_anomaly_enabled()),
    "attention": (
        lambda torch: torch.backends.cuda.enable_flash_sdp(False),
        lambda torch: torch.backends.cuda.flash_sdp_enabled(),
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_a_trial_sets_in_pytorch_is_its_own(name: str) -> None:
    torch = pytest.importorskip("torch")
    settings = ProcessSettings()
    change, look = TORCH[name]
    before = look(torch)
    try:
        change(torch)
        changed, own = look(torch), settings.take()
        assert changed != before
        settings.put()
        assert look(torch) == before
        settings.take()
        settings.put(own)
        assert look(torch) == changed
    finally:
        assert settings.put_back() == []
    assert look(torch) == before


def test_new_and_old_ways_to_set_a_precision_may_be_mixed() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has the old ways only")
    settings = ProcessSettings()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert settings.put_back() == []
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32


def test_blocks_that_two_trials_are_suspended_in_end_as_they_began() -> None:
    torch = pytest.importorskip("torch")
    settings = ProcessSettings()

    def evaluate() -> Iterator[bool]:
        with torch.inference_mode(), torch.autocast("cpu"):
            while True:
                yield torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")

    trials, own = [evaluate(), evaluate()], [None, None]
    for turn in (0, 1, 0, 1, 1, 0):
        settings.put(own[turn])
        assert next(trials[turn])
        own[turn] = settings.take()  # type: ignore[call-overload]
    for turn, trial in enumerate(trials):
        settings.put(own[turn])
        trial.close()
        assert settings.put_back() == []
        assert (
            torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
        )


def test_what_cannot_be_put_back_is_named(settings: ProcessSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    own = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "getpriority", lambda *_: own + 1)
    assert settings.put_back() == ["nice value"]
    monkeypatch.undo()
    assert settings.put_back() == []


def test_what_a_lane_adds_to_the_path_stays(settings: ProcessSettings) -> None:
    before = settings.take()
    sys.path.append("/a/trial's")
    own = settings.take()
    settings.add_paths(("/the/lane's",))
    settings.put(before)
    assert "/the/lane's" in sys.path and "/a/trial's" not in sys.path
    settings.take()
    settings.put(own)
    assert {"/the/lane's", "/a/trial's"} <= set(sys.path)
    settings.put_back()
    assert "/the/lane's" in sys.path
    sys.path.remove("/the/lane's")
    settings.rebase()


def test_open_log_files_of_a_trial_are_closed(settings: ProcessSettings, tmp_path: Any) -> None:
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger().addHandler(handler)
    assert settings.put_back() == []
    assert handler not in logging.getLogger().handlers and handler.stream is None


def test_a_trials_timer_stands_still_while_the_lane_waits(settings: ProcessSettings, tmp_path: Any) -> None:
    """Its handler would raise in the lane's own code."""
    output = LaneStreams(sys.__stdout__, sys.__stderr__)  # type: ignore[arg-type]
    state = ProcessState(str(tmp_path / "log"), str(tmp_path), settings, LaneThreads(1), TrialProcess())
    set_alarm()
    state.rest()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    state.wake()
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 3000.0
    state.rest()
    state.leave()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    state.enter(output)
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 3000.0
    assert state.give_back(output) == [] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

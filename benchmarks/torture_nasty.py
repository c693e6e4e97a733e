"""What trials of torture.py do to themselves, their process and their reports."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: A subprocess that would outlive its trial.
_SLEEPER = [sys.executable, "-SE", "-c", "import time; time.sleep(1000)"]


class OddError(Exception):
    """Cannot be pickled, and its text raises."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no text")


class BaseOddError(BaseException):
    """Is no Exception."""


class Unpickling:
    """A metric that raises when the driver unpickles it."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


class Speechless:
    """A metric without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def item(self) -> float:
        raise SystemExit(7)


def _raise(error: type[BaseException]) -> None:
    raise error("nasty")


def _raising(error: type[BaseException]) -> Callable[[Any], None]:
    return lambda config: _raise(error)


def _odd(config: Any) -> None:
    raise OddError


def _stop_iteration(config: Any) -> None:
    next(iter(()))


def _signal(number: signal.Signals) -> Callable[[Any], None]:
    def send(config: Any) -> None:
        signal.signal(number, signal.SIG_DFL) if number is not signal.SIGKILL else None
        os.kill(os.getpid(), number)
        time.sleep(0.2)

    return send


def _exit(config: Any) -> None:
    os._exit(3)


def _close_descriptors(config: Any) -> None:
    os.closerange(0, 256)


def _fork_returns(config: Any) -> None:
    os.fork()


def _fork_exits(config: Any) -> None:
    if os.fork() == 0:
        sys.exit(0)


def _daemon(config: Any) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(_SLEEPER[0], _SLEEPER)
        os._exit(0)


def _subprocesses(config: Any) -> None:
    subprocess.Popen(_SLEEPER)
    subprocess.Popen(_SLEEPER, start_new_session=True)


def _thread(config: Any) -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


def _kill_parent(config: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def _new_session(config: Any) -> None:
    os.setpgid(0, 0)


def _environment(config: Any) -> None:
    os.environ.clear()
    os.chdir("/")
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def _noise(config: Any) -> None:
    os.write(1, b"\xff\x00noise" * 20_000)
    print("\ud800".encode("utf-8", "surrogatepass"), "x" * 100_000)


def _segfault(config: Any) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(1)


def _hang(config: Any) -> None:
    while True:
        time.sleep(1.0)


class Executing:
    """Ends the process that unpickles it, or fails there."""

    def __init__(self, statement: str) -> None:
        self.statement = statement

    def __reduce__(self) -> Any:
        return exec, (self.statement,)


class Message:
    """An object that is sent as the lane sends its messages.

    Args:
        content: the object; bytes are sent as they are, in place of the data of an object.
    """

    def __init__(self, content: Any) -> None:
        self.content = content

    @property
    def body(self) -> bytes:
        """What is sent."""
        from fluid.wire import encode

        return self.content if isinstance(self.content, bytes) else encode(self.content)


def _of_strange_types() -> list[Any]:
    """A message that a lane sends, with values of other types."""
    from fluid.engine.events import TrialPaused

    return [TrialPaused("x", 7, "y", iteration="z", purpose=0)]  # type: ignore[arg-type]


#: What a trial's process may write on its connection by mistake: by a stale descriptor, or a library that prints to the
#: wrong one; lengths that never come; and whole messages that mean nothing.
GARBAGE: dict[str, Callable[[random.Random], bytes | Message]] = {
    "random": lambda draws: draws.randbytes(draws.randint(1, 5000)),
    "text": lambda draws: b"warning: a library writes to the wrong descriptor\n" * draws.randint(1, 50),
    "one_byte": lambda draws: b"\0",
    "two_bytes": lambda draws: b"\0\0",
    "zeros": lambda draws: bytes(draws.randint(1, 100_000)),
    "gigabyte": lambda draws: struct.pack("!i", 0x3FFFFFFF) + b"x" * 100,
    "exabytes": lambda draws: struct.pack("!iQ", -1, 1 << 62) + b"x" * 100,
    "negative": lambda draws: struct.pack("!i", -77) + b"x" * 100,
    "numbers": lambda draws: Message([1, 2, 3]),
    "texts": lambda draws: Message(["a", "b"]),
    "nothing": lambda draws: Message(None),
    "unknown_class": lambda draws: Message([{"what": "TrialVanished", "trial_id": "x"}]),
    "lists": lambda draws: Message(b"\x91" * draws.randint(1, 100_000)),
    "exit": lambda draws: Message(pickle.dumps([Executing("raise SystemExit(3)")])),
    "interrupt": lambda draws: Message(pickle.dumps([Executing("raise KeyboardInterrupt")])),
    "memory": lambda draws: Message(pickle.dumps([Executing("raise MemoryError")])),
    "strange_types": lambda draws: Message(_of_strange_types()),
}


def _garbage(config: Any) -> None:
    """Writes on the connections of the process what is no message of theirs."""
    draws = random.Random(f"{config['seed']}/{sorted(config['nasty'])}")
    made = GARBAGE[draws.choice(sorted(GARBAGE))](draws)
    if isinstance(made, Message):
        _channel()._connection.send_bytes(made.body)
        return
    for descriptor in range(256):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, made)


def _channel() -> Any:
    """The channel of this lane, which a trial has no business with."""
    from fluid.lane.channel import Channel

    return next(one for one in gc.get_objects() if isinstance(one, Channel))


def _recursion(config: Any) -> None:
    _recursion(config)


#: What a trial may do to itself, by kind. Kinds that begin with "metric_" return what is added to its metrics.
NASTY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "system_exit": _raising(SystemExit),
    "keyboard_interrupt": _raising(KeyboardInterrupt),
    "generator_exit": _raising(GeneratorExit),
    "value_error": _raising(ValueError),
    "memory_error": _raising(MemoryError),
    "base_exception": _raising(BaseOddError),
    "unpicklable_error": _odd,
    "stop_iteration": _stop_iteration,
    "recursion": _recursion,
    "exit": _exit,
    "abort": _signal(signal.SIGABRT),
    "segfault": _segfault,
    "own_term": _signal(signal.SIGTERM),
    "own_kill": _signal(signal.SIGKILL),
    "close_descriptors": _close_descriptors,
    "fork_returns": _fork_returns,
    "fork_exits": _fork_exits,
    "daemon": _daemon,
    "subprocesses": _subprocesses,
    "thread": _thread,
    "kill_parent": _kill_parent,
    "process_group": _new_session,
    "environment": _environment,
    "noise": _noise,
    "garbage": _garbage,
    "metric_keys": lambda config: {(0, 1): 5, None: {3: 0.9}, "set": {1, 2}},
    "metric_speechless": lambda config: {"odd": Speechless()},
    "metric_unpickling": lambda config: {"odd": Unpickling(ValueError)},
    "metric_unpickling_exit": lambda config: {"odd": Unpickling(SystemExit)},
    "metric_lambda": lambda config: {"odd": lambda: None, "lock": threading.Lock()},
    "metric_cycle": lambda config: {"odd": _cycle()},
    "metric_large": lambda config: {"odd": "x" * 300_000, "nan": float("nan"), "huge": 10**400, "bytes": b"\xff"},
}
#: Those that end only if the trial has a limit on its iterations.
HANGS: dict[str, Callable[[dict[str, Any]], Any]] = {"hang": _hang, "own_stop": _signal(signal.SIGSTOP)}
NASTY |= HANGS
#: How often a kind is drawn, if not once.
WEIGHTS = {"garbage": 12}


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def spoil(metrics: dict[str, Any], answer: Any) -> dict[str, Any]:
    """Adds a fault's answer to an iteration's metrics."""
    return {**metrics, **answer} if isinstance(answer, dict) else metrics

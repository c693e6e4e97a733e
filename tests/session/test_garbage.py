"""A trial's process writes on its connection to the driver what is no message: its lane ends, and nothing else does."""

from __future__ import annotations

import math
import os
import pickle
import random
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest
from msgspec import structs

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.engine.events import (
    Checkpoint,
    DeviceLost,
    IterationDone,
    LaneReady,
    PausePurpose,
    StopRequested,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.lane.protocol import CheckpointMoved, CleanUpBegun, LaneLogged
from fluid.processes.frames import framed
from fluid.trainables.encoded_metrics import encode_metrics
from fluid.wire import encode

pytestmark = pytest.mark.slow

#: Seconds that garbage may take to be noticed while the trial goes on, on a machine that is busy with other tests.
_SOON_S = 20.0


#: Stands for the number of the lane that writes, of which as many bytes are written for any.
LANE = 0x7F0F1F2F


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


def frame(body: Any) -> bytes:
    return raw(encode(body))


def raw(body: bytes) -> bytes:
    return b"".join(framed(body))


def pickled(*body: Any) -> bytes:
    return raw(pickle.dumps(list(body)))


def older(body: bytes) -> bytes:
    """A frame as of ``multiprocessing.connection``."""
    return struct.pack("!i", len(body)) + body


def iterated(bad: str, number: int, **fields: Any) -> bytes:
    done = IterationDone(
        time.monotonic(), bad, LANE, iteration=number, seconds=0.1, metrics=encode_metrics({"i": number})
    )
    return frame([structs.replace(done, **fields)])


def paused(at: float, trial_id: str, lane_id: int = LANE) -> bytes:
    return frame([TrialPaused(at, trial_id, lane_id, iteration=3, purpose=PausePurpose.PREEMPT)])


def deep() -> bytes:
    """A message with a field that no class has, of lists within lists."""
    names = encode(["what", "CleanUpBegun", "trial_id", "x", "more"])[1:]
    return raw(b"\x91\x83" + names + b"\x91" * (1 << 14))


#: What is written, made as it is written: times are of that moment.
FOREIGN: dict[str, Callable[[str], bytes]] = {
    "noise": lambda bad: b"\1" + random.Random(0).randbytes(500),
    "text": lambda bad: b"hello world, this is a C library that writes to the wrong descriptor\n" * 3,
    "two bytes": lambda bad: b"\0\0",
    "one byte": lambda bad: b"\0",
    "a length of 1 GiB": lambda bad: struct.pack("!i", 0x3FFFFFFF) + b"x" * 100,
    "a length of 2**62": lambda bad: struct.pack("!i", -1) + struct.pack("!Q", 1 << 62) + b"y" * 100,
    "a negative length": lambda bad: struct.pack("!i", -77) + b"z" * 100,
    "an older frame": lambda bad: older(pickle.dumps([1])),
    "an empty older frame": lambda bad: older(b""),
    "the head of a frame": lambda bad: frame([])[:24],
    "half a frame": lambda bad: frame(["x" * 1000])[:500],
    "the head of a frame of 1 GiB": lambda bad: _head(1 << 30) + b"x" * 100,
    "text within a frame": lambda bad: frame(["x" * 1000])[:500] + b"hello" + frame(["x" * 1000])[500:],
    "an empty frame": lambda bad: raw(b""),
    "no data": lambda bad: raw(b"hello"),
    "half of the data": lambda bad: raw(encode(["x" * 1000])[:500]),
    "text that is none": lambda bad: raw(encode([CleanUpBegun("xxxx")]).replace(b"xxxx", b"\xff\xfe\xfd\xfc")),
    "lists within lists": lambda bad: deep(),
    "ints": lambda bad: frame([1, 2, 3]),
    "texts": lambda bad: frame(["a"]),
    "none": lambda bad: frame(None),
    "no list": lambda bad: frame(5),
    "a pickle": lambda bad: pickled(("TrialReleased", time.monotonic(), bad)),
    "SystemExit": lambda bad: pickled(Runs("raise SystemExit(3)")),
    "KeyboardInterrupt": lambda bad: pickled(Runs("raise KeyboardInterrupt")),
    "MemoryError": lambda bad: pickled(Runs("raise MemoryError")),
    "a message to lanes": lambda bad: frame([to.shut_down()]),
    "a report of hosts": lambda bad: frame([CheckpointMoved("/x", True, "localhost")]),
    "what lanes may not tell": lambda bad: frame([DeviceLost(time.monotonic(), 0)]),
    "what the submitter says": lambda bad: frame([StopRequested(time.monotonic(), bad)]),
    "of an unknown class": lambda bad: frame([{"what": "TrialVanished", "trial_id": bad}]),
    "of no class": lambda bad: frame([{"at": time.monotonic(), "trial_id": bad, "lane_id": LANE}]),
    "a missing field": lambda bad: frame([{"what": "TrialReleased", "at": time.monotonic(), "trial_id": bad}]),
    "of another lane": lambda bad: frame([TrialReleased(time.monotonic(), bad, 1 << 20)]),
    "of no lane": lambda bad: frame([TrialSaved(time.monotonic(), bad, None, Checkpoint(2, "/x"))]),
    "a pause of another lane": lambda bad: paused(time.monotonic(), bad, 1 << 20),
    "wrong types": lambda bad: frame([TrialPaused("x", 7, LANE, iteration="y", purpose=False)]),  # type: ignore[arg-type]
    "a wrong type within": lambda bad: frame([LaneLogged((5,), "many")]),  # type: ignore[arg-type]
    "NaN": lambda bad: paused(math.nan, bad),
    "infinity": lambda bad: paused(math.inf, bad),
    "a skipped iteration": lambda bad: iterated(bad, 9),
    "an earlier iteration": lambda bad: iterated(bad, 1),
    "an iteration at no time": lambda bad: iterated(bad, 3, at=math.nan),
    "metrics of a wrong type": lambda bad: iterated(bad, 3, metrics={"i": 3}),
}
#: What is a message, and does no harm.
HARMLESS: dict[str, Callable[[str], bytes]] = {
    "an unknown trial": lambda bad: paused(time.monotonic(), "nobody"),
    "another lane's trial": lambda bad: frame([TrialReleased(time.monotonic(), f"good{bad[3:]}a", LANE)]),
    "the future": lambda bad: paused(time.monotonic() + 1e6, bad),
    "warm again": lambda bad: frame([LaneReady(time.monotonic(), LANE, 0.0, 0.0)]),
    "started again": lambda bad: frame([TrialStarted(time.monotonic(), bad, LANE, iteration=0, seconds=0.0)]),
}


def _head(length: int) -> bytes:
    return struct.pack("!8sQQ", frame([])[:8], length, (1 << 64) - 1 - length)


class Good:
    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.iteration = config, 0

    def step(self) -> dict[str, Any]:
        time.sleep(0.01)
        self.iteration += 1
        return {"i": self.iteration}

    def save_checkpoint(self, path: str) -> None:
        Path(path, "i").write_text(str(self.iteration))

    def load_checkpoint(self, path: str) -> None:
        self.iteration = int(Path(path, "i").read_text())


class Bad(Good):
    """Writes on its lane's connection in iteration 3, the first time that it comes there."""

    def step(self) -> dict[str, Any]:
        if self.iteration == 2 and not Path(self.config["flag"]).exists():
            Path(self.config["flag"]).touch()
            lane = int(Path("/proc/self/comm").read_text().removeprefix("fluid-lane-"))
            data = Path(self.config["data"]).read_bytes().replace(struct.pack("!I", LANE), struct.pack("!I", lane))
            for name in os.listdir("/proc/self/fd"):
                try:
                    if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        os.write(int(name), data)
                except OSError:
                    pass
            time.sleep(self.config["rest"])
        return super().step()


class Session:
    """A session, the same for all kinds: none of them may end it."""

    def __init__(self, folder: Path) -> None:
        self.executor = FluidExecutor(backend="local", devices=2, verbose=0, run_dir=folder / "run")
        self._folder = folder
        self._groups = 0

    @property
    def bad(self) -> str:
        """The id of the next trial that writes something."""
        return f"bad{self._groups + 1}"

    def run(self, data: bytes, rest: float = 0.0) -> float:
        """Runs a trial that writes that, beside two others; returns seconds."""
        bad = self.bad
        self._groups += 1
        folder = self._folder / str(self._groups)
        folder.mkdir()
        (folder / "data").write_bytes(data)
        config = {"flag": str(folder / "flag"), "data": str(folder / "data"), "rest": rest}
        begun = time.monotonic()
        budgets = {f"good{self._groups}a": 40, f"good{self._groups}b": 40, bad: 6}
        groups = []
        for trial_id, budget in budgets.items():
            trial = Trial(Bad if trial_id == bad else Good, config, budget=budget, trial_id=trial_id)
            groups.append(self.executor.submit_trialgroup(TrialGroup([trial], name=trial_id)))
        for group, length in zip(groups, budgets.values(), strict=True):
            assert group.wait(60.0), "it ends, and is not waited for for ever"
            assert {str(state) for state in group.states.values()} == {"DONE"}
            assert [result.metrics["i"] for result in group.results()] == list(range(1, length + 1))
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    made = Session(tmp_path_factory.mktemp("garbage"))
    with made.executor:
        yield made
        assert made.executor.status().at < 1000.0, "no time of a lane's message goes on ahead of the clock"


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "failed and is tried again" in record.getMessage()]


@pytest.mark.parametrize("kind", FOREIGN)
def test_garbage_ends_only_the_lane_that_it_comes_from(
    session: Session, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert session.run(FOREIGN[kind](session.bad)) < _SOON_S
    (failed,) = failures(caplog)
    assert "sent what cannot be read" in failed or "has reported what cannot be" in failed


@pytest.mark.parametrize("kind", HARMLESS)
def test_a_message_that_says_nothing_of_use_ends_nothing(
    session: Session, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    session.run(HARMLESS[kind](session.bad))
    assert not failures(caplog)


def test_what_is_pickled_is_not_unpickled(session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session.run(pickled(Runs(f"import os; os.mkdir({str(tmp_path / 'created')!r})")))
    assert len(failures(caplog)) == 1
    assert not (tmp_path / "created").exists()


def test_the_head_of_a_frame_is_noticed_while_its_lane_says_nothing(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = session.run(_head(1 << 30) + b"x" * 100, rest=120.0)
    (failed,) = failures(caplog)
    assert "a message was not finished" in failed
    assert 10.0 <= seconds < 10.0 + _SOON_S

"""Members that die in the middle of an iteration: the others go on, and nothing that was finished is lost."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.quick import QuickRun  # noqa: E402
from elastic.trainables import Dying, Regression  # noqa: E402

from fluid.errors import FluidError  # noqa: E402
from fluid.processes.frames import framed  # noqa: E402

pytestmark = pytest.mark.slow

BACKENDS = ["torch", "gloo", pytest.param("horovod", marks=pytest.mark.horovod)]
CONFIG = {"optimizer": "adamw"}


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The losses of a run in which no member dies."""
    made = Regression()
    made.setup(CONFIG)
    return [made.step()["loss"] for _ in range(4)]


def losses(results: list[Any]) -> list[float]:
    assert all(len(set(result.metrics["sums"])) == 1 for result in results)
    return [result.metrics["loss"] for result in results]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_death_in_the_middle_of_an_iteration(
    rank: int, width: int, backend: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    # After two of the five steps of the third iteration have been taken.
    config = {**CONFIG, "die": {"rank": rank, "batch": 2 * 5 + 2}, "once": str(tmp_path / "died")}
    with QuickRun(Dying, config, width, backend=backend) as run:
        results = run.run(4)
        assert run.width == width - 1
    assert (tmp_path / "died").exists()
    assert [result.iteration for result in results] == [1, 2, 3, 4]
    assert [result.width for result in results] == [width, width, width - 1, width - 1]
    assert losses(results) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
@pytest.mark.parametrize("rank", [0, 1])
def test_death_on_one_of_two_machines(rank: int, backend: str, tmp_path: Path, undisturbed: list[float]) -> None:
    config = {**CONFIG, "die": {"rank": rank, "batch": 2 * 5 + 2}, "once": str(tmp_path / "died")}
    with QuickRun(Dying, config, 1, backend=backend, addresses=("127.0.0.1", "127.0.0.3")) as run:
        results = run.run(1)
        run.resize(2)
        results += run.run(2)
        assert run.width == 1 and (tmp_path / "died").exists()
        run.resize(2)
        results += run.run(1)
    assert [(result.iteration, result.width) for result in results] == [(1, 1), (2, 2), (3, 1), (4, 2)]
    assert losses(results) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("width", [4, 5])
def test_death_of_one_that_is_not_everybodys_neighbour(width: int, tmp_path: Path, undisturbed: list[float]) -> None:
    config = {**CONFIG, "die": {"rank": 2, "batch": 8}, "once": str(tmp_path / "died")}
    with QuickRun(Dying, config, width) as run:
        assert losses(run.run(4)) == pytest.approx(undisturbed, rel=1e-5)
        assert run.width == width - 1


@pytest.mark.parametrize("rank", [0, 1])
def test_death_between_iterations_and_a_newcomer_for_it(rank: int, undisturbed: list[float]) -> None:
    with QuickRun(Regression, CONFIG, 2) as run:
        results = run.run(2)
        os.kill(run.pids[rank], signal.SIGKILL)
        results += run.run(1)
        run.resize(2)
        results += run.run(1)
        assert [result.width for result in results] == [2, 2, 1, 2]
    assert [result.iteration for result in results] == [1, 2, 3, 4]
    assert losses(results) == pytest.approx(undisturbed, rel=1e-5)


def test_death_of_a_newcomer_while_it_takes_over_the_state(tmp_path: Path, undisturbed: list[float]) -> None:
    config = {**CONFIG, "die": {"loading": True}, "once": str(tmp_path / "died")}
    with QuickRun(Dying, config, 1) as run:
        results = run.run(2)
        run.resize(2)
        results += run.run(2)
        assert run.width == 1
    assert (tmp_path / "died").exists()
    assert losses(results) == pytest.approx(undisturbed, rel=1e-5)


def test_a_member_that_hangs_is_killed_from_outside(tmp_path: Path, undisturbed: list[float]) -> None:
    config = {**CONFIG, "die": {"rank": 0, "batch": 7, "signal": int(signal.SIGSTOP)}, "once": str(tmp_path / "hung")}
    with QuickRun(Dying, config, 3) as run:
        # As an operator would: the waiting members have not been told that rank 0 will not come back.
        watcher = os.fork()
        if watcher == 0:
            while not (tmp_path / "hung").exists():
                os.sched_yield()
            os.kill(run.pids[0], signal.SIGKILL)
            os._exit(0)
        assert losses(run.run(4)) == pytest.approx(undisturbed, rel=1e-5)
        os.waitpid(watcher, 0)
        assert run.width == 2


def test_death_of_all() -> None:
    with QuickRun(Regression, CONFIG, 2) as run:
        run.run(1)
        for pid in run.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(FluidError, match="no process with the"):
            run.run(1)


def test_the_processes_end_with_their_driver(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, os, signal; sys.path.insert(0, sys.argv[1])\n"
        "from elastic.trainables import Regression\nfrom fluid.elastic import ElasticRun\n"
        "run = ElasticRun(Regression, {}, 2)\nprint(*run.pids, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, tests]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    # The pipe ends when the last process that has inherited it has ended.
    output, _ = process.communicate(timeout=90)
    assert len(output.split()) == 2


class Babbling(Regression):
    """Writes on its process's connection to the controller once, after an iteration."""

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config
        super().setup({**CONFIG})

    def step(self) -> dict[str, Any]:
        result = super().step()
        if not Path(self._config["once"]).exists():
            Path(self._config["once"]).touch()
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family == socket.AF_UNIX:
                        found.send(self._config["data"])
        return result


@pytest.mark.parametrize(
    "data",
    [
        b"hello world\n",
        b"".join(framed(b"no pickle")),
        b"".join(framed(pickle.dumps([1, 2]))),
        framed(bytes(99))[0][:80],
    ],
    ids=["text", "no pickle", "no message", "half a frame"],
)
def test_a_member_that_writes_what_is_no_message_is_lost_alone(data: bytes, tmp_path: Path) -> None:
    config = {"once": str(tmp_path / "once"), "data": data}
    lost = pytest.raises(FluidError, match="no process with the trial's state is left")
    with QuickRun(Babbling, config, 1) as run, lost:
        run.run(3)

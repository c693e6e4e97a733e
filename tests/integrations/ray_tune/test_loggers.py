"""Tune's loggers in a process of their own write the same files as in the driver, and report errors as there."""

from __future__ import annotations

import csv
import json
import logging
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import eventually

pytest.importorskip("ray")
pytest.importorskip("tensorboardX")
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback, TBXLoggerCallback
from tune_sweeps import TIMES, Climber

from fluid import FluidExecutor, tune
from fluid.integrations.ray_tune.logs import logger_process, loggers
from fluid.integrations.ray_tune.logs.log_records import LoggedResult, ShownValue
from fluid.integrations.ray_tune.logs.loggers import LoggerConnection, LoggersLostError, loggers_apart
from fluid.processes.frames import framed

pytestmark = pytest.mark.ray


class Choice:
    """A value that only the driver can unpickle."""

    def __reduce__(self) -> Any:
        return _unpickle, (os.getpid(),)

    def __repr__(self) -> str:
        return "Choice()"


def _unpickle(process: int) -> Choice:
    assert os.getpid() == process, "another process unpickles it"
    return Choice()


class Optimizer(str, Enum):
    SGD = "sgd"


class Depth(IntEnum):
    DEEP = 3


class Rate(float):
    """A number with a unit."""


#: Hyperparameters of classes derived from text and numbers.
ENUMS = {"optimizer": Optimizer.SGD, "depth": Depth.DEEP, "rate": Rate(0.5)}
#: What NumPy has beside arrays and numbers.
NUMPY = {"fit": np.poly1d([1.0, 2.0]), "function": np.tanh, "indices": np.ndindex(2), "type": np.float32}


class Additions(tune.Callback):  # type: ignore[misc]
    """Puts values of all kinds into the results, and keeps changing one that the loggers have been given."""

    def __init__(self) -> None:
        self.list = [0.0]

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.list[0] += 1.0
        count = result["training_iteration"]
        result.update(values=self.list, nested={"loss": np.float32(count), "deep": {"flag": np.bool_(True)}})
        result.update(missing=float("nan"), image=np.full((3, 4, 4), count, np.uint8), text="%s", none=None)
        result.update(choice=Choice(), shapes=(1, Choice()), array=np.arange(count))
        result.update(fit=NUMPY["fit"], type=np.float32, optimizer=Optimizer.SGD, depth=Depth.DEEP)


def records(folder: Path) -> list[tuple[Any, ...]]:
    """What TensorBoard's file of a trial says: tags, steps and values."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            if value.tag.rpartition("/")[2] not in TIMES | {"process"} and "session" not in value.tag:
                value.metadata.Clear()
                found.append((value.tag, event.step, value.SerializeToString()))
    return found


def files(path: str) -> dict[str, Any]:
    """The content of the trials' files, without times and places."""
    content = {}
    for folder in sorted(Path(path).iterdir()):
        if not (folder / "result.json").exists():
            continue
        results = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        table = [line.split(",") for line in (folder / "progress.csv").read_text().splitlines()]
        content[folder.name.partition("_")[2].split("_", 1)[1].rsplit("_", 2)[0]] = {
            "result.json": [
                [(key, value) for key, value in one.items() if key not in TIMES | {"process"}] for one in results
            ],
            "progress.csv": [len(table), table[0]],
            "params.json": (folder / "params.json").read_text(),
            "params.pkl": (folder / "params.pkl").read_bytes(),
            "tensorboard": records(folder),
        }
    return content


def sweep(executor: FluidExecutor, **options: Any) -> Any:
    """A sweep whose first trial fails once and is tried again from its checkpoint."""
    choices = {name: tune.choice([value]) for name, value in ENUMS.items()}
    return tune.run(
        Climber,
        config={"x": tune.grid_search([1.0, 2.0, 3.0]), "ends_at": 4, "shape": (1, 2), "kind": "a", **choices},
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2),
        callbacks=[Additions()],
        max_concurrent_trials=1,
        verbose=0,
        executor=executor,
        **options,
    )


@pytest.mark.slow
def test_the_files_are_the_same(executor: FluidExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = []
    for where in ("driver", "apart"):
        monkeypatch.setenv(loggers.LOGGERS_VARIABLE, where)
        analysis = sweep(executor, storage_path=str(tmp_path), name=where)
        assert len(analysis.trials) == 3
        content.append(files(analysis.experiment_path))
    assert len(content[0]) == 3
    assert content[0] == content[1]


@pytest.mark.slow
def test_a_paused_trial_goes_on_in_its_files(
    executor: FluidExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = []
    for where in ("driver", "apart"):
        monkeypatch.setenv(loggers.LOGGERS_VARIABLE, where)
        analysis = tune.run(
            Climber,
            config={"x": tune.grid_search([1.0, 2.0, 3.0, 4.0])},
            scheduler=tune.SuccessiveHalvingScheduler("score", "max", max_t=4, reduction_factor=2),
            storage_path=str(tmp_path),
            name=where,
            verbose=0,
            executor=executor,
        )
        folders = {trial.config["x"]: Path(trial.path) for trial in analysis.trials}
        content.append(
            {
                x: [json.loads(line)["score"] for line in (folder / "result.json").read_text().splitlines()]
                for x, folder in folders.items()
            }
        )
    assert content[0] == content[1] == {1.0: [1.0], 2.0: [2.0], 3.0: [3.0, 6.0], 4.0: [4.0, 8.0, 12.0, 16.0]}


@pytest.mark.slow
def test_which_callbacks_tune_is_given(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(CSVLoggerCallback):  # type: ignore[misc]
        pass

    def names(callbacks: list[Any] | None) -> list[str]:
        with loggers_apart(executor, callbacks) as wanted:
            return [type(callback).__name__ for callback in wanted or ()]

    apart = ["CSVLoggerApart", "JsonLoggerApart", "TBXLoggerApart"]
    assert names(None) == apart
    assert names([Additions()]) == ["Additions", *apart]
    assert names([JsonLoggerCallback(), Additions()]) == ["JsonLoggerApart", "Additions", apart[0], apart[2]]
    assert names([Own()]) == ["Own", *apart[1:]]
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    assert names([TBXLoggerCallback()]) == ["TBXLoggerApart"]
    assert names([Additions()]) == ["Additions"]
    monkeypatch.delenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS")
    monkeypatch.setenv(loggers.LOGGERS_VARIABLE, "driver")
    assert names(None) == []


def test_pickled_they_are_tunes_own() -> None:
    for own, (_, apart) in loggers._APART.items():
        assert type(pickle.loads(pickle.dumps(apart()))) is own


def test_a_callback_between_two_loggers_may_change_the_result(executor: FluidExecutor, tmp_path: Path) -> None:
    callbacks = [JsonLoggerCallback(), Additions(), CSVLoggerCallback()]
    analysis = tune.run(
        Climber,
        config={"x": 1.0, "ends_at": 1},
        callbacks=callbacks,
        storage_path=str(tmp_path),
        verbose=0,
        executor=executor,
    )
    (folder,) = (path.parent for path in Path(analysis.experiment_path).glob("*/result.json"))
    assert "choice" not in (folder / "result.json").read_text()
    assert "choice" in (folder / "progress.csv").read_text()
    assert [type(callback).__name__ for callback in callbacks] == [
        "JsonLoggerCallback",
        "Additions",
        "CSVLoggerCallback",
    ]


def test_a_result_is_sent_as_it_is_at_that_moment() -> None:
    config = {"x": 1.0}
    result = {"a": [1], "config": config, "z": 2}
    sent = LoggedResult.of(result, config)
    result["a"].append(2)  # type: ignore[attr-defined]
    assert sent.shown is None and sent.has_own_config
    read = sent.unpickle(SimpleNamespace(config={"x": 1.0}))  # type: ignore[arg-type]
    assert read == {"a": [1], "config": config, "z": 2} and list(read) == list(result)
    assert not LoggedResult.of({"config": {"x": 1.0}}, config).has_own_config


@pytest.mark.parametrize("value", NUMPY.values(), ids=NUMPY.keys())
def test_what_numpy_has_beside_arrays_is_shown(value: Any) -> None:
    shown = LoggedResult.of({"loss": 1.0, "value": value}, None)._replace(pickled=None).unpickle(None)  # type: ignore[arg-type]
    assert shown["loss"] == 1.0 and (str(shown["value"]), repr(shown["value"])) == (str(value), repr(value))


class Mute:
    """Can be neither shown nor pickled."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __reduce__ = __str__ = __repr__


def test_any_result_can_be_sent() -> None:
    circle: list[Any] = []
    circle.append(circle)
    shown = LoggedResult.of({"circle": circle, "mute": Mute(), "loss": 1.0}, None).unpickle(None)  # type: ignore[arg-type]
    assert shown["loss"] == 1.0 and str(shown["circle"]) == "[[...]]" and "Mute object" in str(shown["mute"])


def test_values_that_cannot_be_pickled_are_shown() -> None:
    lock = threading.Lock()
    sent = LoggedResult.of({"lock": lock, "list": [lock], 7: 1}, None)
    assert sent.pickled is None
    read = sent.unpickle(SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(read["lock"], ShownValue) and str(read["lock"]) == str(lock) and str(read["list"]) == str([lock])


@pytest.fixture
def process() -> Iterator[Callable[[list[Any]], LoggerConnection]]:
    """Connects to the program of the loggers, in a thread of this process, with loggers of the test."""
    threads = []

    def connect(made: list[Any]) -> LoggerConnection:
        ours, theirs = socket.socketpair()
        channel = logger_process._DriverConnection(theirs)
        run = logger_process._FileLoggers(channel)
        run._loggers = made

        def serve() -> None:
            assert channel.next() == ("test",)
            while (record := channel.next()) is not None:
                with run.reporting():
                    run.handle(record)
            theirs.close()

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        connected.append(LoggerConnection(ours, ["test"]))
        return connected[-1]

    connected: list[LoggerConnection] = []
    yield connect
    for connection in connected:
        connection.close()
    for thread in threads:
        thread.join()


def a_trial(folder: Path) -> Any:
    return SimpleNamespace(
        trial_id="a",
        config={"x": 1},
        local_path=str(folder),
        evaluated_params={},
        checkpoint=None,
        init_local_path=lambda: None,
    )


class Raising(LoggerCallback):  # type: ignore[misc]
    """Raises at one result, and counts the results."""

    def __init__(self, error: Exception = OSError("loss -1.0")) -> None:  # noqa: B008
        self.iterations: list[int] = []
        self.error = error

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.iterations.append(iteration)
        if result["loss"] < 0:
            raise self.error


def test_an_error_of_a_logger_is_raised_in_the_driver(
    process: Callable[[list[Any]], LoggerConnection], tmp_path: Path
) -> None:
    logger, trial = Raising(), a_trial(tmp_path)
    connection = process([logger])
    connection.start((0,), trial)
    connection.write((0,), trial, 1, {"loss": 1.0})
    connection.write((0,), trial, 2, {"loss": -1.0})
    connection.flush()
    with pytest.raises(OSError, match=r"loss -1.0") as caught:
        connection.write((0,), trial, 3, {"loss": 1.0})
    assert "log_trial_result" in str(caught.value.__cause__)
    connection.write((0,), trial, 4, {"loss": 1.0})
    connection.end((0,), trial, failed=False)
    connection.flush()
    assert logger.iterations == [1, 2, 3, 4]


def test_a_value_that_a_logger_cannot_hold_is_left_out(
    process: Callable[[list[Any]], LoggerConnection], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, trial = Raising(ValueError("x" * 20_000)), Raising(), a_trial(tmp_path)
    second.error = OverflowError("too much")
    connection = process([first, second])
    for iteration, loss in enumerate([1.0, -1.0, -1.0, 1.0], 1):
        connection.write((0, 1), trial, iteration, {"loss": loss})
    connection.end((0, 1), trial, failed=False)
    connection.flush()
    connection.raise_failure()
    assert first.iterations == second.iterations == [1, 2, 3, 4]
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 2 and max(map(len, told)) < 700


def test_text_that_no_file_holds_is_escaped(tmp_path: Path) -> None:
    result = {"loss": 1.0, "path": "\udce9.csv", "m\ud800": 2}
    sent = LoggedResult.of(result, None)
    read = sent.unpickle(SimpleNamespace(config={}))  # type: ignore[arg-type]
    assert read == {"loss": 1.0, "path": r"\udce9.csv", r"m\ud800": 2}


def test_more_records_than_the_connection_holds(
    process: Callable[[list[Any]], LoggerConnection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger_process, "_MOST_WAITING", 3)
    logger, trial = Raising(), a_trial(tmp_path)
    connection = process([logger])
    for iteration in range(100):
        connection.write((0,), trial, iteration, {"loss": 1.0, "data": "x" * 100_000})
    connection.flush()
    assert logger.iterations == list(range(100))


@pytest.mark.usefixtures("many_descriptors")
def test_records_where_the_driver_has_more_files_open_than_select_takes(
    process: Callable[[list[Any]], LoggerConnection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger_process, "_MOST_WAITING", 3)
    logger, trial = Raising(), a_trial(tmp_path)
    connection = process([logger])
    for iteration in range(20):
        connection.write((0,), trial, iteration, {"loss": 1.0, "data": "x" * 100_000})
    connection.flush()
    assert logger.iterations == list(range(20))


def test_what_loggers_log_is_logged_in_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    connection = LoggerConnection(ours, [])
    channel = logger_process._DriverConnection(theirs)
    assert channel.next() == ()
    record = logging.LogRecord("tensorboardX", logging.WARNING, "", 0, "100%% of %s", ("it",), None)
    logger_process._ToDriver(channel).emit(record)
    channel.send(logger_process.LogFlush())
    with caplog.at_level(logging.WARNING):
        connection.flush()
    assert [(line.name, line.getMessage()) for line in caplog.records] == [("tensorboardX", "100% of it")]
    connection.close()
    theirs.close()


@pytest.mark.parametrize("data", [b"hello world, from a C library", b"".join(framed(b"no pickle"))])
def test_what_is_no_record_ends_the_connection(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    connection = LoggerConnection(ours, [])  # As no process can take the place of this one, that is told.
    theirs.send(data)
    with pytest.raises(LoggersLostError):
        connection.flush()
    channel = logger_process._DriverConnection(theirs)
    assert channel.next() == ()
    theirs.close()


def has_ended(process: int) -> bool:
    """Whether a process has ended, and with that has closed its connections."""
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


class Killer(tune.Callback):  # type: ignore[misc]
    """Kills the process of the loggers at some results."""

    def __init__(self, backend: Any, iterations: set[int]) -> None:
        self._backend, self._iterations = backend, iterations

    def on_trial_result(self, result: dict[str, Any], **_: Any) -> None:
        if result["training_iteration"] in self._iterations:
            patience = time.monotonic() + 20.0  # Once Fluid has given the loggers up, it starts no further process.
            eventually(lambda: self._find() is not None or time.monotonic() > patience)
            process = self._find()
            if process is not None:
                os.kill(process, signal.SIGKILL)
                eventually(lambda: has_ended(process))

    def _find(self) -> int | None:
        for child in self._backend._host._server.lane_processes():
            with suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text().strip() == "fluid-loggers" and not has_ended(child):
                    return child
        return None


def sweep_with_killer(iterations: set[int], folder: Path) -> Any:
    with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        backend = executor.session.backend
        return tune.run(
            Climber,
            config={"x": 1.0, "ends_at": 50},
            callbacks=[Killer(backend, iterations)],
            storage_path=str(folder),
            verbose=0,
            executor=executor,
        )


@pytest.mark.slow
def test_another_process_goes_on_where_one_dies(cluster: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (trial,) = sweep_with_killer({5, 30}, tmp_path).trials
    assert trial.last_result["training_iteration"] == 50
    lost = [line for line in caplog.records if "records are lost" in line.getMessage()]
    assert len(lost) == 2
    lines = Path(trial.local_path, "result.json").read_text().splitlines()
    written = [json.loads(line)["training_iteration"] for line in lines]
    assert written == sorted(set(written)) and written[-1] == 50
    assert len(written) >= 50 - sum(line.args[0] for line in lost if isinstance(line.args, tuple))
    with Path(trial.local_path, "progress.csv").open() as file:
        assert [int(row["training_iteration"]) for row in csv.DictReader(file)][-1] == 50


@pytest.mark.slow
def test_a_process_that_keeps_dying_ends_the_sweep(cluster: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        sweep_with_killer(set(range(5, 50, 5)), tmp_path)
    assert LoggersLostError.__name__ in str(caught.value) or isinstance(caught.value, LoggersLostError)


@pytest.mark.slow
def test_torn_lines_are_cut(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"a": 1}\n{"a"')
    (tmp_path / "progress.csv").write_text("a\n1\n")
    loggers._cut_torn_lines(str(tmp_path))
    assert (tmp_path / "result.json").read_text() == '{"a": 1}\n'
    assert (tmp_path / "progress.csv").read_text() == "a\n1\n"

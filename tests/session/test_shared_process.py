"""Trials that share the process of a lane by wish: each finds it as if it were the first, or gets another one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.trialgroup import Submission


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., dict[str, list[Any]]]]:
    """Runs trials one after another, or in turns, in one lane; returns the metrics of each."""
    options = {"backend": "local", "devices": 1, "isolation": "lane", "verbose": 0, "spare_lanes": 0}
    with FluidExecutor(**options, run_dir=tmp_path / "run", max_failures=0, packing="off") as executor:

        def run_all(*trials: Trial) -> dict[str, list[Any]]:
            found: dict[str, list[Any]] = {trial.trial_id: [] for trial in trials}
            for trial in trials:
                handle = executor.submit_trialgroup(TrialGroup([trial]))
                for result in handle.results():
                    found[result.trial_id].append(dict(result.metrics))
                handle.raise_failures()
            return found

        yield run_all


@pytest.fixture
def take_turns(tmp_path: Path) -> Iterator[Callable[..., dict[str, list[Any]]]]:
    """Runs trials at once in one lane, which changes between them as often as it can."""
    with FluidExecutor("local", 1, verbose=0, packing="lane", run_dir=tmp_path / "run", max_failures=0) as executor:

        def run_all(*trials: Trial) -> dict[str, list[Any]]:
            handle = executor.submit_trialgroup(TrialGroup(trials))
            found: dict[str, list[Any]] = {trial.trial_id: [] for trial in trials}
            for result in handle.results():
                found[result.trial_id].append(dict(result.metrics))
            handle.raise_failures()
            return found

        yield run_all


def look() -> dict[str, Any]:
    """All that a trial could find changed."""
    import decimal
    import gc
    import logging
    import multiprocessing
    import resource
    import signal
    import sys
    import warnings

    import numpy as np
    import torch

    return {
        "variable": os.environ.get("FLUID_TRIED"),
        "recursion": sys.getrecursionlimit(),
        "warnings": warnings.filters[0][0],
        "gc": gc.isenabled(),
        "path": "/nowhere" in sys.path,
        "precision": decimal.getcontext().prec,
        "disabled": logging.root.manager.disable,
        "handlers": [type(handler).__name__ for handler in logging.root.handlers],
        "errstate": np.geterr()["divide"],
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "method": multiprocessing.get_start_method(allow_none=True),
        "umask": os.umask(os.umask(0o077)) and None,
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0.0,
        "alarm": callable(signal.getsignal(signal.SIGALRM)),
        "stdout": type(sys.stdout).__name__,
        "folder": os.getcwd(),
    }


def change(folder: str) -> None:
    import decimal
    import gc
    import io
    import logging
    import multiprocessing
    import resource
    import signal
    import sys
    import warnings

    import numpy as np
    import torch

    os.environ["FLUID_TRIED"] = "1"
    sys.setrecursionlimit(5000)
    warnings.simplefilter("error")
    gc.disable()
    sys.path.append("/nowhere")
    decimal.getcontext().prec = 5
    logging.basicConfig(filename=f"{folder}/own.log", force=True)
    logging.disable(logging.CRITICAL)
    np.seterr(all="raise")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    multiprocessing.set_start_method("spawn", force=True)
    os.umask(0o037)
    resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    sys.stdout = io.StringIO()
    os.chdir(folder)


def rude(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    change(config["folder"])
    while True:
        yield {"found": look(), "pid": os.getpid()}


def polite(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print("hello")
    while True:
        yield {"found": look(), "pid": os.getpid()}


@pytest.mark.slow
def test_a_trial_finds_nothing_of_the_one_before(run: Any, tmp_path: Path) -> None:
    trials = [Trial(polite, budget=1, trial_id="first"), Trial(rude, {"folder": str(tmp_path)}, budget=1, trial_id="a")]
    found = run(*trials, Trial(polite, budget=1, trial_id="b"))
    assert len({metrics["pid"] for (metrics,) in found.values()}) == 1
    assert found["b"] == found["first"]
    (own,) = found["a"]
    assert not [
        name for name, value in own["found"].items() if value == found["b"][0]["found"][name] and name != "umask"
    ]
    assert "hello" in (tmp_path / "run" / "trials" / "b" / "output.log").read_text()


@pytest.mark.slow
def test_trials_that_take_turns_have_each_their_own(take_turns: Any, tmp_path: Path) -> None:
    found = take_turns(
        Trial(rude, {"folder": str(tmp_path)}, budget=6, trial_id="a"), Trial(polite, budget=6, trial_id="b")
    )
    assert len({metrics["pid"] for metrics in [*found["a"], *found["b"]]}) == 1
    for trial_id in "ab":
        assert all(metrics == found[trial_id][0] for metrics in found[trial_id])
    assert found["a"][0]["found"] != found["b"][0]["found"]


@pytest.mark.slow
def test_a_generator_that_yields_without_gradients_takes_nobodys(take_turns: Any) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import torch

        for _ in range(4):
            weight = torch.ones(2, requires_grad=True)
            (weight.sum() * config["x"]).backward()
            with torch.no_grad():
                yield {"gradient": float(weight.grad.sum())}

    found = take_turns(*[Trial(train, {"x": x}, budget=4, trial_id=f"t{x}") for x in (1, 2, 3)])
    assert found == {f"t{x}": [{"gradient": 2.0 * x}] * 4 for x in (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
def test_a_trial_without_streams_leaves_the_next_one_its_own(run: Any, tmp_path: Path, closed: bool) -> None:
    def close(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import io
        import sys

        sys.stdout = sys.stderr = io.StringIO() if config["closed"] else None  # type: ignore[assignment]
        if config["closed"]:
            sys.stdout.close()
        try:
            yield {"pid": os.getpid()}
        finally:
            raise ValueError("the lane cannot print this either")

    found = run(Trial(close, {"closed": closed}, budget=1, trial_id="a"), Trial(polite, budget=1, trial_id="b"))
    assert found["a"][0]["pid"] == found["b"][0]["pid"]
    assert (tmp_path / "run" / "trials" / "b" / "output.log").read_text() == "hello\n"


def test_global_objects_of_libraries_are_a_trials_own(take_turns: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("hydra")

    def draw(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import matplotlib
        import matplotlib.pyplot as pyplot
        from hydra import initialize_config_dir

        matplotlib.use("agg")
        initialize_config_dir(config["folder"], version_base=None)
        while True:
            pyplot.figure()
            matplotlib.rcParams["font.size"] += config["by"]
            yield {"figures": len(pyplot.get_fignums()), "size": matplotlib.rcParams["font.size"]}

    found = take_turns(
        *[Trial(draw, {"folder": str(tmp_path), "by": by}, budget=3, trial_id=f"t{by}") for by in (1, 2)]
    )
    assert found == {f"t{by}": [{"figures": count, "size": 10.0 + by * count} for count in (1, 2, 3)] for by in (1, 2)}


# -- reports ---------------------------------------------------------------------------------------------------


def test_reports_of_several_threads_are_all_counted(run: Any) -> None:
    def train(config: dict[str, Any]) -> None:
        failed: list[BaseException] = []

        def report(thread: int) -> None:
            try:
                for number in range(5):
                    fluid.report({"which": [thread, number]})
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=report, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fluid.report({"failed": [repr(error) for error in failed]})

    (found,) = run(Trial(train, budget=21, trial_id="a")).values()
    assert found[-1] == {"failed": []}
    assert sorted(metrics["which"] for metrics in found[:-1]) == [[t, n] for t in range(4) for n in range(5)]


def test_a_helper_threads_reports_are_its_own_trials(take_turns: Any) -> None:
    def train(config: dict[str, Any]) -> None:
        def report() -> None:
            while True:
                fluid.report({"who": config["who"]})

        if config["who"] == "a":
            threading.Thread(target=report, daemon=True).start()
        while True:
            fluid.report({"who": config["who"]})

    found = take_turns(*[Trial(train, {"who": who}, budget=30, trial_id=who) for who in "ab"])
    assert found == {who: [{"who": who}] * 30 for who in "ab"}


def test_a_trial_whose_code_goes_on_ends_its_lane(tmp_path: Path) -> None:
    """It catches that it has ended, and reports on: into no other trial, from a process that no other trial gets."""

    def train(config: dict[str, Any]) -> None:
        number = 0
        while True:
            number += 1
            try:
                fluid.report({"x": config["x"], "number": number, "pid": os.getpid()})
            except BaseException:
                threading.Event().wait(0.001)

    with FluidExecutor("local", 1, verbose=0, isolation="lane", packing="off", run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"x": 0}, budget=99, trial_id="t0")]))
        found: dict[str, list[Any]] = {f"t{x}": [] for x in range(3)}
        for x in range(3):
            for result in handle.results():
                found[f"t{x}"].append(result.metrics)
                if len(found[f"t{x}"]) == 3:
                    break
            handle.stop(f"t{x}")
            assert handle.wait(60)
            if x < 2:
                handle = executor.submit_trialgroup(
                    TrialGroup([Trial(train, {"x": x + 1}, budget=99, trial_id=f"t{x + 1}")])
                )
    for x in range(3):
        assert [(metrics["x"], metrics["number"]) for metrics in found[f"t{x}"]] == [(x, 1), (x, 2), (x, 3)]
    assert len({metrics["pid"] for metrics in [found[f"t{x}"][0] for x in range(3)]}) == 3
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("lane-*.log"))
    assert "trial 't0' has left, and its thread 'fluid-trial' still runs" in logs


@pytest.mark.slow
def test_a_lane_that_cannot_be_put_back_is_used_no_more(tmp_path: Path) -> None:
    def lower(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{config['file']}", rank=0, world_size=1)
        while True:
            yield {"pid": os.getpid()}

    pids = []
    with FluidExecutor("local", 1, verbose=0, isolation="lane", packing="off", run_dir=tmp_path / "run") as executor:
        for number in range(2):
            trial = Trial(lower, {"file": str(tmp_path / f"store{number}")}, budget=9, trial_id=f"t{number}")
            handle = executor.submit_trialgroup(TrialGroup([trial]))
            pids.append(next(iter(handle.results())).metrics["pid"])
            handle.stop(trial.trial_id)
            assert handle.wait(60)
            handle.raise_failures()
    assert len(set(pids)) == 2
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("lane-*.log"))
    assert "what it changed stays: the default process group" in logs


@pytest.mark.slow
def test_torch_compile_has_room_for_each_trial(run: Any) -> None:
    """It compiles a function eight times in a process, and then runs it eagerly."""

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import torch
        import torch._dynamo.utils as utils

        compiled = torch.compile(scale, backend="eager", dynamic=False)
        before = utils.counters["stats"]["unique_graphs"]
        compiled(torch.ones(config["width"]))
        yield {"graphs": utils.counters["stats"]["unique_graphs"] - before, "pid": os.getpid()}

    found = run(*[Trial(train, {"width": 8 + width}, budget=1, trial_id=f"t{width}") for width in range(10)])
    assert [metrics["graphs"] for (metrics,) in found.values()] == [1] * 10
    assert len({metrics["pid"] for (metrics,) in found.values()}) == 1


@pytest.mark.slow
def test_torch_compile_has_room_for_all_trials_that_take_turns(take_turns: Any) -> None:
    """None loses what it has compiled; the compiler is loaded when all have been set up."""

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"graphs": None}
        import torch
        import torch._dynamo.utils as utils

        compiled = torch.compile(scale, backend="eager", dynamic=False)
        for _ in range(2):
            before = utils.counters["stats"]["unique_graphs"]
            compiled(torch.ones(config["width"]))
            yield {"graphs": utils.counters["stats"]["unique_graphs"] - before}

    found = take_turns(*[Trial(train, {"width": 8 + width}, budget=3, trial_id=f"t{width}") for width in range(10)])
    assert [[each["graphs"] for each in metrics] for metrics in found.values()] == [[None, 1, 0]] * 10


@pytest.mark.slow
def test_a_trial_that_compiles_too_often_has_that_in_its_log(run: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import torch

        compiled = torch.compile(scale, backend="eager", dynamic=False)
        for width in range(2, 12):
            compiled(torch.ones(width))
        yield {}

    run(Trial(train, budget=1, trial_id="t0"))
    assert "hit config.recompile_limit" in (tmp_path / "run" / "trials" / "t0" / "output.log").read_text()


def scale(x: Any) -> Any:
    return x.sin() * 2


@pytest.mark.frameworks("wandb")
def test_each_trial_has_a_run_of_its_own(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import wandb

        made = wandb.init(project="p", config={"x": config["x"]}, mode="offline", dir=config["folder"])
        yield {"x": wandb.config["x"], "id": made.id, "pid": os.getpid()}

    found = run(*[Trial(train, {"x": x, "folder": str(tmp_path)}, budget=1, trial_id=f"t{x}") for x in range(3)])
    assert [metrics["x"] for (metrics,) in found.values()] == [0, 1, 2]
    assert len({metrics["id"] for (metrics,) in found.values()}) == 3


def test_each_script_has_its_own_settings_and_main(tmp_path: Path) -> None:
    """Trials of two submissions, between which the script has changed what it had set."""
    import numpy as np

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import logging
        import sys
        import warnings

        yield {
            "divide": np.geterr()["divide"],
            "filters": sum(each[1] is not None and each[1].pattern == "of b" for each in warnings.filters),
            "level": logging.getLogger("of.b").level,
            "argv": list(sys.argv),
        }

    options: dict[str, Any] = {"isolation": "lane", "packing": "off", "verbose": 0}
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", **options) as executor:

        def run(submission: Submission) -> dict[str, Any]:
            handle = executor.submit_trialgroup(TrialGroup([Trial(train)], submission=submission))
            return dict(next(handle.results()).metrics)

        first, second = Submission(), Submission()
        found = [run(first)]
        with np.errstate(divide="raise"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="of b")
            logging.getLogger("of.b").setLevel(7)
            try:
                found.append(run(second))
            finally:
                logging.getLogger("of.b").setLevel(logging.NOTSET)
        found += [run(first), run(first), run(second), run(first)]
    seen = [(each["divide"], each["filters"], each["level"]) for each in found]
    of_first, of_second = ("warn", 0, 0), ("raise", 1, 7)
    assert seen == [of_first, of_second, of_first, of_first, of_second, of_first]


def test_trials_that_take_turns_find_their_own_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import pickle, sys
from fluid import FluidExecutor, Trial, TrialGroup

class A: pass
class B: pass

def one(config):
    for _ in range(20):
        yield {"loss": float(len(pickle.dumps(A())))}

def other(config):
    for _ in range(20):
        yield {"loss": float(len(pickle.dumps(B())))}

with FluidExecutor("local", 1, packing="lane", verbose=0, run_dir=sys.argv[1], max_failures=0) as executor:
    handle = executor.submit_trialgroup(TrialGroup([Trial(one, budget=20), Trial(other, budget=20)]))
    handle.wait()
    handle.raise_failures()
    print("pickled")
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert done.stdout == "pickled\n", done.stderr

"""How a script's metrics come: every kind, real scripts in real lanes."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from script_sweeps import ScriptSweeps, losses, write_script

from fluid.scripts.readers import MetricFiles
from fluid.sweeping.plan import SweepFailedError
from fluid.trainables.script_link import VARIABLE, ScriptLink, plain

ROOT = Path(__file__).resolve().parents[2]
_FAKE_WANDB = """
    def init(**settings):
        pass

    def log(data, step=None, commit=None):
        print("logged", data)
"""


def test_fluid_report_is_an_iteration_each(sweeps: ScriptSweeps) -> None:
    text = """
        import json, os, sys
        sys.path.insert(0, sys.argv[1])
        import fluid
        config = json.loads(os.environ["FLUID_CONFIG"])
        for epoch in range(1, 4):
            fluid.report({"loss": config["x"] / epoch, "more": {"epoch": epoch}})
        (fluid.trial_dir() / "there").write_text(os.environ["FLUID_TRIAL_ID"])
    """
    result = sweeps.run(text, str(ROOT), space={"x": [1, 2]})
    assert losses(result) == [[1.0, 0.5, 1 / 3], [2.0, 1.0, 2 / 3]]
    assert result.trials[1].results[2].metrics["more"] == {"epoch": 3}
    assert (result.trials[0].folder / "there").read_text() == result.trials[0].trial_id


def test_lines_of_json_among_partial_lines_and_junk(sweeps: ScriptSweeps) -> None:
    text = r"""
        import os, sys, time
        def write(data):
            os.write(1, data)
        write(b'\xff\xfe\x00 junk without an end')
        write(b'\n{"loss": "mse"}\n{"other": 1}\n[1]\n{"loss": 1.0, "bro')
        time.sleep(0.01)
        write(b'ken": 2}\n{not json}\n{"loss": 0.5}\r\n{"loss": NaN}\n')
        sys.stderr.write('\r 50 %\r100 %\r{"loss": 0.125}')
    """
    result = sweeps.run(text)
    (trial,) = result.trials
    assert [str(one.metrics["loss"]) for one in trial.results] == ["1.0", "0.5", "nan", "0.125"]
    assert trial.results[0].metrics == {"loss": 1.0, "broken": 2, "other": 1}, "the rest comes with the next report"
    assert b"\xff\xfe\x00 junk" in (trial.folder.parent / "output.log").read_bytes()


def test_a_regular_expression(sweeps: ScriptSweeps) -> None:
    text = """
        for epoch in range(3):
            print(f"epoch {epoch} train_loss=1.5")
            print(f"epoch {epoch} done: loss={1 / (epoch + 1):.3f}")
    """
    regex = [r"train_loss=(?P<train>\S+)", r"done: loss=(?P<loss>\S+)"]
    result = sweeps.run(text, metric_from=["fluid"], metric_regex=regex)
    assert losses(result) == [[1.0, 0.5, 0.333]]
    assert result.trials[0].metrics == {"train": 1.5, "loss": 0.333}


def test_wandb_log_of_another_module(sweeps: ScriptSweeps) -> None:
    """The hook is for whatever is called wandb; what has no metric comes with the next report."""
    write_script(sweeps.folder, _FAKE_WANDB, "wandb.py")
    text = """
        import wandb
        wandb.init(project="x")
        for epoch in range(2):
            wandb.log({"lr": 0.1})
            wandb.log({"loss": 7 - epoch, "figure": object()}, commit=True)
    """
    result = sweeps.run(text)
    assert losses(result) == [[7.0, 6.0]]
    assert result.trials[0].metrics == {"lr": 0.1, "loss": 6}
    assert sweeps.run(text, metric_from=["wandb"], name="by wandb").best.value == 6
    with pytest.raises(SweepFailedError):
        sweeps.run(text, metric_from=["json"], name="by lines")


def test_the_hook_runs_the_sitecustomize_that_there_was(tmp_path: Path) -> None:
    write_script(tmp_path, "import builtins; builtins.CUSTOM = 7", "sitecustomize.py")
    paths = [str(ROOT / "fluid" / "scripts" / "hook"), str(tmp_path)]
    told = subprocess.run(
        [sys.executable, "-c", "import sys; print(CUSTOM, [path for path in sys.path if path.endswith('/hook')])"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FLUID_SCRIPT": "x", "FLUID_SCRIPT_WANDB": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "7 []\n"


@pytest.mark.slow
def test_lines_of_processes_that_print_at_once_are_whole(sweeps: ScriptSweeps) -> None:
    text = """
        import os
        others = [os.fork() for _ in range(2)]  # Four processes.
        for number in range(200):
            print('{"loss": %d}' % number)
        for other in others:
            if other:
                os.waitpid(other, 0)
    """
    (found,) = losses(sweeps.run(text, budget=1000))
    assert sorted(found) == sorted([*range(200)] * 4)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_that_is_disabled(sweeps: ScriptSweeps) -> None:
    text = """
        import wandb
        run = wandb.init(mode="disabled")
        wandb.log({"loss": 2.0})
        run.log({"loss": 1.0})
    """
    assert losses(sweeps.run(text)) == [[2.0, 1.0]]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_itself_offline(sweeps: ScriptSweeps) -> None:
    text = """
        import os, sys
        os.environ["WANDB_MODE"], os.environ["WANDB_SILENT"] = "offline", "true"
        import wandb
        run = wandb.init(project="x", dir=os.environ["FLUID_TRIAL_DIR"], config={"x": 7, "y": 8})
        wandb.log({"loss": 2.0 * wandb.config.x, "picture": [1, 2], "y": wandb.config["y"]})
        run.log({"loss": 1.0})
        run.finish()
    """
    result = sweeps.run(text)
    assert losses(result) == [[2.0, 1.0]] and result.trials[0].results[0].metrics["y"] == 8


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_event_files(sweeps: ScriptSweeps) -> None:
    text = """
        import sys, time
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        writer = EventFileWriter(sys.argv[1])
        for step, loss in enumerate([1.0, 0.5]):
            for name, value in (("acc", 0.25), ("loss", loss)):
                writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)])))
        writer.close()
    """
    result = sweeps.run(text, "{trial_dir}/logs", metric_from=["tensorboard:{trial_dir}/logs"])
    assert losses(result) == [[1.0, 0.5]]
    assert result.trials[0].metrics == {"acc": 0.25, "loss": 0.5, "step": 1}


def test_reports_of_one_step_in_one_look_are_iterations_each(tmp_path: Path) -> None:
    """mlflow.log_metric("loss", loss) without a step is of step 0 each time, and may be seen late, several at once."""
    metrics = tmp_path / "0/run/metrics"
    metrics.mkdir(parents=True)
    (metrics / "accuracy").write_text("".join(f"{10 * n} {n / 10} 0\n" for n in (1, 2, 3)))
    (metrics / "loss").write_text("".join(f"{10 * n + 1} {1 / n} 0\n" for n in (1, 2, 4)))
    files = MetricFiles(str(tmp_path), ["loss"])
    found = [(each["loss"], each["accuracy"]) for each in files.poll()]
    assert found == [(1.0, 0.1), (0.5, 0.2), (0.25, 0.3)] and files.poll() == []
    with (metrics / "loss").open("a") as file:
        file.write("50 0.125 0\n")
    assert [each["loss"] for each in files.poll()] == [0.125]


def test_a_file_store_of_mlflow(sweeps: ScriptSweeps) -> None:
    text = """
        import os, sys, time
        folder = os.path.join(sys.argv[1], "0", "abc", "metrics")
        os.makedirs(os.path.join(folder, "val"))
        for step in range(2):
            with open(os.path.join(folder, "val", "acc"), "a") as file:
                file.write(f"1700000000000 0.75 {step}\\n")
            with open(os.path.join(folder, "loss"), "a") as file:
                file.write(f"1700000000000 {1 / (step + 1)} {step}\\n")
    """
    result = sweeps.run(text, "{trial_dir}/mlruns", metric_from=["mlflow:{trial_dir}/mlruns"])
    assert losses(result) == [[1.0, 0.5]]
    assert result.trials[0].metrics == {"val/acc": 0.75, "loss": 0.5, "step": 1}


def test_the_checkpoint_of_the_best_iteration_is_kept(sweeps: ScriptSweeps) -> None:
    text = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import fluid
        for epoch in range(1, 5):
            open(sys.argv[2], "w").write(str(epoch))
            fluid.report({"loss": (epoch - 3) ** 2, "epoch": epoch})
    """
    words = [str(ROOT), "{checkpoint}"]
    result = sweeps.run(text, *words, checkpoint_flag="--resume {checkpoint}", iteration_key="epoch")
    assert result.best.iteration == 3 and result.best.load_checkpoint().read_text() == "3"


def test_several_metrics_make_one_report(sweeps: ScriptSweeps) -> None:
    text = """
        for epoch in range(1, 4):
            print(f'{{"loss": {1 / epoch}}}')
            print(f'{{"seconds": {epoch}}}')
    """
    result = sweeps.run(text, metric=("loss", "seconds"), mode=("min", "min"))
    assert losses(result) == [[1.0, 0.5, 1 / 3]]
    assert [one.metrics["seconds"] for one in result.trials[0].results] == [1, 2, 3]


def test_one_way_of_reporting_counts(sweeps: ScriptSweeps) -> None:
    """What is reported in two ways is one iteration."""
    text = """
        import json, sys
        sys.path.insert(0, sys.argv[1])
        import fluid
        for epoch in range(3):
            print(json.dumps({"loss": epoch}))
            fluid.report({"loss": epoch})
    """
    result = sweeps.run(text, str(ROOT))
    assert losses(result) == [[0.0, 1.0, 2.0]]
    assert (result.trials[0].folder.parent / "output.log").read_text().count("reports by") == 1


def test_a_script_that_reports_nothing_is_told_with_its_last_lines(sweeps: ScriptSweeps) -> None:
    with pytest.raises(SweepFailedError) as caught:
        sweeps.run("print('{\"accuracy\": 1}'); print('bye')")
    told = str(caught.value.__cause__ or caught.value)
    assert "no metric was reported" in told and "accuracy" in told and "bye" in told


def test_a_script_of_many_lines(sweeps: ScriptSweeps) -> None:
    text = """
        for line in range(100_000):
            print("line", line)
        print('{"loss": 1}')
    """
    result = sweeps.run(text)
    assert losses(result) == [[1.0]]
    log = (result.trials[0].folder.parent / "output.log").read_bytes()
    assert log.count(b"\n") == 100_001


def test_only_numbers_and_texts_are_reported() -> None:
    given = {"a": np.float32(0.5), "b": np.int64(3), "c": [1], "d": {"e": None, "f": "x"}, 7: True, "g": np.zeros(2)}
    assert plain(given) == {"a": 0.5, "b": 3, "d": {"f": "x"}, "7": True}
    assert str(plain({"a": float("nan")})) == "{'a': nan}"


def test_a_report_that_nobody_takes_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is not the first of several that train together; and where Fluid has gone."""
    monkeypatch.setenv(VARIABLE, "fluid-script-nobody")
    ScriptLink().report({"loss": 1.0}, "fluid")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0fluid-script-of-a-test")
        listener.listen()
        listener.setblocking(False)
        monkeypatch.setenv(VARIABLE, "fluid-script-of-a-test")
        monkeypatch.setenv("RANK", "1")
        ScriptLink().report({"loss": 1.0}, "fluid")
        with pytest.raises(BlockingIOError):
            listener.accept()

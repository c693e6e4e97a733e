"""Fluid's live view of a sweep of Tune, on a terminal: alone unless the user asks for Tune's output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_TESTS := str(Path(__file__).parents[2])) not in sys.path:
    sys.path.append(_TESTS)
from terminal_screen import TerminalProcess

pytest.importorskip("ray.tune")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

_SCRIPT = """
import sys, time
from fluid import FluidExecutor, tune
from ray.tune.schedulers import ASHAScheduler

class Climb(tune.Trainable):
    def setup(self, config):
        self.rate = config["rate"]

    def step(self):
        time.sleep(self.config["pause"])
        return {"score": self.rate * (self.iteration + 1)}

    def save_checkpoint(self, folder):
        pass

    def load_checkpoint(self, folder):
        pass

if __name__ == "__main__":
    space = {"rate": tune.grid_search([1.0, 2.0, 3.0]), "pause": float(sys.argv[2])}
    executor = FluidExecutor("local", devices=2, run_dir="run")
    if sys.argv[1] == "tuner":
        config = tune.TuneConfig(metric="score", mode="max", scheduler=ASHAScheduler(max_t=9))
        run = tune.RunConfig(storage_path=sys.argv[3], name="sweep")
        tune.Tuner(Climb, param_space=space, tune_config=config, run_config=run, executor=executor).fit()
        assert run.verbose != 0
    else:
        verbose = {} if sys.argv[1] == "default" else {"verbose": int(sys.argv[1])}
        scheduler = ASHAScheduler(max_t=9)
        options = {"scheduler": scheduler, "metric": "score", "mode": "max", "name": "sweep", **verbose}
        tune.run(Climb, config=space, storage_path=sys.argv[3], executor=executor, **options)
"""


def start(folder: Path, output: str, seconds: float) -> TerminalProcess:
    (folder / "script.py").write_text(_SCRIPT, encoding="utf-8")
    root = str(Path(__file__).parents[3])
    environment = {"PYTHONPATH": root, "RAY_ADDRESS": "local"}
    command = [sys.executable, "script.py", output, str(seconds), str(folder / "results")]
    return TerminalProcess(command, environment, 80, 40, cwd=folder)


@pytest.mark.parametrize("output", ["default", "tuner"])
def test_a_sweep_is_shown_once(tmp_path: Path, output: str) -> None:
    process = start(tmp_path, output, 0.05)
    process.read_until(lambda lines: any(line.startswith("Fluid") for line in lines))
    assert any("Ray Tune is starting" in line for line in process.screen.text()), "before it has trials"
    assert process.finish() == 0, process.screen.text()
    left = process.screen.text()
    seen = "\n".join("\n".join(lines) for lines in process.seen)
    assert "Trial status" not in seen, "no table of Tune's"
    assert "best score" in seen and "/~" in seen
    summary = next(at for at, line in enumerate(left) if line.startswith("sweep  3 trials: "))
    assert left[summary - 1].startswith("best  score ") and "rate=" in left[summary - 1]
    assert left[summary + 1 : summary + 2] == ["results in run"]
    assert not any("Ray Tune is starting" in line or line.startswith("cpu ") for line in left), left


@pytest.mark.long
def test_a_user_who_asks_for_tunes_output_gets_it(tmp_path: Path) -> None:
    process = start(tmp_path, "1", 0.02)
    assert process.finish() == 0, process.screen.text()
    left = process.screen.text()
    assert any(line.startswith("Trial status: 3 TERMINATED") for line in left)
    assert any(line.startswith("sweep  3 trials: ") for line in left)


def test_ctrl_c_leaves_no_line_of_the_view(tmp_path: Path) -> None:
    process = start(tmp_path, "default", 60.0)
    process.read_until(lambda lines: any("2 running" in line for line in lines))
    process.type("\x03")
    assert process.finish() == 130
    left = process.screen.text()
    assert not any(line.startswith(("Fluid", "cpu ")) for line in left), left
    assert any(line.startswith("fluid: interrupted by SIGINT") for line in left)
    assert "results in run" in left


_CELL = """
from fluid import FluidExecutor, tune

class Climb(tune.Trainable):
    def step(self):
        return {"score": self.config["rate"] * (self.iteration + 1)}

executor = FluidExecutor("local", devices=1, run_dir="run")
options = {"storage_path": STORAGE, "name": "sweep", "metric": "score", "mode": "max", "executor": executor}
space = {"rate": tune.grid_search([1.0, 2.0])}
analysis = tune.run(Climb, config=space, stop={"training_iteration": 3}, **options)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_notebook_has_one_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from notebooks import Notebook, forms_of

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    book = Notebook([_CELL.replace("STORAGE", repr(str(tmp_path / "results")))], tmp_path)
    (outputs,) = book.run()
    assert not any(output.output_type == "error" for output in outputs), outputs
    displays = [output for output in outputs if output.output_type == "display_data"]
    assert len(displays) == 1, "Tune's widget is left out, and has not cleared the cell"
    text = forms_of(displays[0])[1]
    assert text.startswith("best  score 6 (more is better)  ") and "\nsweep  2 trials: 2 done; 6 iterations; " in text
    texts = [forms_of(message["content"])[1] for message in book.displays[0]]
    assert "Ray Tune is starting" in texts[0]

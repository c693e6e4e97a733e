"""No optional package is imported unasked, and one that is broken breaks only what needs it.

Every package of every extra is replaced by a module that raises as it is imported, as wandb does beside another release
of protobuf. The list is read from pyproject.toml: a new extra is covered as it comes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Of Python 3.11

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: What is no part of what users run.
_FOR_WORK_ON_FLUID = {"dev", "docs"}
#: Packages that import under another name than the one they are installed by.
_MODULES = {
    "ax-platform": "ax",
    "hydra-core": "hydra",
    "mlflow-skinny": "mlflow",
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "xgboost-cpu": "xgboost",
}
SAID = "Descriptors cannot be created directly."

#: What needs each extra: statements that use it. ``run`` is the run folder of a sweep.
FEATURES = {
    "ax": "from fluid.integrations.ax import AxSearcher; AxSearcher(None)",
    "elastic": "import fluid.elastic; fluid.elastic.ElasticTrainable",
    "horovod": "import fluid.elastic; fluid.elastic.ElasticTrainable",  # It cannot be reached but through PyTorch.
    "hpbandster": "import fluid.integrations.hpbandster",
    "hydra": "from fluid.integrations.hydra.job import SharedByJobs as jobs\n"
    "jobs.of_driver(hydra_context=None, task_function=None, config=None)",
    "joblib": "import fluid.integrations.joblib",
    "keras": "from fluid.integrations.keras import KerasCallback; KerasCallback()",
    "lightgbm": "import fluid.integrations.lightgbm",
    "lightning": "from fluid.integrations.lightning import sweep; sweep(print, {}, metric='loss', trainer={})",
    "lora": "import fluid.fused; fluid.fused.save_adapter",
    "mlflow": "from fluid.loggers import MLflow; MLflow()",
    "optuna": "fluid.search.make_sampler('tpe', fluid.search.make_space({'x': [1, 2]}))",
    "pandas": "fluid.load(run).dataframe()",
    "parquet": "from fluid.loggers import Parquet; Parquet()",
    "plot": "from fluid.reports.figures.gantt import draw_gantt; draw_gantt([])",
    "prometheus": "fluid.FluidExecutor(devices=1, metrics_port=0).close()",
    "ray": "fluid.tune.run",
    "rehearsal": "from fluid.rehearsal.blackbox import BlackboxBenchmark; BlackboxBenchmark(None, '')",
    "sklearn": "from fluid.integrations.sklearn import FluidSearchCV",
    "smac": "from fluid.integrations.smac import SMACSearcher; SMACSearcher(None)",
    "tensorboard": "from fluid.loggers import TensorBoard; TensorBoard()",
    "transformers": "from fluid.integrations.transformers import FluidTrainerCallback; FluidTrainerCallback(None)",
    "wandb": "from fluid.loggers import WandB; WandB()",
    "xgboost": "import fluid.integrations.xgboost",
    "yaml": "open('sweep.yaml', 'w').close(); from fluid.scripts.sweep_file import load_file; load_file('sweep.yaml')",
}


def distributions(extra: str) -> set[str]:
    """Names of the packages of an extra, without those of other extras that it takes in."""
    listed = {re.split(r"[\[<>=!~; ]", one)[0] for one in PROJECT["optional-dependencies"][extra]}
    return listed - {PROJECT["name"]}


def optional_modules() -> set[str]:
    names = set().union(
        *(distributions(extra) for extra in PROJECT["optional-dependencies"].keys() - _FOR_WORK_ON_FLUID)
    )
    return {_MODULES.get(name, name.replace("-", "_")) for name in names}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which each optional package raises, once it has written its name to ``asked``."""
    folder = tmp_path_factory.mktemp("poisoned")
    for name in optional_modules():
        tell = f"with open({str(folder / 'asked')!r}, 'a') as file: print({name!r}, file=file)"
        (folder / f"{name}.py").write_text(f"{tell}\nraise TypeError({SAID!r})\n")
    return folder


def run_poisoned(script: str, poisoned: Path) -> str:
    """What a script prints that runs among the broken packages; ``asked`` begins anew."""
    (poisoned / "script.py").write_text(script)
    (poisoned / "asked").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=poisoned,
        env={**os.environ, "HOME": str(poisoned), "PYTHONPATH": f"{poisoned}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def asked(poisoned: Path) -> set[str]:
    """The packages that processes of the script tried to import: the driver, its helpers and its lanes."""
    path = poisoned / "asked"
    return set(path.read_text().split()) if path.exists() else set()


@pytest.fixture(scope="module")
def swept(poisoned: Path) -> tuple[str, set[str]]:
    """What a sweep and a group print, with their run folders; and which packages they tried to import."""
    script = (
        "import fluid\n"
        "def train(config, state):\n"
        "    for step in range(state or 0, 3):\n"
        "        yield {'loss': config['lr'] * config['width'] / (step + 1)}, step + 1\n"
        "def log(config):\n"
        "    try: import wandb\n"
        "    except TypeError: yield {'loss': 1.0}\n"
        "if __name__ == '__main__':\n"
        "    space = {'lr': fluid.search.uniform(0, 1), 'width': fluid.search.randint(1, 9)}\n"
        "    result = fluid.run(train, space, metric='loss', mode='min', samples=9, budget=3, algorithm='asha',\n"
        "                       run_dir='sweep')\n"
        "    print(result.best.load_checkpoint())\n"
        "    from fluid.loggers import CSV\n"
        "    with fluid.FluidExecutor(devices=1, run_dir='group', loggers=[CSV()]) as executor:\n"
        "        trials = [fluid.Trial(function, {'lr': 0.5, 'width': 1}, budget=1) for function in (train, log)]\n"
        "        handle = executor.submit_trialgroup(fluid.TrialGroup(trials))\n"
        "        print([result.metrics['loss'] for result in handle.results()])\n"
    )
    return run_poisoned(script, poisoned), asked(poisoned)


def test_a_sweep_and_a_group_import_no_optional_package(swept: tuple[str, set[str]]) -> None:
    output, imported = swept
    assert output.splitlines() == ["3", "[0.5, 1.0]"], "the checkpoint of the best trial, and the group's results"
    assert imported == {"wandb"}, "what a trial of the group imports itself, in its lane"


def test_reports_and_the_doctor_do_without(swept: tuple[str, set[str]], poisoned: Path) -> None:
    script = (
        "from fluid.cli import main\n"
        "for command in ('doctor', 'report sweep --html page.html', 'why sweep train-asha-00000', 'report sweep',\n"
        "                'export sweep --csv tables', 'report sweep group'):\n"
        "    assert main(command.split()) == 0, command\n"
    )
    output = run_poisoned(script, poisoned)
    broken = f"which is installed and cannot be imported (TypeError: {SAID})"
    assert f"did not draw timeline.png: this needs matplotlib, {broken}; to install it anew: pip " in output
    assert f"needs Optuna, {broken}" in " ".join(output.split())
    assert (poisoned / "page.html").read_text() == (poisoned / "sweep" / "report.html").read_text()
    assert asked(poisoned) == {"matplotlib", "optuna", "sklearn"}, "what draws the chart, and tells importances"


@pytest.fixture(scope="module")
def refusals(swept: tuple[str, set[str]], poisoned: Path) -> dict[str, list[str]]:
    """For each extra, what using it raises: the error's type, its text, and its cause."""
    script = (
        "import json, fluid\n"
        f"told = {{}}\nfor extra, statements in {FEATURES!r}.items():\n"
        "    try:\n"
        "        exec(statements, {'fluid': fluid, 'run': 'sweep'})\n"
        "    except BaseException as error:\n"
        "        told[extra] = [type(error).__name__, str(error), repr(error.__cause__)]\n"
        "print(json.dumps(told))\n"
    )
    told: dict[str, list[str]] = json.loads(run_poisoned(script, poisoned).splitlines()[-1])
    return told


@pytest.mark.parametrize("extra", sorted(FEATURES))
def test_what_needs_a_broken_package_says_so(extra: str, refusals: dict[str, list[str]]) -> None:
    kind, text, cause = refusals[extra]
    assert kind == "MissingDependencyError", text
    assert f"is installed and cannot be imported (TypeError: {SAID}); to install it anew: " in text
    assert "pip install --force-reinstall '" in text
    assert cause == f"TypeError({SAID!r})"


def test_every_extra_of_users_has_a_feature() -> None:
    extras = PROJECT["optional-dependencies"].keys()
    assert set(FEATURES) == {extra for extra in extras - _FOR_WORK_ON_FLUID if distributions(extra)} - {"examples"}


def test_the_modules_of_packages_that_are_installed_are_known() -> None:
    installed = importlib.metadata.packages_distributions()
    by_distribution = {name.lower(): module for module, names in installed.items() for name in names}
    for extra in PROJECT["optional-dependencies"].keys() - _FOR_WORK_ON_FLUID:
        for name in distributions(extra) & by_distribution.keys():
            module = _MODULES.get(name, name.replace("-", "_"))
            assert name in [each.lower().replace("_", "-") for each in installed.get(module, [])], name

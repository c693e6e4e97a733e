"""Programs of Fluid in interpreters of their own: where they look for modules, and what they are handed on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest
from mps_program import Fake

from fluid.errors import FluidError
from fluid.integrations.comparing.playing import Players
from fluid.processes.interpreters import import_path, merged_path, start_program

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 120.0
#: Modules that every program of Fluid imports, or Python itself as it starts; and Fluid.
PLANTED = ("json", "random", "socket", "types", "linecache", "os", "runpy", "subprocess", "fluid", "torch")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all may write to, with modules that somebody has left there; they tell where they were executed."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in PLANTED:
        told = f"__import__('posix').open({str(tmp_path / 'executed')!r}, 0o101)"
        (folder / f"{name}.py").write_text(f"{told}\nraise ImportError('planted')\n")
    return folder


def run_there(folder: Path, text: str, *words: str, flags: tuple[str, ...] = (), **variables: str) -> dict[str, Any]:
    """Runs a script of another folder in a folder; returns what it has written, pickled, to the file ``found``."""
    script = folder.parent / "application" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(textwrap.dedent(text))
    found = script.parent / "found"
    command = [sys.executable, *flags, str(script), str(found), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLUID_RUNS": str(folder.parent / "runs"), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not (folder.parent / "executed").exists(), "a module of the working directory was executed"
    return dict(pickle.loads(found.read_bytes()))


#: Runs a trial that tells what it sees.
TRIAL = """
import multiprocessing, os, pickle, sys
import fluid

def seen():
    import multiprocessing, os, sys
    return {
        "flags": tuple(sys.flags), "warnings": sys.warnoptions, "options": sys._xoptions, "argv": sys.argv,
        "path": [os.path.abspath(entry) for entry in sys.path], "python_path": os.environ.get("PYTHONPATH"),
        "authkey": bytes(multiprocessing.current_process().authkey),
        "start": multiprocessing.get_start_method(allow_none=True), "folder": os.getcwd(),
        "file": getattr(sys.modules["__main__"], "__file__", None),
    }

def trial(config):
    yield {"seen": pickle.dumps(seen()).hex()}

def run():
    with fluid.FluidExecutor("local", 1, verbose=0) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(trial, {})]))
        (result,) = handle.results()
    return pickle.loads(bytes.fromhex(result.metrics["seen"]))

def write(**found):
    with open(sys.argv[1], "wb") as file:
        pickle.dump(found, file)
"""
ELASTIC = (
    TRIAL
    + """
from fluid.elastic import ElasticRun, ElasticTrainable

class Probe(ElasticTrainable):
    def build(self, config):
        import torch
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = self.make_loader(torch.utils.data.TensorDataset(torch.zeros(1, 1)), batch_size=1)

    def train_batch(self, batch):
        self.optimizer.zero_grad()
        self.model(batch[0]).sum().backward()
        self.optimizer.step()
        return {}

    def train_iteration(self):
        return {**super().train_iteration(), "seen": pickle.dumps(seen()).hex()}

def run():
    with ElasticRun(Probe, {}, backend="gloo") as elastic:
        (result,) = elastic.run(1)
    return pickle.loads(bytes.fromhex(result.metrics["seen"]))
"""
)


def test_no_trial_loads_what_lies_in_the_working_directory(shared: Path) -> None:
    found = run_there(shared, f"{TRIAL}\nwrite(driver=seen(), trial=run())")
    assert found["trial"]["path"] == found["driver"]["path"] and str(shared) not in found["driver"]["path"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["multiprocessing.set_start_method('spawn')", ""])
def test_what_pythons_own_starters_hand_on_is_handed_on(tmp_path: Path, setting: str) -> None:
    flags = ("-O", "-B", "-s", "-Werror::UserWarning", "-Xutf8", "-Xfaulthandler")
    found = run_there(tmp_path, f"{TRIAL}\n{setting}\nwrite(driver=seen(), trial=run())", "a", "b", flags=flags)
    assert found["trial"] == found["driver"]
    assert found["driver"]["options"] == {"utf8": True, "faulthandler": True}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["multiprocessing.set_start_method('spawn')", ""])
def test_members_of_an_elastic_run(shared: Path, setting: str) -> None:
    pytest.importorskip("torch")
    flags = ("-O", "-Werror::FutureWarning", "-Xfaulthandler")
    text = f"{ELASTIC}\n{setting}\nwrite(member=run(), driver=seen())"
    found = run_there(shared, text, "a", flags=flags)
    for each in found.values():
        del each["file"]  # A member has none of the script.
    assert found["member"] == found["driver"]


def test_the_supervisor_of_mps(shared: Path, tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    text = """
        import pickle, sys
        from fluid.mps import MpsDaemon

        with MpsDaemon(["GPU-a"], program=sys.argv[2], start_timeout=90.0, answer_timeout=90.0) as daemon:
            with open(sys.argv[1], "wb") as file:
                pickle.dump({"servers": list(daemon.servers().values())}, file)
    """
    found = run_there(shared, text, str(fake.program), FAKE_MPS=str(fake.told))
    assert found == {"servers": ["ACTIVE"]}
    assert fake.environment()["PYTHONPATH"] == str(ROOT)


@pytest.mark.slow
def test_rehearsed_scripts(shared: Path, tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent("""
            import fluid
            from fluid.rehearsal import ReplayedIteration

            class Model:
                def replay(self, iterations):
                    return [ReplayedIteration({"loss": 1.0 / i}, seconds=60.0) for i in iterations]

            with fluid.FluidExecutor(verbose=0):
                fluid.run(Model, {"lr": fluid.search.uniform(0.1, 1.0)}, metric="loss", samples=2, budget=2)
        """)
    )
    text = """
        import pickle, sys
        from fluid.cli import main

        status = main(["rehearse", *sys.argv[2:]])
        with open(sys.argv[1], "wb") as file:
            pickle.dump({"status": status}, file)
    """
    out = ("--devices", "1", "--out", str(tmp_path / "out"))
    assert run_there(shared, text, str(script), *out) == {"status": 0}


def test_players_of_comparisons(shared: Path) -> None:
    text = """
        import operator, pickle, sys
        from pathlib import Path
        from fluid.integrations.comparing.playing import Players

        with Players(Path(sys.argv[1] + ".log")) as players, open(sys.argv[1], "wb") as file:
            pickle.dump({"played": players.play((operator.add, 1, 2))}, file)
    """
    assert run_there(shared, text) == {"played": 3}


def test_a_player_that_dies_is_told_and_replaced(tmp_path: Path) -> None:
    with Players(tmp_path / "log") as players:
        assert players.play((os.getpid,)) == players.play((os.getpid,)) != os.getpid()
        assert players.play((os._exit, 3)) == ("its process exited with status 3", False)
        assert players.play((int, "3")) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (("-I",), {}),
        (("-E",), {}),
        (("-S",), {}),
        ((), {"PYTHONSAFEPATH": "1"}),
        ((), {"PYTHONHASHSEED": "0"}),
    ],
    ids=str,
)
def test_drivers_with_options(shared: Path, flags: tuple[str, ...], variables: dict[str, str]) -> None:
    """The script finds Fluid and its packages by itself; what it starts does as it did."""
    text = f"import sys\nsys.path[:] = {sys.path!r}\n{TRIAL}\nwrite(driver=seen(), trial=run())"
    found = run_there(shared, text, flags=flags, **variables)
    assert found["trial"] == found["driver"]


@pytest.mark.slow
def test_the_working_directory_counts_where_the_drivers_path_has_it(tmp_path: Path) -> None:
    """As for an interactive driver; a trial that goes elsewhere still finds it, and nothing there in its place."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "known_here.py").write_text("WHERE = 'other'")
    (tmp_path / "known_here.py").write_text("WHERE = 'here'")
    text = f"""
import os, sys
sys.path.insert(0, "")
{TRIAL}
def trial(config):
    os.chdir({str(other)!r})
    import known_here
    yield {{"seen": pickle.dumps({{"where": known_here.WHERE}}).hex()}}
write(trial=run())
"""
    assert run_there(tmp_path, text)["trial"] == {"where": "here"}


def test_trials_run_where_the_drivers_working_directory_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    text = """
import os, pickle, sys
os.rmdir(os.getcwd())
import fluid

def trial(config):
    yield {"steps": 1}

with fluid.FluidExecutor("local", 1, verbose=0) as executor:
    (result,) = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(trial)])).results()
with open(sys.argv[1], "wb") as file:
    pickle.dump(dict(result.metrics), file)
"""
    assert run_there(tmp_path / "gone", text) == {"steps": 1}


@pytest.mark.slow
def test_a_folder_that_the_driver_inserts_later_comes_first_in_trials_too(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which_one.py").write_text(f"NAME = {name!r}")
    text = f"""
import sys
sys.path.insert(1, {str(tmp_path / "second")!r})
{TRIAL}
def trial(config):
    import which_one
    yield {{"seen": pickle.dumps({{"name": which_one.NAME}}).hex()}}

with fluid.FluidExecutor("local", 1, verbose=0) as executor:
    executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(lambda config: iter([{{}}]), {{}})])).wait()
    sys.path.insert(1, {str(tmp_path / "first")!r})
    (result,) = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(trial, {{}})])).results()
write(**pickle.loads(bytes.fromhex(result.metrics["seen"])))
"""
    assert run_there(tmp_path, text) == {"name": "first"}


@pytest.mark.slow
def test_fluid_in_an_archive(shared: Path, tmp_path: Path) -> None:
    archive = tmp_path / "fluid.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (ROOT / "fluid").rglob("*.py"):
            file.write(path, path.relative_to(ROOT))
    text = f"{TRIAL}\nwrite(driver=seen(), trial=run(), fluid=fluid.__file__)"
    found = run_there(shared, text, PYTHONPATH=str(archive))
    assert found["trial"] == found["driver"]
    assert found["fluid"] == str(archive / "fluid" / "__init__.py")


def test_the_interpreter_that_multiprocessing_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an application that embeds Python, where ``sys.executable`` is the application or empty."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(spawn, "_python_exe", spawn.get_executable())
    spawn.set_executable(str(wrapper))
    with Players(tmp_path / "log") as players:
        assert players.play((int, "3")) == 3
    assert (tmp_path / "used").exists()
    monkeypatch.setattr(spawn, "_python_exe", None)
    with pytest.raises(FluidError, match="set_executable"):
        start_program("fluid.cli")


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "modules", "__a_hook__", "/lib", Path("/odd"), b"/odd", "/\udce9"])
    assert import_path() == [str(tmp_path), str(tmp_path / "modules"), "__a_hook__", "/lib", "/\udce9"]
    assert merged_path(["/a", "/b"], ["/b", "/a"]) == ["/a", "/b"]
    assert merged_path([], ["/a", "/b"]) == ["/a", "/b"]

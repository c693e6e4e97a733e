"""What docs/approval.md says of a sweep on one machine: what listens, is written, is unpickled and installed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Each trial counts the network sockets of the driver and all processes below it; one listens itself. The model is an
#: array, so that its checkpoint names a class.
SWEEP = """
import glob, os, socket
import numpy as np
import fluid

os.umask(0)

def sockets(driver):
    lines = [line.split() for kind in ("tcp", "tcp6", "udp", "udp6") if os.path.exists(f"/proc/net/{kind}")
             for line in open(f"/proc/net/{kind}").readlines()[1:]]
    of_network = {f"socket:[{line[9]}]" for line in lines}
    parents, found = {}, set()
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            parents[stat.split("/")[2]] = open(stat).read().rpartition(")")[2].split()[1]
        except OSError:
            pass  # It has ended.
    for process in parents:
        above = process
        while above != driver and above in parents:
            above = parents[above]
        if above == driver:
            for path in glob.glob(f"/proc/{process}/fd/*"):
                try:
                    found |= {os.readlink(path)} & of_network
                except OSError:
                    pass  # It was closed.
    return len(found)

def train(config, state):
    server = socket.create_server(("127.0.0.1", 0)) if config["listens"] else None
    yield {"sockets": sockets(config["driver"])}, np.ones(3)

if __name__ == "__main__":
    space = {"listens": [False, True], "driver": str(os.getpid())}
    with fluid.FluidExecutor(devices=1, verbose=0) as executor:
        result = fluid.run(train, space, metric="sockets", mode="min", algorithm="grid", executor=executor)
    print({trial.config["listens"]: trial.metrics["sockets"] for trial in result.trials})
"""
#: Python tells an audit hook of each class that a pickle names.
READ = """
import sys
from pathlib import Path
import fluid
from fluid.cli import main

(run,) = Path("home/fluid_runs").iterdir()
named = []
sys.addaudithook(lambda event, given: named.append(given) if event == "pickle.find_class" else None)
trial = fluid.load(run).trials[0].trial_id
for command in (["report"], ["report", "--html", "-"], ["why"], ["export", "--csv", "tables"]):
    assert main([command[0], str(run), *([trial] if command[0] == "why" else []), *command[1:]]) == 0
print("classes of pickles:", len(named))
fluid.load(run).trials[0].load_checkpoint()
print("classes of a checkpoint:", len(named))
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the home and the temporary folder of a user whose umask hides nothing, and who has swept."""
    folder = tmp_path_factory.mktemp("security")
    for name in ("home", "temporary"):
        (folder / name).mkdir()
    (folder / "said").write_text(run(SWEEP, folder))
    return folder


def run(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script)
    mine = {"HOME": f"{folder}/home", "TMPDIR": f"{folder}/temporary"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **mine}
    environment.pop("FLUID_RUNS", None)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_sweep_on_one_machine_has_no_network_socket(swept: Path) -> None:
    assert (swept / "said").read_text() == "{False: 0, True: 1}\n", "one, where the trial itself listens"


def test_a_sweep_writes_its_run_folder_and_for_its_owner_only(swept: Path) -> None:
    assert [path.name for path in (swept / "home").iterdir()] == ["fluid_runs"]
    assert list((swept / "temporary").iterdir()) == []
    (run_folder,) = (swept / "home" / "fluid_runs").iterdir()
    modes = {path.relative_to(run_folder): stat.S_IMODE(path.lstat().st_mode) for path in run_folder.rglob("*")}
    assert len(modes) > 5
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700


def test_only_a_checkpoint_that_is_loaded_is_unpickled(swept: Path) -> None:
    said = run(READ, swept).splitlines()
    assert "classes of pickles: 0" in said
    (last,) = [int(line.rpartition(":")[2]) for line in said if line.startswith("classes of a checkpoint:")]
    assert last > 0


#: Modules that call other machines.
CLIENTS = r"aiohttp|ftplib|http\.client|httpx|requests|smtplib|urllib\.request|urllib3|xmlrpc"


def test_no_module_has_a_client_of_other_machines() -> None:
    sources = [
        path.read_text(encoding="utf-8") for name in ("fluid", "integrations") for path in (ROOT / name).rglob("*.py")
    ]
    imports = [line for source in sources for line in re.findall(r"^\s*(?:import|from)\s.*", source, re.MULTILINE)]
    named = [re.sub(r"\s*(?:import|from)\s+(\S+)(?:\s+import\s+)?", r"\1.", line, count=1) for line in imports]
    assert any(name.startswith("http.server.") for name in named), "what serves is seen"
    assert [name for name in named if re.match(rf"(?:{CLIENTS})\b", name)] == []


def test_the_page_lists_what_the_core_installs_with_its_licences() -> None:
    page = (ROOT / "docs" / "approval.md").read_text(encoding="utf-8")
    table = page.partition("## Dependencies\n")[2].partition("\n## ")[0]
    listed = {
        name: licence
        for licence, names in re.findall(r"^\| ([\w, -]+) \| (`.+) \|$", table, re.MULTILINE)
        for name in re.findall("`(.+?)`", names)
    }
    tomllib = pytest.importorskip("tomllib")  # Of Python 3.11
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    installed: dict[str, str] = {}
    while wanted:
        needed = wanted.pop()
        name = re.split(r"[\s(<>=!~;\[]", needed)[0]
        if "extra ==" in needed or name in installed:
            continue
        facts = metadata.metadata(name)
        said = [facts.get("License-Expression"), facts.get("License"), *(facts.get_all("Classifier") or ())]
        installed[name] = " ".join(filter(None, said))
        wanted += metadata.requires(name) or []
    assert sorted(listed) == sorted(installed)
    assert {name for name, licence in listed.items() if licence[:3] not in installed[name]} == set()


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 8
    assert [each for each in named if f"def {each[1]}" not in (ROOT / each[0]).read_text(encoding="utf-8")] == []

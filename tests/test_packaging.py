"""Builds the distributions as a release would and looks into them. Nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_checkout(to: Path) -> None:
    """Copies what a fresh checkout would have: a file that git ignores must not be needed, nor shipped."""
    if not (ROOT / ".git").exists():
        junk = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, to, symlinks=True, ignore=junk)
        return
    # The checkout may belong to another user, as in a container.
    git = ["git", "-c", f"safe.directory={ROOT}"]
    listed = run(*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.is_file():  # Not one that is deleted and not yet committed so.
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packaging") / "checkout"
    copy_checkout(path)
    return path


def build(checkout: Path, out: Path, *options: str) -> Path:
    command = (sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, checkout)
    run(*command, cwd=checkout.parent)
    return out


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """A folder with the source distribution and the wheel that was built from it."""
    return build(checkout, checkout.parent / "dist")


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def shipped_modules() -> set[str]:
    """Every module of the tree, by the path it has once installed."""
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "integrations").rglob("*.py")}
    modules = {f"fluid/{name}" for name in modules}
    for path in (*(ROOT / "fluid").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")):
        modules.add(path.relative_to(ROOT).as_posix())
    return modules


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    # If a package is missing here, add it to the list in pyproject.toml.
    reports = ROOT / "fluid" / "reports"
    parts = (*(reports / "page").glob("page.*"), *(reports / "index").glob("index.*"))
    page = {path.relative_to(ROOT).as_posix() for path in parts}
    assert {f"fluid/reports/page/page.{kind}" for kind in ("html", "css", "js")} < page
    assert files_in(wheel) == shipped_modules() | {"fluid/py.typed"} | page


def test_the_wheel_has_no_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry = archive.getinfo("fluid/integrations/__init__.py")
        assert entry.file_size > 0
        links = [e.filename for e in archive.infolist() if (e.external_attr >> 16) & 0o170000 == 0o120000]
    assert links == []


def test_the_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        description = archive.read(name).decode("utf-8").partition("\n\n")[2]
    assert "# Fluid\n" in description
    assert "a training script in Python | Your first sweep: six changed lines" in description
    assert [target for target in re.findall(r"\]\(([^)]+)\)", description) if "://" not in target] == []


def test_a_wheel_built_straight_from_the_tree_is_the_same(checkout: Path, wheel: Path) -> None:
    (direct,) = build(checkout, checkout.parent / "direct", "--wheel").glob("*.whl")
    assert direct.name == wheel.name
    assert files_in(direct) == files_in(wheel)


def test_the_citation_is_of_this_version() -> None:
    from fluid import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_source_distribution_holds_what_the_build_needs(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "fluid/py.typed"} <= members.keys()
    assert {"SECURITY.md", "CITATION.cff", "docs/install.md", "docs/figures/report_page.png"} <= members.keys()
    assert members["integrations/__init__.py"].isfile()
    assert not any(member.issym() or member.islnk() for member in members.values())
    assert [name for name in members if name.startswith(("tests", "benchmarks", "."))] == []


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel; its dependencies come from the environment that runs the tests."""
    path = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--target", path, wheel, cwd=path)
    return path


def test_the_installed_wheel_runs_outside_the_checkout(wheel: Path, site: Path, tmp_path: Path) -> None:
    code = "import fluid, fluid.integrations as i; from fluid import FluidExecutor, run"
    code += "; print(fluid.__version__, fluid.__file__, i.__file__)"
    version, *files = run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(site)}).split()
    assert wheel.name.startswith(f"fluid_tune-{version}-")
    assert files == [str(site / "fluid/__init__.py"), str(site / "fluid/integrations/__init__.py")]


def test_the_installed_command_prints_its_help(site: Path, tmp_path: Path) -> None:
    output = run(site / "bin" / "fluid", "--help", cwd=tmp_path, env={"PYTHONPATH": str(site)})
    assert "plan" in output


#: Standard modules of which PyPI has backports for old versions of Python, which some requirements still bring along.
BACKPORTS = ("configparser", "dataclasses", "enum", "pathlib", "selectors", "typing", "uuid")


def test_an_obsolete_backport_beside_fluid_is_not_loaded(wheel: Path, tmp_path: Path) -> None:
    """Installed as users install it, in an environment of its own; an editable install would hide it."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--target", packages, wheel, cwd=tmp_path)
    # What Fluid needs comes from the environment that runs the tests, behind what is installed.
    (packages / "requirements.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for name in BACKPORTS:
        (packages / f"{name}.py").write_text("raise ImportError('obsolete')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import fluid, pathlib\n"
        "def trial(config):\n"
        "    import fluid, pathlib\n"
        "    yield {'fluid': fluid.__file__, 'pathlib': pathlib.__file__}\n"
        "with fluid.FluidExecutor('local', 1, verbose=0) as executor:\n"
        "    (result,) = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(trial, {})])).results()\n"
        "assert result.metrics['pathlib'] == pathlib.__file__\n"
        "print(result.metrics['fluid'])\n"
    )
    variables = {"PYTHONPATH": "", "FLUID_RUNS": str(tmp_path / "runs")}
    assert run(python, script, cwd=tmp_path, env=variables).strip() == str(packages / "fluid" / "__init__.py")

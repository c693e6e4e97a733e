"""`import fluid` must stay cheap: what it loads is measured in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "ray", "matplotlib", "numpy", "rich", "horovod"]


def loaded_by(statement: str) -> set[str]:
    """Names in sys.modules after the statement ran in a new interpreter."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("statement", ["import fluid", "import fluid.integrations", "from fluid import TrialGroup"])
def test_import_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement).isdisjoint(HEAVY)


def test_a_lane_loads_nothing_heavy_by_itself() -> None:
    """What it knows of the engine are words: events and commands."""
    assert loaded_by("import fluid.backends.hosts.forkserver.main, fluid.lane.serve").isdisjoint(HEAVY)


def test_what_a_sweep_is_made_of_loads_no_optional_package() -> None:
    optional = {"torch", "ray", "mlflow", "wandb", "optuna", "pandas", "prometheus_client", "pyarrow", "sklearn"}
    statement = "import fluid; fluid.run, fluid.FluidExecutor, fluid.search, fluid.load; import fluid.loggers"
    assert loaded_by(statement).isdisjoint({*optional, "tensorboard", "matplotlib"})


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14"])
def test_another_system_is_told_what_to_do(system: str) -> None:
    """By an import, and by the command, which pip installs there, too: a script that imports its function."""
    script = f"import sys; sys.platform = {system!r}; sys.argv = [{{}}]; from fluid.cli import main; sys.exit(main())"
    ends = [
        subprocess.run([sys.executable, "-c", script.format(argv)], capture_output=True, text=True, check=False)
        for argv in ("'train.py'", "'/home/me/bin/fluid', 'doctor'", r"r'C:/Scripts/fluid.exe'")
    ]
    assert [end.returncode for end in ends] == [1, 1, 1]
    by_import, *by_command = [end.stderr.strip().splitlines() for end in ends]
    said = f"Fluid runs on Linux, and this is {system}: on Windows, install and run it in WSL2 (wsl --install); "
    assert by_import[-1].startswith(f"ImportError: {said}")
    assert [len(lines) for lines in by_command] == [1, 1]
    assert all(lines[0].startswith(said) for lines in by_command)


def test_every_logger_can_be_loaded() -> None:
    from fluid import loggers

    assert sorted(loggers.__all__) == sorted(dir(loggers))
    assert all(getattr(loggers, name) is not None for name in loggers.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = loggers.no_such_name


def test_the_measurement_can_fail() -> None:
    assert "numpy" in loaded_by("import numpy")


def test_every_public_name_can_be_loaded() -> None:
    import fluid

    assert sorted(fluid.__all__) == sorted(dir(fluid))
    for name in fluid.__all__:
        assert getattr(fluid, name) is not None


def test_packages_can_be_named_without_an_import_of_their_own() -> None:
    assert "fluid.search.domains" in loaded_by("import fluid; fluid.search.uniform(0.0, 1.0)")


def test_an_unknown_name_is_an_attribute_error() -> None:
    import fluid

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fluid.no_such_name

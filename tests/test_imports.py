"""Tests of fluid._imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluid._imports import install_command, try_import
from fluid.errors import FluidError, MissingDependencyError


def test_nothing_happens_when_the_import_works() -> None:
    with try_import("json", extra="plot") as imports:
        import json
    imports.check()
    assert imports.available
    assert json.loads("1") == 1


def test_a_missing_package_fails_late_with_the_install_command() -> None:
    with try_import("no_such_package", extra="plot") as imports:
        import no_such_package  # noqa: F401
    assert not imports.available
    with pytest.raises(MissingDependencyError) as caught:
        imports.check()
    message = str(caught.value)
    assert "needs no_such_package, which is not installed" in message
    assert "pip install 'matplotlib>=3.7'" in message
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_install_command_is_what_the_extra_asks_for() -> None:
    assert install_command("ray").startswith("pip install 'ray[tune]>=")
    assert install_command("hpbandster").count("'") == 4, "two packages, each in quotes"
    assert install_command("newer-than-installed") == "pip install '.[newer-than-installed]' in the checkout of Fluid"


def test_check_raises_every_time() -> None:
    with try_import("no_such_package", extra="plot") as imports:
        import no_such_package  # noqa: F401
    for _ in range(2):
        with pytest.raises(MissingDependencyError):
            imports.check()


def test_the_error_is_an_import_error_too() -> None:
    assert issubclass(MissingDependencyError, ImportError)
    assert issubclass(MissingDependencyError, FluidError)


def test_a_broken_package_is_not_called_missing() -> None:
    with try_import("json", extra="plot") as imports:
        from json import no_such_name  # noqa: F401
    with pytest.raises(MissingDependencyError, match=r"needs json, which is installed and cannot be .*no_such_name"):
        imports.check()


def test_an_install_command_of_its_own() -> None:
    with try_import("no_such_package", install="make no-such-package") as imports:
        import no_such_package  # noqa: F401
    with pytest.raises(MissingDependencyError, match="to install it: make no-such-package"):
        imports.check()


@pytest.mark.parametrize("error", ["TypeError('first line\\nsecond line')", "RuntimeError()", "SyntaxError('old')"])
def test_whatever_a_package_raises_is_kept(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with try_import("broken", extra="plot") as imports:
        import broken_package  # noqa: F401
    with pytest.raises(MissingDependencyError) as caught:
        imports.check()
    kind, _, said = error.partition("(")
    first = said.strip("')").split("\\n")[0] or "without a word"
    assert f"needs broken, which is installed and cannot be imported ({kind}: {first}); to install" in str(caught.value)
    assert repr(caught.value.__cause__) == repr(eval(error))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_passes_through(error: type[BaseException]) -> None:
    with pytest.raises(error), try_import("json", extra="plot"):
        raise error


def test_a_bug_of_fluid_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "__name__", "fluid.tune")

    def import_of_a_module() -> None:
        raise TypeError("ours")

    with pytest.raises(TypeError, match="ours"), try_import("json", extra="plot"):
        import_of_a_module()


def test_a_missing_module_of_fluid_passes_through() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), try_import("json", extra="plot"):
        import fluid.no_such_module  # noqa: F401


@pytest.mark.parametrize("arguments", [{}, {"extra": "plot", "install": "make plot"}])
def test_exactly_one_way_to_install(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        try_import("json", **arguments)

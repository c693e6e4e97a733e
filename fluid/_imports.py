"""Imports of optional dependencies.

A missing package must not break ``import fluid...``. The error is kept, and raised with the install command when a
feature that needs the package is used::

    with try_import("matplotlib", extra="plot") as _imports:
        import matplotlib

    def draw() -> None:
        _imports.check()
        ...
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from fluid.errors import MissingDependencyError


def install_command(extra: str) -> str:
    """Returns the command that installs what an extra of Fluid asks for, wherever Fluid itself came from.

    Example:
        >>> install_command("plot")
        "pip install 'matplotlib>=3.7'"
    """
    from importlib.metadata import PackageNotFoundError, requires  # Takes longer to import than all of Fluid.

    listed: list[str] = []
    with contextlib.suppress(PackageNotFoundError):  # Fluid runs from a checkout that was not installed.
        listed = requires("fluid-tune") or []
    parts = [requirement.partition(";") for requirement in listed]
    wanted = [name.strip() for name, _, marker in parts if marker.replace("'", '"').strip() == f'extra == "{extra}"']
    if not wanted:
        return f"pip install '.[{extra}]' in the checkout of Fluid"
    return "pip install " + " ".join(f"'{name}'" for name in wanted)


class try_import:
    """Context manager that delays the import error of an optional dependency.

    Args:
        package: the package's name (``"matplotlib"``).
        extra: the extra of Fluid that asks for it, for the install command.
        install: the install command itself, for a package that no extra can install.

    Raises:
        ValueError: not exactly one of ``extra`` and ``install`` is given.
    """

    def __init__(self, package: str, *, extra: str | None = None, install: str | None = None) -> None:
        if (extra is None) == (install is None):
            raise ValueError(f"try_import({package!r}) takes exactly one of extra and install")
        self._package = package
        self._extra = extra
        self._install = install
        #: The import error; None while there was none.
        self._error: ImportError | None = None

    def __enter__(self) -> try_import:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(exc, ImportError) or _is_ours(exc):
            return False
        self._error = exc
        return True

    @property
    def available(self) -> bool:
        """Whether the imports of the block succeeded."""
        return self._error is None

    def check(self) -> None:
        """Does nothing if the imports succeeded.

        Raises:
            MissingDependencyError: they did not. The message names the package and holds the install command;
                the original error is the cause.
        """
        if self._error is None:
            return
        # An installed package may be broken or too old to have the name: "not installed" would mislead.
        missing = isinstance(self._error, ModuleNotFoundError)
        problem = "is not installed" if missing else "cannot be imported"
        install = self._install or install_command(str(self._extra))
        message = f"this needs {self._package}, which {problem} ({self._error}); to install it: {install}"
        raise MissingDependencyError(message) from self._error


def _is_ours(error: ImportError) -> bool:
    # A module of Fluid that cannot be imported is a bug of Fluid, not a missing dependency.
    return error.name is not None and error.name.split(".")[0] == "fluid"

"""Imports of optional dependencies.

A package that is missing, or broken, must not break ``import fluid...``. The error is kept, whatever it is, and raised
with the install command when a feature that needs the package is used::

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
    """Context manager that delays what the import of an optional dependency raises.

    A package that is installed may raise anything as it is imported, such as the ``TypeError`` of generated code that
    is too old for its protobuf. ``KeyboardInterrupt`` and ``SystemExit`` pass.

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
        #: What the imports raised; None if nothing.
        self._error: Exception | None = None

    def __enter__(self) -> try_import:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(exc, Exception) or _is_ours(exc):
            return False
        self._error = exc
        return True

    @property
    def available(self) -> bool:
        """Whether the imports of the block succeeded."""
        return self._error is None

    @property
    def problem(self) -> str:
        """Why the imports failed, as a clause about the package; empty if they did not."""
        if self._error is None:
            return ""
        said = (str(self._error).strip().splitlines() or ["without a word"])[0]
        if isinstance(self._error, ModuleNotFoundError):
            return f"is not installed ({said})"
        return f"is installed and cannot be imported ({type(self._error).__name__}: {said})"

    def check(self) -> None:
        """Does nothing if the imports succeeded.

        Raises:
            MissingDependencyError: they did not. The message names the package and holds the install command;
                the original error is the cause.
        """
        if self._error is None:
            return
        install, how = self._install or install_command(str(self._extra)), "to install it"
        if not isinstance(self._error, ModuleNotFoundError):  # For pip, what is installed is all right.
            install, how = install.replace("pip install", "pip install --force-reinstall", 1), "to install it anew"
        message = f"this needs {self._package}, which {self.problem}; {how}: {install}"
        raise MissingDependencyError(message) from self._error


def _is_ours(error: Exception) -> bool:
    """Whether a module of Fluid that the block imports cannot be imported: a bug of Fluid, not of the package."""
    if isinstance(error, ImportError):
        return error.name is not None and error.name.split(".")[0] == "fluid"
    inner = outer = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        inner = inner.tb_next
    if inner is None or inner is outer:
        return False  # Raised by native code of the package, which has no frame.
    return str(inner.tb_frame.f_globals.get("__name__")).split(".")[0] == "fluid"

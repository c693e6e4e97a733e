"""Adapts the API to the site: roles of docstrings as code, private parameters left out, defaults as values."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?([\w.]+)`")
_CONSTANT = re.compile(r"_?[A-Z][A-Z_]+$")
#: The site shows doctests as code in a section of the plural name only.
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites every docstring that is read. A role without an entry on the page stays plain text."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", text)

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Rewrites a signature once all is read, so that constants of other modules can be looked up."""
        for parameter in list(func.parameters):
            if parameter.name.startswith("_"):
                del func.parameters[parameter.name]
            else:
                parameter.default = _value_of(parameter.default, loader)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Lets a data class whose fields are all private have no signature: another function makes it."""
        if "dataclass" in cls.labels and "__init__" in cls.members:
            made = cls.members["__init__"]
            if made.is_function and all(parameter.name.startswith(("_", "self")) for parameter in made.parameters):
                del cls.members["__init__"]


def _value_of(default: Any, loader: griffe.GriffeLoader) -> Any:
    """Returns what a constant such as ``DEFAULT_MAX_FUSED`` stands for, which tells a reader more than its name."""
    if not isinstance(default, griffe.ExprName) or not _CONSTANT.match(default.name):
        return default
    try:
        constant = loader.modules_collection[default.canonical_path]
        constant = constant.final_target if constant.is_alias else constant
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError, griffe.NameResolutionError):
        return default
    return _value_of(constant.value, loader) if constant.is_attribute and constant.value is not None else default

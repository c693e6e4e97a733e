"""Adapts docstrings to the site: links of roles such as ``:class:`TrialGroup```, and examples as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?([\w.]+)`")
#: The site shows doctests as code in a section of the plural name only.
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites every docstring that is read. A role without an entry on the page stays plain text."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", text)

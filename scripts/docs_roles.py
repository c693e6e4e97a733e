"""Makes links of the roles in docstrings, such as ``:class:`TrialGroup```, when the site is built."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites every docstring that is read. What has no entry on the page stays plain text."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)

"""The line of a group in ``trials.jsonl``: its name, its search, what it requires of devices, and its terms."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from fluid.engine.events import PLAIN_TERMS, GroupTerms
from fluid.errors import InvalidFieldError, require_number, require_text
from fluid.resources import Requires
from fluid.results.folder_files import read_search
from fluid.trialgroup import Search


@dataclass(frozen=True, slots=True)
class GroupLine:
    """What the line says of a group.

    Attributes:
        name: its name.
        search: what its search algorithm said of it; ``None`` if none submits its trials.
        requires: what its trials require of devices, where they do not say otherwise; ``None`` for nothing.
        terms: whose group it is, and how urgent.
    """

    name: str
    search: Search | None = None
    requires: Requires | None = None
    terms: GroupTerms = PLAIN_TERMS

    def entry(self, group_id: str) -> dict[str, Any]:
        """The line as a JSON object; what is as it is by default is left out."""
        entry: dict[str, Any] = {"group": group_id, "name": self.name}
        if self.search is not None:
            entry |= asdict(self.search)
        for name in ("owner", "priority", "preempt"):
            if (value := getattr(self.terms, name)) != getattr(PLAIN_TERMS, name):
                entry[name] = value
        if self.requires is not None:
            asked = ((field.name, getattr(self.requires, field.name), field.default) for field in fields(Requires))
            entry["requires"] = {name: value for name, value, default in asked if value != default}
        return entry

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> GroupLine:
        """Reads a line; what it lacks, or cannot be used, is as it is by default."""
        group_id = str(entry.get("group", ""))
        search = read_search(entry)
        expected = None if search is None else search.trials
        return cls(str(entry.get("name") or group_id), search, _requires(entry), _terms(entry, expected))


def _terms(entry: Mapping[str, Any], expected: int | None) -> GroupTerms:
    owner, priority = None, PLAIN_TERMS.priority
    with suppress(InvalidFieldError):
        owner = require_text("owner", entry["owner"]) if "owner" in entry else None
    with suppress(InvalidFieldError):
        priority = require_number("priority", entry.get("priority", priority), at_least=0.0)
    return GroupTerms(owner, priority, entry.get("preempt") is True, expected)


def _requires(entry: Mapping[str, Any]) -> Requires | None:
    asked = entry.get("requires")
    if not isinstance(asked, Mapping):
        return None
    try:
        return Requires(**asked)
    except (InvalidFieldError, TypeError):
        return None

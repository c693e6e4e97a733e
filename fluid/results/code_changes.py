"""Lines of ``trials.jsonl`` that tell which trials went on with other code than they, or others, began with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Most names and trials that a sentence has.
_MOST_NAMES = 8


@dataclass(frozen=True)
class CodeChange:
    """What of the code of a group had changed when a session went on.

    Attributes:
        group_id: the group.
        changed: names of what the user has given otherwise than the folder has it.
        imported: names of what has changed in modules that trials import, so that the code before is gone.
        taken: trials that go on with the new code of all that, by id, with the iterations that they had reported.
        kept: trials that go on with the code of ``changed`` that they began with, likewise.
    """

    group_id: str
    changed: tuple[str, ...]
    imported: tuple[str, ...] = ()
    taken: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return {"code_of": self.group_id, **{name: getattr(self, name) for name in _FIELDS}}

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> CodeChange | None:
        """Reads a line; ``None`` of any other one."""
        if "code_of" not in entry or not all(isinstance(entry.get(name), kind) for name, kind in _FIELDS.items()):
            return None
        changed, imported = (tuple(map(str, entry[name])) for name in ("changed", "imported"))
        return cls(str(entry["code_of"]), changed, imported, dict(entry["taken"]), dict(entry["kept"]))

    def warning(self, group: str) -> str:
        """Tells the user, as the session goes on."""
        kept = f"{_trials(self.kept)} that had begun keep the old code (code='new' gives it to all)"
        return f"{self._what(group)} since the session before: {self._who(kept)}"

    def note(self, group: str) -> str:
        """Tells the reader of the results."""
        since = "; trials that were submitted since have the new one" if self.changed else ""
        who = self._who(f"{_trials(self.kept)} kept the old code")
        return f"{self._what(group)} between two sessions: {who}{since}."

    def _what(self, group: str) -> str:
        names = dict.fromkeys((*self.changed, *self.imported))
        return f"{group}: {_listed(names)} changed"

    def _who(self, kept: str) -> str:
        parts = []
        if self.taken:
            parts.append(f"{_trials(self.taken, from_iteration=True)} took the new code")
        if self.kept:
            parts.append(kept)
            if self.imported:
                parts.append(f"but for {_listed(self.imported)}, which is imported, so that the old code is gone")
        return "; ".join(parts)


_FIELDS: dict[str, type] = {"changed": list, "imported": list, "taken": dict, "kept": dict}


def code_notes(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One sentence for each change that ``trials.jsonl`` tells of."""
    names: dict[str, str] = {}
    for entry in entries:
        if "trial" not in entry and "group" in entry:
            names.setdefault(str(entry["group"]), str(entry.get("name") or entry["group"]))
        elif (change := CodeChange.read(entry)) is not None:
            yield change.note(names.get(change.group_id, change.group_id))


def _trials(ids: Mapping[str, int], *, from_iteration: bool = False) -> str:
    """How many trials, and which; of those that had reported something, from which iteration on."""
    named = [f"{name} from iteration {n + 1}" if n and from_iteration else name for name, n in ids.items()]
    return f"{len(ids)} trial{'s' if len(ids) > 1 else ''} ({_listed(named)})"


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    rest = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return ", ".join(known[:_MOST_NAMES]) + rest

"""The command of a script, with placeholders for what a trial has: pure text, and nothing is run by a shell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.user_values import dotted

#: Placeholders that every command may have, besides those of the space.
OWN = {
    "trial_id": "the trial's name",
    "trial_dir": "the trial's own folder, which exists",
    "checkpoint": "where the script writes its checkpoint, a file or a folder in that",
    "budget": "the most iterations of a trial",
    "config": "all hyperparameters as JSON",
    "config_file": "a file in the trial's folder with these",
}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}

_PART = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")


@dataclass(frozen=True)
class Command:
    """A command and its placeholders.

    Example:
        >>> from fluid.scripts.command import Command
        >>> command = Command.checked(["train.py", "--lr={lr}", "{{x}}"], ["lr"])
        >>> command.words({"lr": 0.1}, {})
        ['train.py', '--lr=0.1', '{x}']
        >>> Command.checked(["train.py"], ["lr", "model.depth"]).words({"lr": 0.1, "model": {"depth": 2}}, {})
        ['train.py', '--lr=0.1', '--model.depth=2']

    Attributes:
        template: the words, with their placeholders.
    """

    template: tuple[str, ...]

    @classmethod
    def checked(cls, words: Sequence[str], names: Sequence[str], *, in_environment: bool = False) -> Command:
        """A command for a space; where it names no parameter, ``--name=value`` is appended for each.

        Args:
            words: the command's.
            names: of the space's parameters, those of nested ones joined by a dot.
            in_environment: whether the script reads ``FLUID_CONFIG``, so that it needs no argument.

        Raises:
            InvalidFieldError: there is no word, a placeholder is not known, or a parameter has none while others do.
        """
        if not words:
            raise InvalidFieldError("command", "", "must be the script's command, as in: -- python train.py --lr {lr}")
        known = {*OWN, *names}
        if taken := sorted(set(OWN) & set(names)):
            raise InvalidFieldError("space", taken[0], "is the name of a placeholder of Fluid's: choose another one")
        used = list(_placeholders(words, known))
        unused = [name for name in names if name not in used]
        takes_all = in_environment or "config" in used or "config_file" in used
        if not unused or takes_all:
            return cls(tuple(words))
        if len(unused) < len(names):
            reason = f"has no placeholder {{{unused[0]}}}, a parameter of the space, which so would change nothing"
            raise InvalidFieldError("command", " ".join(words), reason)
        return cls((*words, *(f"--{name}={{{name}}}" for name in names)))

    @property
    def placeholders(self) -> list[str]:
        """The placeholders, in their order."""
        return list(_placeholders(self.template))

    def words(self, config: Mapping[str, Any], own: Mapping[str, str]) -> list[str]:
        """The command of a trial.

        Args:
            config: the trial's.
            own: values of the placeholders of :data:`OWN`.
        """
        return filled(self.template, config, own)


def filled(template: Sequence[str], config: Mapping[str, Any], own: Mapping[str, str]) -> list[str]:
    """Words with their placeholders replaced; a name that the config of a conditional space lacks is empty text."""
    values = {**{name: text_of(value) for name, value in dotted(config)}, "config": json.dumps(config), **own}
    return [_PART.sub(lambda found: _value_of(found[0], values), word) for word in template]


def require_placeholders(field: str, words: Sequence[str], known: Sequence[str]) -> None:
    """Refuses words with a placeholder that is not known.

    Raises:
        InvalidFieldError: there is one.
    """
    list(_placeholders(words, set(known), field))


def text_of(value: Any) -> str:
    """A value as an argument: text as it is, lists as JSON, all else as Python writes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (list, dict)) else repr(value)


def value_of(text: str) -> Any:
    """A value of the type that its text has: a whole number, a number, true, false, none, else text."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    return _WORDS.get(text.lower(), text)


def _placeholders(
    words: Sequence[str], known: set[str] | frozenset[str] | None = None, field: str = "command"
) -> Iterator[str]:
    for word in words:
        for part in _PART.findall(word):
            if part in ("{{", "}}"):
                continue
            name = part.strip("{}")
            if known is not None and (len(part) == 1 or name not in known):
                what = "a brace alone" if len(part) == 1 else f"{part} is no placeholder"
                reason = f"{what}: there are {', '.join(sorted(known))}; write {{{{ and }}}} for braces"
                raise InvalidFieldError(field, word, reason)
            yield name


def _value_of(part: str, values: Mapping[str, str]) -> str:
    return part[0] if part in ("{{", "}}") else values.get(part[1:-1], "")

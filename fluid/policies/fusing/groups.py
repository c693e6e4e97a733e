"""Predicts which trials can be fused: learns which fields of their configs decide the fusion key.

A trial's fusion key is known only once it was set up in a lane. The engine places trials before that, and those that
share a pack should have equal keys. Most spaces have some fields that decide the model's shape, and others that do not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

#: Newest trials that are kept per profile key.
MOST_LEARNT = 300
#: Most characters of a value in a name.
_LONGEST_VALUE = 40
#: Stands for a field that a config does not have.
_ABSENT = "(absent)"

Config = tuple[tuple[str, object], ...]
Group = tuple[tuple[str, object], ...]


class FusionGroups:
    """Groups trials of each profile key by the config fields that decide the fusion key, as far as is known.

    No field decides at first. Fields are chosen anew when a trial contradicts them: when it has another key than a
    trial of its group, or the key of another group. Chosen is one field after the other among those that tell some
    trials of unlike keys in one group apart, until no group has two keys. The next is the one that

    1. tells the fewest trials of equal keys apart, which a field that decides never does, or only together with others,
    2. is not a float: shapes are integers or names,
    3. has the fewest values: a seed, which is another one in each trial, would explain everything,
    4. leaves the fewest pairs of unlike keys in one group,
    5. comes first by name.

    Fields that are superfluous in the end are dropped. Values are compared by ``repr``, so they may be of any type;
    numpy's scalars are those of Python.

    Pure, and cheap: usually O(1) per trial, O(``MOST_LEARNT``) times the number of fields when fields are chosen.

    Example:
        >>> from fluid.policies.fusing.groups import FusionGroups
        >>> groups = FusionGroups()
        >>> groups.learn("Net", (("lr", 0.1), ("width", 32)), "a")
        False
        >>> groups.learn("Net", (("lr", 0.2), ("width", 64)), "b")
        True
        >>> groups.name("Net", (("lr", 0.3), ("width", 64)))
        'Net [width=64]'
    """

    def __init__(self) -> None:
        self._keys: dict[str, _DecidingFields] = {}

    def learn(self, key: str, config: Config, fusion_key: str) -> bool:
        """Adds a trial whose fusion key is known.

        Args:
            key: the trial's profile key.
            config: values of its config by dotted name.
            fusion_key: the key that its lane reported.

        Returns:
            Whether groups are others than before: other fields decide, or trials of a group turned out not to fuse.
        """
        return self._keys.setdefault(key, _DecidingFields()).learn(_texts(config), fusion_key)

    def group(self, key: str, config: Config) -> Group | None:
        """The deciding fields with their values as text; trials of equal groups are expected to fuse.

        ``None`` as long as no trial of the profile key was learnt. Trials of equal configs may have reported unlike
        keys, as when ``build`` is not deterministic. Such a trial is expected to fuse with none: each call for one
        returns a group that equals no other.
        """
        learnt = self._keys.get(key)
        if learnt is None:
            return None
        values = _KeyedTrial(_texts(config), "").of(learnt.fields)
        known: Group = tuple(zip(learnt.fields, values, strict=True))
        return (*known, ("", _Unlike())) if values in learnt.mixed else known

    def fields(self, key: str) -> tuple[str, ...]:
        """The names of the deciding fields, sorted."""
        learnt = self._keys.get(key)
        return () if learnt is None else learnt.fields

    def name(self, key: str, config: Config) -> str:
        """The group's name for people and profiles: the profile key, and the deciding fields, sorted by name."""
        learnt = self._keys.get(key)
        if learnt is None or not learnt.fields:
            return key
        trial = _KeyedTrial(_texts(config), "")
        return f"{key} [{', '.join(f'{name}={_short(trial.value(name))}' for name in learnt.fields)}]"


class _Unlike:
    """Equals itself only."""

    def __repr__(self) -> str:
        return "fuses with none"


@dataclass(frozen=True, slots=True)
class _KeyedTrial:
    values: Mapping[str, str]
    fusion_key: str

    def value(self, name: str) -> str:
        return self.values.get(name, _ABSENT)

    def of(self, fields: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self.value, fields))


@dataclass(slots=True)
class _DecidingFields:
    """What is known of one profile key."""

    fields: tuple[str, ...] = ()
    trials: deque[_KeyedTrial] = field(default_factory=lambda: deque(maxlen=MOST_LEARNT))
    #: Fusion keys by group, groups by fusion key, and groups with more than one key: those of the trials that were kept
    #: when fields were last chosen, and of all since.
    keys: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    groups: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    mixed: set[tuple[str, ...]] = field(default_factory=set)
    #: Trials seen, and how many must be until fields are chosen anew for a reason for which that was in vain.
    seen: int = 0
    again: int = 0

    def learn(self, values: Mapping[str, str], fusion_key: str) -> bool:
        trial = _KeyedTrial(values, fusion_key)
        self.trials.append(trial)
        self.seen += 1
        group = trial.of(self.fields)
        if fusion_key in self.keys.get(group, ()):
            return False
        was_mixed = group in self.mixed
        self._index(trial)
        became_mixed = group in self.mixed and not was_mixed
        # These need not be the choice's fault: a field may decide in some trials only, trials of equal configs differ.
        in_doubt = was_mixed or len(self.groups[fusion_key]) > 1
        if not (became_mixed or (in_doubt and self.seen >= self.again)):
            return False
        before, self.fields = self.fields, _deciding(self.trials)
        self.keys, self.groups, self.mixed = {}, {}, set()
        for each in self.trials:
            self._index(each)
        if self.fields == before:
            self.again = self.seen + self.seen // 4 + 1
        return self.fields != before or (became_mixed and trial.of(self.fields) in self.mixed)

    def _index(self, trial: _KeyedTrial) -> None:
        group = trial.of(self.fields)
        self.keys.setdefault(group, set()).add(trial.fusion_key)
        self.groups.setdefault(trial.fusion_key, set()).add(group)
        if len(self.keys[group]) > 1:
            self.mixed.add(group)


def _deciding(trials: Collection[_KeyedTrial]) -> tuple[str, ...]:
    """The fields, sorted, by which no group has two fusion keys, unless trials differ in nothing else."""
    names = sorted({name for trial in trials for name in trial.values})
    chosen: list[str] = []
    while clashing := _clashing(trials, chosen):
        before = sum(map(_conflicts, clashing))
        candidates = []
        for name in names:
            parts = [part for group in clashing for part in _parts(group, [name])]
            left = sum(map(_conflicts, parts))
            if left < before:
                splits = sum(map(_alike, clashing)) - sum(map(_alike, parts))
                values = {trial.value(name) for group in clashing for trial in group}
                candidates.append((splits, any(map(_is_float, values)), len(values), left, name))
        if not candidates:
            break
        chosen.append(min(candidates)[-1])
    for name in list(chosen):
        others = [other for other in chosen if other != name]
        if sum(map(_conflicts, _parts(trials, others))) == sum(map(_conflicts, _parts(trials, chosen))):
            chosen = others
    return tuple(sorted(chosen))


def _parts(trials: Iterable[_KeyedTrial], fields: Sequence[str]) -> list[list[_KeyedTrial]]:
    """The trials by their values of some fields."""
    parts: defaultdict[tuple[str, ...], list[_KeyedTrial]] = defaultdict(list)
    for trial in trials:
        parts[trial.of(fields)].append(trial)
    return list(parts.values())


def _clashing(trials: Iterable[_KeyedTrial], fields: Sequence[str]) -> list[list[_KeyedTrial]]:
    """The groups with more than one fusion key."""
    return [group for group in _parts(trials, fields) if len({trial.fusion_key for trial in group}) > 1]


def _alike(group: Sequence[_KeyedTrial]) -> int:
    """Pairs of trials in a group with equal fusion keys."""
    return sum(count * (count - 1) // 2 for count in Counter(trial.fusion_key for trial in group).values())


def _conflicts(group: Sequence[_KeyedTrial]) -> int:
    """Pairs of trials in a group with unlike fusion keys."""
    return len(group) * (len(group) - 1) // 2 - _alike(group)


def _is_float(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and not text.lstrip("-").isdecimal()
    except ValueError:
        return False


def _texts(config: Config) -> dict[str, str]:
    return {name: text_of(value) for name, value in config}


def text_of(value: object) -> str:
    """The text by which a value of a config is compared with others; of a text, itself."""
    if isinstance(value, str):
        return value
    try:
        return repr(value.item() if isinstance(value, np.generic) else value)
    except Exception as error:  # of the user's class
        return f"a {type(value).__name__} without a repr ({type(error).__name__})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_VALUE else f"{line[: _LONGEST_VALUE - 3]}..."

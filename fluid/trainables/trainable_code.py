"""The code of a trainable, in a form that another process can compare: whether it has changed, and what of it.

Compared is what the user has written: the functions and classes that a trainable refers to, directly or not, and the
plain values (numbers, texts, and lists, dicts and so on of these) that its functions read: global names, closures,
defaults, and attributes of classes. Not compared are installed packages, data, objects of other kinds, comments,
docstrings, and modules that a function imports while it runs and the driver has not loaded. Where two programs may
have given different bytecode for the same text, as two versions of Python do, nothing is said to have changed.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

#: Most objects that are visited, and most values in a collection that is compared.
_MOST_OBJECTS, _MOST_VALUES = 1000, 1000
_DIGEST_BYTES = 8
#: Instructions that say nothing about what code does; which there are follows from where lines break.
_PADDING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))
#: What Python adds to classes.
_ADDED = frozenset({"_abc_impl", "__annotations__", "__doc__", "__firstlineno__", "__module__", "__slotnames__"})
#: What is compared as code, if at all.
_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
#: Stands for what code refers to and is not compared.
_UNSEEN = object()
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True, slots=True)
class TrainableCode:
    """The code of a trainable.

    Attributes:
        compiled_by: what turned the text into bytecode; codes of two of them are not compared.
        parts: a digest of each function, class and value, by its name.
        is_whole: whether all of them were visited.
    """

    compiled_by: str
    parts: Mapping[str, str]
    is_whole: bool = True

    def changed_since(self, earlier: TrainableCode) -> tuple[str, ...]:
        """Names of what differs from an earlier code, sorted; none where the two cannot be compared."""
        if self.compiled_by != earlier.compiled_by:
            return ()
        names = self.parts.keys() & earlier.parts.keys()
        if self.is_whole and earlier.is_whole:
            names = self.parts.keys() | earlier.parts.keys()
        return tuple(sorted(name for name in names if self.parts.get(name) != earlier.parts.get(name)))

    def entry(self) -> dict[str, Any]:
        """Its form in a file."""
        return {"compiled_by": self.compiled_by, "parts": dict(self.parts), "is_whole": self.is_whole}

    @classmethod
    def read(cls, entry: Any) -> TrainableCode | None:
        """Reads that form; ``None`` of anything else."""
        if not isinstance(entry, Mapping) or not isinstance(entry.get("parts"), Mapping):
            return None
        parts = {str(name): str(digest) for name, digest in entry["parts"].items()}
        return cls(str(entry.get("compiled_by")), parts, entry.get("is_whole") is True)


def code_of(trainable: Any) -> TrainableCode | None:
    """Returns the code of a trainable, as it is now; ``None`` if it cannot be read. Runs nothing of it.

    Example:
        >>> from fluid.trainables.trainable_code import code_of
        >>> rate = 0.1
        >>> def half(x):
        ...     return x / 2
        >>> def train(config):
        ...     yield {"loss": half(rate)}
        >>> before = code_of(train)
        >>> def half(x):
        ...     return 0.5 * x
        >>> code_of(train).changed_since(before)
        ('half',)
    """
    try:
        walk = _Walk(trainable)
    except Exception:  # Objects of the user's may raise anything as they are looked at.
        return None
    parts = {name: _digest(*sorted(texts)) for name, texts in walk.parts.items()}
    compiled_by = f"{sys.implementation.cache_tag} {importlib.util.MAGIC_NUMBER.hex()} -O{sys.flags.optimize}"
    return TrainableCode(compiled_by, parts, walk.is_whole)


def objects_of(trainable: Any) -> list[str] | None:
    """Digests of the objects that a trainable refers to and that :func:`code_of` does not compare, by their pickles.

    Those are objects of other kinds than plain values, such as settings of a class and data. ``None`` where some code
    or object escapes both: a module of the user's that a function imports while it runs, or what cannot be pickled.
    """
    try:
        walk = _Walk(trainable)
        if not (walk.is_whole and walk.is_seen):
            return None
        found = {f"{label} {_object_digest(value)}" for label, value in walk.objects}
    except Exception:  # Objects of the user's may raise anything as they are looked at.
        return None
    return sorted(found)


def _object_digest(value: Any) -> str:
    made = hashlib.sha256()
    _ContentPickler(_Sink(made.update)).dump(value)
    return made.hexdigest()


class _Sink(NamedTuple):
    """A file of which only the digest is kept."""

    write: Callable[[Any], None]


class _ContentPickler(pickle.Pickler):
    """Pickles tensors by their content: PyTorch's own pickles of them have addresses, which each process has anew."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ([str(type(value)), str(value.dtype), tuple(value.shape), value.requires_grad, data],)


class _Walk:
    """Visits what a trainable refers to.

    Attributes:
        parts: texts of what is compared, by name.
        objects: what is held besides code and plain values, with its name.
        is_whole: whether all was visited.
        is_seen: whether nothing was met of which it is unknown what it refers to.
    """

    def __init__(self, trainable: Any) -> None:
        self.parts: dict[str, set[str]] = {}
        self.objects: list[tuple[str, Any]] = []
        self.is_seen = True
        self._home = ""
        self._seen: dict[int, Any] = {}  # Keeps what was visited, so that no id is used twice.
        self._users: dict[str, bool] = {}
        self._queue: list[Any] = []
        self._take_root(trainable)
        while self._queue and len(self._seen) < _MOST_OBJECTS:
            self._visit(self._queue.pop())
        self.is_whole = not self._queue

    def _take_root(self, trainable: Any) -> None:
        """Queues the trainable; of one that is an object of a class, what it holds is compared, too."""
        while isinstance(trainable, functools.partial):
            for name, value in (*enumerate(trainable.args), *trainable.keywords.items()):
                self._note_value(f"argument {name}", value)
            trainable = trainable.func
        self._home = _module_of(trainable)
        self._queue.append(trainable)
        held = trainable.__self__ if isinstance(trainable, MethodType) else trainable
        if not isinstance(held, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            for name, value in sorted(_vars_of(held).items()):
                self._note_value(f"attribute {name}", value)
        elif isinstance(held, type) and not self._is_users(held.__module__):
            self._queue += vars(held).values()  # A package made the class, around what the user has written.

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            self._queue += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value, self._label(_module_of(value), value.__qualname__))
        elif isinstance(value, MethodType):
            self._queue += [value.__func__, value.__self__]
        elif isinstance(value, (staticmethod, classmethod)):
            self._queue.append(value.__func__)
        elif isinstance(value, property):
            self._queue += [value.fget, value.fset]
        elif not isinstance(value, (*_PLAIN, ModuleType)):
            wrapped = _vars_of(value).get("__wrapped__")
            self._queue += [type(value)] if wrapped is None else [type(value), wrapped]

    def _visit_class(self, cls: type) -> None:
        if not self._is_users(cls.__module__):
            return
        label = self._label(cls.__module__, cls.__name__)  # A pickled class loses its qualified name.
        self._note(label, "class", *(self._label(base.__module__, base.__name__) for base in cls.__bases__))
        self._queue += cls.__bases__
        for name, value in sorted(vars(cls).items()):
            if name in _ADDED or (issubclass(cls, Enum) and name.startswith("_")):
                continue
            for function in _functions_in(value):
                self._seen[id(function)] = function
                self._visit_function(function, f"{label}.{name}")
            if not name.startswith("__") or name == "__slots__":
                self._note_value(f"{label}.{name}", value)

    def _visit_function(self, function: FunctionType, label: str) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        held = {name: _contents(cell) for name, cell in cells.items()}
        if not self._is_users(_module_of(function)):
            # Of an installed package, as a decorator: what it was made around may be the user's.
            self._queue += [value for value in held.values() if isinstance(value, (type, FunctionType, MethodType))]
            self._queue.append(vars(function).get("__wrapped__"))
            return
        self._note(label, _code_text(function.__code__))
        for name, value in held.items():
            self._note_value(f"{name} of {label}", value)
        defaults = (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        for place, value in defaults:
            self._note_value(f"default {place} of {label}", value)
        self._queue.append(vars(function).get("__wrapped__"))
        for name, value in _globals_of(function.__code__, function.__globals__):
            self._note_value(self._label(name.rpartition(".")[0] or _module_of(function), name), value)

    def _note_value(self, label: str, value: Any) -> None:
        """Compares a plain value; visits anything else."""
        text = value_text(value)
        if text is not None:
            self._note(label, "value", text)
            return
        if value is _UNSEEN or (isinstance(value, ModuleType) and self._is_users(value.__name__)):
            self.is_seen = False
            return
        if not (isinstance(value, _CODE) or inspect.isdatadescriptor(value) or any(_functions_in(value))):
            self.objects.append((label, value))
        if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MOST_VALUES:
            self._queue += value
        elif isinstance(value, dict) and len(value) <= _MOST_VALUES:
            self._queue += value.values()
        else:
            self._queue.append(value)

    def _note(self, label: str, *texts: str) -> None:
        self.parts.setdefault(label, set()).add("\0".join(texts))

    def _label(self, module: str, name: str) -> str:
        """The name of something, for people: without the module where that is the trainable's own."""
        name = name.rpartition("<locals>.")[2]
        return name if module == self._home or name.startswith(f"{module}.") else f"{module}.{name}"

    def _is_users(self, module: str) -> bool:
        """Whether the user has written a module: it is of no installed package."""
        if module not in self._users:
            self._users[module] = _is_written_by_user(module)
        return self._users[module]


def _is_written_by_user(module: str) -> bool:
    top = module.partition(".")[0]
    if top == "__main__":
        return True
    if top in sys.stdlib_module_names or top == "fluid":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):
        return True  # Such as a notebook's, or one that exists in the driver only.
    return not _is_in_packages(file)


def _is_in_packages(file: str) -> bool:
    return file.startswith(_INSTALLED) or bool({"site-packages", "dist-packages"} & set(PurePath(file).parts))


def _module_of(value: Any) -> str:
    """The module of something; of a function that one, in which its code looks up names, whatever wrapped it."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__") or value.__module__)
    return str(value.__module__ if isinstance(value, type) else type(value).__module__)


def _vars_of(value: Any) -> Mapping[str, Any]:
    found = inspect.getattr_static(value, "__dict__", None)
    return value.__dict__ if found is not None and isinstance(value.__dict__, dict) else {}


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # Not assigned yet.


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions that an attribute of a class is made of."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _functions_in(part)
    elif isinstance(value, functools.cached_property):
        yield from _functions_in(value.func)


def _globals_of(code: CodeType, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The global names that code reads, with their values; of a module, the names in it: ``helpers.rate``.

    A module of the user's of which it is unknown what the code reads is given as unseen.
    """
    for part in _with_nested(code):
        instructions = [one for one in dis.get_instructions(part) if one.opname not in _PADDING]
        module: ModuleType | None = None
        for number, one in enumerate(instructions):
            found, name = None, str(one.argval)
            follows = instructions[number + 1] if number + 1 < len(instructions) else one
            if one.opname in _GLOBALS and name in known and not name.startswith("__"):
                found = known[name]
                is_read = follows.opname in _ATTRIBUTES and str(follows.argval) in _vars_of(found)
                if isinstance(found, ModuleType) and _is_written_by_user(found.__name__) and not is_read:
                    yield name, _UNSEEN
            elif one.opname in _ATTRIBUTES and module is not None and name in vars(module):
                found, name = vars(module)[name], f"{module.__name__}.{name}"
            elif one.opname == "IMPORT_NAME":
                name = _absolute(name, instructions[number - 2].argval, known)
                found = sys.modules.get(name)
                is_read = found is not None and follows.opname == "IMPORT_FROM" and str(follows.argval) in vars(found)
                if not is_read and _is_written_by_user(name) and not _is_installed(name):
                    yield name, _UNSEEN
            elif one.opname == "IMPORT_FROM" and module is not None:
                yield f"{module.__name__}.{name}", vars(module).get(name, _UNSEEN)
                continue
            elif one.opname in ("STORE_FAST", "STORE_NAME", "STORE_DEREF") and module is not None:
                continue  # Further names may be imported from it.
            module = found if isinstance(found, ModuleType) and _is_written_by_user(found.__name__) else None
            if found is not None and not isinstance(found, ModuleType):
                yield name, found


def _absolute(name: str, level: Any, known: Mapping[str, Any]) -> str:
    """The name of a module that code imports, of which a level above 0 counts the leading dots."""
    package = known.get("__package__")
    if not (isinstance(level, int) and level and isinstance(package, str)):
        return name
    return importlib.util.resolve_name("." * level + name, package)


def _is_installed(module: str) -> bool:
    """Whether a module that may not be loaded is of an installed package; runs nothing of it."""
    spec = importlib.util.find_spec(module.partition(".")[0]) if module not in sys.modules else None
    return spec is not None and isinstance(spec.origin, str) and _is_in_packages(spec.origin)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


@functools.lru_cache(maxsize=4096)
def _code_text(code: CodeType) -> str:
    """A text of what code does: without file names, line numbers and docstrings."""
    bytecode = dis.Bytecode(code)
    kept = [one for one in bytecode if one.opname not in _PADDING]
    places: dict[int, int] = {}
    for place, one in enumerate(kept):
        places[one.offset] = place

    def place_of(offset: int) -> int:
        """The place of the first instruction from an offset on that counts."""
        while offset not in places and kept and offset <= kept[-1].offset:
            offset += 2
        return places.get(offset, len(kept))

    texts = []
    for one in kept:
        argument: Any = one.arg
        if one.opcode in _JUMPS:
            argument = place_of(one.argval)
        elif isinstance(one.argval, CodeType):
            argument = _code_text(one.argval)
        elif one.opcode in dis.hasconst:
            argument = value_text(one.argval)
        elif isinstance(one.argval, (str, tuple)):
            argument = one.argval
        texts.append(f"{one.opname} {argument}")
    for entry in getattr(bytecode, "exception_entries", ()):
        texts.append(f"in {place_of(entry.start)} {place_of(entry.end)} {place_of(entry.target)} {entry.depth}")
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = code.co_posonlyargcount, code.co_argcount, code.co_varnames[:count], code.co_flags & _FLAGS
    return "\n".join([repr(arguments), *texts])


def value_text(value: Any) -> str | None:
    """A text of a plain value, which is the same in every process; ``None`` of any other."""
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name} {value_text(value.value)}"
    if isinstance(value, PurePath):
        return f"path {value}"
    if type(value) in (list, tuple, set, frozenset) and len(value) <= _MOST_VALUES:
        texts = _texts(value)
        # The order of a set of strings is not the same in every process.
        is_set = isinstance(value, (set, frozenset))
        return None if texts is None else f"{type(value).__name__} {sorted(texts) if is_set else texts}"
    if type(value) is dict and len(value) <= _MOST_VALUES:
        names, texts = _texts(value), _texts(value.values())
        if names is not None and texts is not None:
            return f"dict {sorted(zip(names, texts, strict=True))}"
    return None


def _texts(values: Iterable[Any]) -> list[str] | None:
    texts = []
    for value in values:
        text = value_text(value)
        if text is None:
            return None
        texts.append(text)
    return texts


def _digest(*texts: str) -> str:
    digest = hashlib.blake2b("\0\0".join(texts).encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES)
    return digest.hexdigest()

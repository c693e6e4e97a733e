"""Pickling what users give, and finding out what it imports.

A lane is another process: it has neither the driver's ``__main__`` nor modules that only exist there.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from fluid.errors import InvalidFieldError
from fluid.lane_messages import Packed

_PLAIN = frozenset({int, float, str, bool, type(None)})
#: Objects looked at to find imports; a bound against code that refers to half the world.
_MOST_OBJECTS = 500


def dump_trainable(trainable: Any) -> bytes:
    """Pickles a trainable, by value where a lane could not import it.

    Raises:
        InvalidFieldError: it cannot be pickled.
    """
    with ExitStack() as stack:
        for name in sorted(_Walk(trainable).modules):
            module = sys.modules.get(name)
            if module is not None and not _can_be_imported(name):
                _pickle_by_value(module, stack)
        return _dump("trainable", trainable)


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Pickles a trial's config as a plain dict.

    Raises:
        InvalidFieldError: it cannot be pickled; the field names the entry, as in ``config['data']``.
    """
    plain = dict(config)
    try:
        return bytes(cloudpickle.dumps(plain))
    except Exception:
        for name, value in plain.items():
            _dump(f"config[{name!r}]", value)
        return _dump("config", plain)


def imports_of(trainable: Any) -> list[str]:
    """Modules that a trainable imports or refers to, outside of the standard library, sorted by name.

    They are read from the code, which is not run: import statements anywhere in its methods, and what its
    names stand for in its module.
    """
    walk = _Walk(trainable)
    return sorted(name for name in walk.imported | walk.modules if _is_worth_loading(name))


def pack_metrics(metrics: Mapping[str, Any]) -> dict[str, Any] | Packed:
    """Makes metrics ready to be sent: scalars of NumPy and PyTorch become plain numbers.

    Raises:
        TypeError: a value cannot be pickled.
    """
    plain: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in metrics.items():
        if type(value) not in _PLAIN and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        (plain if _is_plain(value) else others)[name] = value
    if not others:
        return plain
    try:
        return Packed(cloudpickle.dumps({**plain, **others}), plain)
    except Exception as error:
        raise TypeError(f"these metrics cannot be pickled: {', '.join(map(str, others))}: {error}") from error


def _dump(field: str, value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # Whatever a __reduce__ may raise.
        raise InvalidFieldError(field, value, f"cannot be pickled: {error}") from error


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))


def _pickle_by_value(module: ModuleType, stack: ExitStack) -> None:
    if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(module)
        stack.callback(cloudpickle.unregister_pickle_by_value, module)


def _is_worth_loading(name: str) -> bool:
    top = name.split(".")[0]
    return top not in sys.stdlib_module_names and top not in ("fluid", "__main__") and _can_be_imported(name)


@functools.lru_cache(maxsize=1024)
def _can_be_imported(name: str) -> bool:
    """Whether another process with this one's ``sys.path`` can import a module of that name."""
    if name == "__main__":
        return True  # cloudpickle takes it by value of its own accord.
    path = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        if part in sys.builtin_module_names:
            return True
        spec = None
        for finder in sys.meta_path:
            try:
                spec = finder.find_spec(part, path)
            except Exception:  # A finder may be anybody's.
                continue
            if spec is not None:
                break
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None:
            # Names below a plain module, like os.path, are put there when it is loaded.
            return True
    return True


class _Walk:
    """Follows a trainable's code through whatever of the user's it refers to.

    Attributes:
        imported: modules named in import statements.
        modules: modules of the objects met on the way.
    """

    def __init__(self, trainable: Any) -> None:
        self.imported: set[str] = set()
        self.modules: set[str] = set()
        self._seen: set[int] = set()
        self._queue: list[Any] = [trainable]
        self._followed = {"__main__"}
        for owner in _owners(trainable):
            self._followed.add(owner.split(".")[0])
        while self._queue and len(self._seen) < _MOST_OBJECTS:
            self._visit(self._queue.pop())

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
        elif isinstance(value, functools.partial):
            self._queue += [value.func, *value.args, *value.keywords.values()]
        elif inspect.isclass(value):
            self._visit_class(value)
        elif inspect.isroutine(value):
            self._visit_function(inspect.unwrap(value))
        elif isinstance(value, (staticmethod, classmethod)):
            self._queue.append(value.__func__)
        elif isinstance(value, property):
            self._queue += [function for function in (value.fget, value.fset) if function is not None]

    def _visit_class(self, cls: type) -> None:
        self._note_module(cls)
        if cls.__module__.split(".")[0] in self._followed:
            self._queue += [*cls.__bases__, *vars(cls).values()]

    def _visit_function(self, function: Any) -> None:
        self._note_module(function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        module = str(getattr(function, "__module__", None))
        if not isinstance(code, CodeType) or module.split(".")[0] not in self._followed:
            return
        names: set[str] = set()
        for part in _with_nested(code):
            names.update(part.co_names)
            self.imported.update(_import_statements(part))
        known = getattr(function, "__globals__", {})
        self._queue += [known[name] for name in names if name in known]
        for cell in getattr(function, "__closure__", None) or ():
            try:
                self._queue.append(cell.cell_contents)
            except ValueError:
                continue  # Not filled yet.

    def _note_module(self, value: Any) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module != "builtins":
            self.modules.add(module)


def _owners(trainable: Any) -> Iterator[str]:
    while isinstance(trainable, functools.partial):
        trainable = trainable.func
    target = trainable if inspect.isclass(trainable) or inspect.isroutine(trainable) else type(trainable)
    yield str(target.__module__)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _import_statements(code: CodeType) -> set[str]:
    # A relative import pushes its level first; it stays within the user's package, which is loaded anyway.
    found = set()
    level: Any = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(instruction.argval, int):
            level = instruction.argval
        elif instruction.opname == "IMPORT_NAME" and not level:
            found.add(str(instruction.argval))
    return found

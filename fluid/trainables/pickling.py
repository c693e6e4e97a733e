"""Pickling what users give, and finding out what it imports.

A lane is another process: it has neither the driver's ``__main__`` nor modules that only exist there.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from fluid.errors import InvalidFieldError

_PLAIN = frozenset({int, float, str, bool, type(None)})
#: What trials bring along of Fluid itself.
_LOADED_BY_TRIALS = ("fluid.elastic", "fluid.integrations.")
#: Packages that put classes and functions around the user's: what those hold is followed, their own code is not read.
_WRAPPERS = frozenset({"ray"})
#: Objects looked at to find imports; a bound against code that refers to half the world.
_MOST_OBJECTS = 500
#: Bytes of an exception that is sent to the driver; one that carries more does so in its traceback only.
_LARGEST_EXCEPTION = 1 << 20
#: Held while modules are pickled by value, which the pickler is told for the whole process.
_BY_VALUE = threading.RLock()


def dump_trainable(trainable: Any, dumps: Callable[[Any], bytes] | None = None, pickler: Any = cloudpickle) -> bytes:
    """Pickles a trainable, by value where a lane could not import it.

    Args:
        trainable: what the user gave.
        dumps: does the pickling; ``None`` for that of ``pickler``.
        pickler: the module, cloudpickle or a copy of it, that is to be told what to pickle by value.

    Raises:
        InvalidFieldError: it cannot be pickled.
    """
    with _BY_VALUE, ExitStack() as stack:
        for name in sorted(_Walk(trainable).modules):
            module = sys.modules.get(name)
            if module is not None and not _can_be_imported(name):
                _pickle_by_value(module, stack, pickler)
        return _dump("trainable", trainable, dumps or pickler.dumps)


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


class Packed(NamedTuple):
    """Metrics that hold more than plain values.

    They are pickled apart: a driver that cannot read them still reads ``plain``, and the rest of the batch.
    """

    payload: bytes
    plain: dict[str, Any]


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
    except BaseException as error:  # Their __reduce__ is the user's, and may raise anything.
        raise TypeError(f"these metrics cannot be pickled: {', '.join(map(str, others))}: {error}") from error


def dump_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickles the arguments of a call.

    Raises:
        InvalidFieldError: one cannot be pickled; the field names it, as in ``args[0]``.
    """
    try:
        return bytes(cloudpickle.dumps((args, dict(kwargs))))
    except Exception:
        for position, value in enumerate(args):
            _dump(f"args[{position}]", value)
        for name, value in kwargs.items():
            _dump(name, value)
        return _dump("args", (args, dict(kwargs)))


def dump_result(result: Any) -> bytes:
    """Pickles what a call returned.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(f"what the method returned cannot be pickled: {error}") from error


def dump_exception(error: BaseException) -> bytes | None:
    """Pickles an exception; ``None`` if it cannot be pickled or read again, or carries too much."""
    buffer = _Bounded(_LARGEST_EXCEPTION)
    try:
        cloudpickle.dump(error, buffer)
        read = pickle.loads(buffer.data)
    except BaseException:  # Anybody's __reduce__ and __init__ may run here.
        return None
    return bytes(buffer.data) if isinstance(read, BaseException) else None


class _Bounded:
    """A file in memory that refuses to grow beyond a size."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: bytes) -> int:
        if len(self.data) + len(data) > self._most:
            raise OverflowError("too large")
        self.data += data
        return len(data)


def _dump(field: str, value: Any, dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> bytes:
    try:
        return bytes(dumps(value))
    except Exception as error:  # Whatever a __reduce__ may raise.
        raise InvalidFieldError(field, value, f"cannot be pickled: {error}") from error


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))


def _pickle_by_value(module: ModuleType, stack: ExitStack, pickler: Any) -> None:
    if module.__name__ not in pickler.list_registry_pickle_by_value():
        pickler.register_pickle_by_value(module)
        stack.callback(pickler.unregister_pickle_by_value, module)


def _is_worth_loading(name: str) -> bool:
    top = name.split(".")[0]
    if top in sys.stdlib_module_names or top == "__main__":
        return False
    if top == "fluid" and not name.startswith(_LOADED_BY_TRIALS):
        return False  # every lane has what it needs of it
    return _can_be_imported(name)


@functools.lru_cache(maxsize=1024)
def _can_be_imported(name: str, *, below_modules: bool = True) -> bool:
    """Whether another process with this one's ``sys.path`` can import a module of that name.

    Args:
        name: of the module.
        below_modules: whether to believe in names below a plain module, like os.path, which it puts there itself.
    """
    if name == "__main__":
        return True  # cloudpickle takes it by value of its own accord.
    path = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        if part in sys.builtin_module_names:
            return below_modules or depth == len(parts)
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
            return below_modules or depth == len(parts)
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
        self._followed = {"__main__", *map(_top, _owners(trainable))} - _WRAPPERS
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
        elif (wrapped := _wrapped(value)) is not None:
            self._queue.append(wrapped)

    def _visit_class(self, cls: type) -> None:
        self._note_module(cls)
        if _top(cls.__module__) in self._followed | _WRAPPERS:
            self._queue += [*cls.__bases__, *vars(cls).values()]

    def _visit_function(self, function: Any) -> None:
        self._note_module(function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        top = _top(str(getattr(function, "__module__", None)))
        if not isinstance(code, CodeType) or top not in self._followed | _WRAPPERS:
            return
        if top in self._followed:
            self._read(code, function)
        for cell in getattr(function, "__closure__", None) or ():
            try:
                self._queue.append(cell.cell_contents)
            except ValueError:
                continue  # Not filled yet.

    def _read(self, code: CodeType, function: Any) -> None:
        """Finds what the code of a function imports and what its names stand for."""
        names: set[str] = set()
        for part in _with_nested(code):
            names.update(part.co_names)
            self.imported.update(_import_statements(part))
        known = getattr(function, "__globals__", {})
        used = [known[name] for name in names if name in known]
        self._queue += used
        # As in torch.optim.SGD, which names a module that nothing imports by its own name.
        packages = self.imported | {value.__name__ for value in used if isinstance(value, ModuleType)}
        self.imported.update(name for name in map(".".join, itertools.product(packages, names)) if _is_module(name))

    def _note_module(self, value: Any) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module != "builtins":
            self.modules.add(module)


def _is_module(name: str) -> bool:
    """Whether that is a module, told without loading what is not loaded yet."""
    return name in sys.modules or (
        name.rpartition(".")[0] not in sys.modules and _can_be_imported(name, below_modules=False)
    )


def _wrapped(value: Any) -> Any:
    """What an object says it stands for."""
    return vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None


def _top(module: str) -> str:
    """The package that a module is in."""
    return module.split(".")[0]


def _owners(trainable: Any) -> Iterator[str]:
    """Modules of the user's: those of the trainable, and of what it was made from."""
    while isinstance(trainable, functools.partial):
        trainable = trainable.func
    target = trainable if inspect.isclass(trainable) or inspect.isroutine(trainable) else type(trainable)
    yield str(target.__module__)
    if inspect.isclass(trainable):
        made_from = [value for value in map(_wrapped, vars(trainable).values()) if inspect.isclass(value)]
        made_from += filter(None, [vars(trainable).get("fluid_elastic_class")])
        if _top(trainable.__module__) in _WRAPPERS:
            made_from += trainable.__bases__
        yield from (owner for cls in made_from for owner in _owners(cls))


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

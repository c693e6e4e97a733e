"""Finds the modules that a trainable imports, by reading its code, which is not run.

A warm lane imports them before its first trial, and a module that lanes cannot import is pickled by value. cloudpickle
does neither.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

# -- elastic class -------------------------------------------------------------------------------
#
# The elastic class within a Ray Tune class that :func:`fluid.elastic.as_tune_trainable` made.


#: Attribute by which a Ray Tune class names the elastic class that it wraps.
WRAPPED_ELASTIC_CLASS = "fluid_elastic_class"
#: The method by which a Ray Tune class requests resources.
_RESOURCE_REQUEST = "default_resource_request"
_OF_EVERY_CLASS = {"__doc__", "__firstlineno__", "__module__", "__qualname__", "__static_attributes__"}


def elastic_class_of(trainable: Any) -> Any:
    """Returns the elastic class that a Ray Tune class wraps, see :func:`fluid.elastic.as_tune_trainable`.

    Returns:
        The class, which lanes run in its place, without Ray Tune; ``None`` if it wraps none. That includes classes
        derived from one that does: they may override its methods, and run as they are.
    """
    if not isinstance(trainable, type):
        return None
    return vars(without_request(trainable)).get(WRAPPED_ELASTIC_CLASS)


def without_request(trainable: type) -> type:
    """Returns the class that ``ray.tune.with_resources`` was given: what it returns only adds a request to it."""
    while _RESOURCE_REQUEST in (own := vars(trainable)) and len(trainable.__bases__) == 1:
        if own.keys() - _OF_EVERY_CLASS - {_RESOURCE_REQUEST}:
            break
        trainable = trainable.__bases__[0]
    return trainable


# -- import scan ---------------------------------------------------------------------------------


#: Parts of Fluid that only some trials import; every lane has loaded the others.
_LOADED_BY_TRIALS = ("fluid.elastic", "fluid.integrations.")
#: Packages that wrap the user's classes and functions: the scan follows what they wrap, and skips their own code.
_WRAPPERS = frozenset({"ray"})
#: Most objects that a scan visits; a bound for code that refers to very much.
_MOST_OBJECTS = 500


def imports_of(trainable: Any) -> list[str]:
    """Returns the modules that a trainable imports or refers to, sorted, without those of the standard library.

    They come from the import statements in its code and from the objects that its names refer to.
    """
    scan = ImportScan(trainable)
    return sorted(name for name in scan.imported | scan.modules if _is_worth_loading(name))


def _is_worth_loading(name: str) -> bool:
    top = name.split(".")[0]
    if top in sys.stdlib_module_names or top == "__main__":
        return False
    if top == "fluid" and not name.startswith(_LOADED_BY_TRIALS):
        return False  # Every lane has loaded it.
    return can_be_imported(name)


@functools.lru_cache(maxsize=1024)
def can_be_imported(name: str, *, below_modules: bool = True) -> bool:
    """Whether another process with this one's ``sys.path`` can import a module of that name.

    Args:
        name: of the module.
        below_modules: whether to accept any name below a plain module, such as os.path, which ``os`` itself provides.
    """
    if name == "__main__":
        return True  # cloudpickle always pickles it by value.
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
            except Exception:  # Any package may install a finder.
                continue
            if spec is not None:
                break
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None:
            return below_modules or depth == len(parts)
    return True


class ImportScan:
    """Visits a trainable's code, and the user's objects that it refers to, directly or not.

    Attributes:
        imported: modules named in import statements.
        modules: modules of the visited objects.
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
                continue  # Not assigned yet.

    def _read(self, code: CodeType, function: Any) -> None:
        """Finds what the code of a function imports, and the objects that its names refer to."""
        names: set[str] = set()
        for part in _with_nested(code):
            names.update(part.co_names)
            self.imported.update(_import_statements(part))
        known = getattr(function, "__globals__", {})
        used = [known[name] for name in names if name in known]
        self._queue += used
        # torch.optim.SGD needs the module torch.optim, which no import statement names.
        packages = self.imported | {value.__name__ for value in used if isinstance(value, ModuleType)}
        self.imported.update(name for name in map(".".join, itertools.product(packages, names)) if _is_module(name))

    def _note_module(self, value: Any) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module != "builtins":
            self.modules.add(module)


def _is_module(name: str) -> bool:
    """Whether that is a module; does not load any."""
    return name in sys.modules or (
        name.rpartition(".")[0] not in sys.modules and can_be_imported(name, below_modules=False)
    )


def _wrapped(value: Any) -> Any:
    """The object that another one wraps, if it says so."""
    return vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None


def _top(module: str) -> str:
    """The top-level package of a module."""
    return module.split(".")[0]


def _owners(trainable: Any) -> Iterator[str]:
    """The user's modules: those of the trainable, and of the classes that it was made from."""
    while isinstance(trainable, functools.partial):
        trainable = trainable.func
    target = trainable if inspect.isclass(trainable) or inspect.isroutine(trainable) else type(trainable)
    yield str(target.__module__)
    if inspect.isclass(trainable):
        made_from = [value for value in map(_wrapped, vars(trainable).values()) if inspect.isclass(value)]
        made_from += filter(None, [elastic_class_of(trainable)])
        if _top(trainable.__module__) in _WRAPPERS:
            made_from += trainable.__bases__
        yield from (owner for cls in made_from for owner in _owners(cls))


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _import_statements(code: CodeType) -> set[str]:
    # A relative import pushes its level first. It names a module of the user's package, which is followed anyway.
    found = set()
    level: Any = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(instruction.argval, int):
            level = instruction.argval
        elif instruction.opname == "IMPORT_NAME" and not level:
            found.add(str(instruction.argval))
    return found

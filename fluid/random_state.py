"""The global random number generators of a process, of ``random``, NumPy and PyTorch: their states, and trials' seeds.

Their modules are looked up in ``sys.modules`` and never imported: a process has no state in a module that it has not
loaded. One that a trial's code loads later is seeded then.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: The modules of the generators, in the order of their seeds.
MODULES = ("random", "numpy.random", "torch")
_SEED_BYTES = 4
_PACKED = struct.Struct("<3I")


class Seeds(NamedTuple):
    """The seeds of a trial's generators when it is set up, integers below 2**32.

    Example:
        >>> from fluid.random_state import Seeds
        >>> Seeds.read({"random": 1, "numpy": 2, "torch": 3})
        Seeds(random=1, numpy=2, torch=3)

    Attributes:
        random: as by ``random.seed``.
        numpy: as by ``numpy.random.seed``.
        torch: as by ``torch.manual_seed``, for CPUs and GPUs.
    """

    random: int
    numpy: int
    torch: int

    @classmethod
    def fresh(cls) -> Seeds:
        """Returns seeds from the operating system."""
        return cls._of(lambda _: os.urandom(_SEED_BYTES))

    @classmethod
    def read(cls, entry: object) -> Seeds | None:
        """Reads seeds from a file's mapping; ``None`` if it is none."""
        found: list[Any] = [entry.get(name) for name in cls._fields] if isinstance(entry, Mapping) else [None]
        return cls(*found) if all(isinstance(seed, int) and 0 <= seed < 1 << 32 for seed in found) else None

    def packed(self) -> bytes:
        """The seeds in a third of the memory, for a session of very many trials."""
        return _PACKED.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> Seeds:
        """The seeds of which :meth:`packed` has made that."""
        return cls(*_PACKED.unpack(packed))

    @classmethod
    def _of(cls, bytes_of: Callable[[int], bytes]) -> Seeds:
        return cls(*(int.from_bytes(bytes_of(position), "little") for position in range(len(MODULES))))


class SeedOrigin(NamedTuple):
    """What the seeds of submitted trials follow from, beside the order of their submission.

    A generator's seed follows from the driver's generator of the same kind alone: a program that seeds PyTorch only has
    the same numbers from PyTorch in each run, as without Fluid.

    Attributes:
        states: of the driver's generators, a digest each. A generator that the driver has not loaded has the digest of
            all that it has.
        salt: sets the trials apart from those of other submissions.
    """

    states: tuple[bytes, ...]
    salt: str

    @classmethod
    def now(cls, seed: int | None) -> SeedOrigin:
        """Reads the generators of this process, which goes on with the same numbers as without.

        Args:
            seed: the submitter's own; ``None`` for other seeds every time.
        """
        found = {name: _digest(state) for name, state in _driver_states().items()}
        rest = _digest(b"".join(found.values()) or os.urandom(_SEED_BYTES))
        salt = os.urandom(_SEED_BYTES).hex() if seed is None else str(seed)
        return cls(tuple(found.get(name, rest) for name in MODULES), salt)

    def seeds(self, number: int) -> Seeds:
        """Returns the seeds of the trial that is submitted at this place, from 0, in the order of the session."""
        return Seeds._of(
            lambda position: hashlib.blake2b(
                f"{MODULES[position]} {self.salt} {number}".encode(),
                key=self.states[position],
                digest_size=_SEED_BYTES,
            ).digest()
        )


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()


def _driver_states() -> dict[str, bytes]:
    """The states of the generators that are loaded, but for those of GPUs, which follow from PyTorch's seed."""
    found = {}
    for name in MODULES:
        generator = _GENERATORS[name]
        if (module := generator.find()) is not None:
            state = generator.read(module)
            # Pickling a tensor takes a hundred times as long.
            is_tensor = name == "torch"
            found[name] = ctypes.string_at(state.data_ptr(), state.numel()) if is_tensor else pickle.dumps(state)
    return found


# -- states -------------------------------------------------------------------------------------------------------


def read_random_state() -> dict[str, Any]:
    """Returns the states of the global random number generators that are loaded, by module."""
    states = {}
    for name, generator in _GENERATORS.items():
        if (module := generator.find()) is not None:
            states[name] = generator.read(module)
    return states


def write_random_state(states: Mapping[str, Any]) -> None:
    """Sets the generators that are loaded to these states; those without one to the seeds in force, if there are any.

    All lanes are forked from one process: without seeds, trials would draw the same random numbers.
    """
    for name, generator in _GENERATORS.items():
        if name not in states:
            seed_loaded(name)
        elif (module := generator.find()) is not None:
            generator.write(module, states[name])


def restore_random_state(states: Mapping[str, Any]) -> None:
    """Sets the generators to the states that they had in another process.

    Imports their modules if they are not loaded: the trial has drawn from them before, and may do so again.
    """
    for name in states:
        importlib.import_module(name)
    write_random_state(states)


def _loaded(name: str) -> Any:
    """A module of this process, whole: where another thread is loading it, this waits; ``None`` if it has none."""
    return None if sys.modules.get(name) is None else importlib.import_module(name)


class _Generator(NamedTuple):
    """A kind of generator: what finds its module, ``None`` while it has no state, and what that does."""

    find: Callable[[], Any]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    seed: Callable[[Any, Seeds], object]


def _torch() -> Any:
    torch = _loaded("torch")
    # A trial that failed to import it leaves a partial module without a generator.
    return torch if hasattr(torch, "default_generator") else None


def _cuda() -> Any:
    torch = _torch()
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _seed_torch(torch: Any, seeds: Seeds) -> None:
    # Not torch.manual_seed: it also looks for every kind of accelerator, which takes longer.
    torch.default_generator.manual_seed(seeds.torch)
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if not is_hidden and torch.backends.cuda.is_built() and not torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seeds.torch)  # PyTorch does so when it initialises CUDA.


_GENERATORS = {
    "random": _Generator(
        lambda: _loaded("random"),
        lambda module: module.getstate(),
        lambda module, state: module.setstate(state),
        lambda module, seeds: module.seed(seeds.random),
    ),
    "numpy.random": _Generator(
        lambda: _loaded("numpy.random"),
        lambda module: module.get_state(),
        lambda module, state: module.set_state(state),
        lambda module, seeds: module.seed(seeds.numpy),
    ),
    "torch": _Generator(
        _torch,
        lambda module: module.get_rng_state(),
        lambda module, state: module.set_rng_state(state),
        _seed_torch,
    ),
    "torch.cuda": _Generator(
        _cuda,
        lambda module: module.get_rng_state(),
        lambda module, state: module.set_rng_state(state),
        lambda module, seeds: module.manual_seed_all(seeds.torch),
    ),
}


# -- seeds in force -----------------------------------------------------------------------------------------------


class _SeedsInForce:
    """The seeds of the trial whose process state is in force; ``None`` before the first one, and outside a lane."""

    seeds: Seeds | None = None


def put_in_force(seeds: Seeds) -> None:
    """Has generators start from these seeds that are set to no state of the trial's.

    Those whose module is loaded later are to be seeded then (:func:`seed_loaded`): NumPy, say, loads ``numpy.random``
    when a program first uses it, and seeds it from the operating system.
    """
    _SeedsInForce.seeds = seeds


def seed_loaded(name: str) -> None:
    """Seeds the generator of a module, one of :data:`MODULES`, that was just loaded."""
    generator, seeds = _GENERATORS[name], _SeedsInForce.seeds
    if seeds is not None and (module := generator.find()) is not None:
        generator.seed(module, seeds)

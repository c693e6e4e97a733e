"""Wraps elastic trainables for Ray Tune, which trains them at width 1; Fluid trains them at any width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.trainables.import_scan import elastic_class_of

if TYPE_CHECKING:
    from fluid.elastic.trainable import ElasticTrainable


def as_tune_trainable(cls: type[ElasticTrainable]) -> type:
    """Makes a Ray Tune class of an elastic trainable; Fluid accepts both.

    Raises:
        InvalidFieldError: ``cls`` is no subclass of ElasticTrainable.
        MissingDependencyError: Ray Tune is not installed.

    Example:
        In a script that also runs under plain Ray Tune::

            tune.run(as_tune_trainable(MyTrainable), config={"lr": tune.uniform(0.01, 0.1)})

        >>> from fluid.elastic import as_tune_trainable
        >>> as_tune_trainable(dict)
        Traceback (most recent call last):
        ...
        fluid.errors.InvalidFieldError: trainable=<class 'dict'>: must be a subclass of fluid.elastic.ElasticTrainable
    """
    require_elastic_class(cls)
    with try_import("Ray Tune", extra="ray") as imports:
        from ray.tune import Trainable
    imports.check()

    class TuneTrainable(Trainable):  # type: ignore[misc]
        """Delegates to an elastic trainable."""

        fluid_elastic = True
        fluid_elastic_class = cls

        def setup(self, config: dict[str, Any]) -> None:
            self.elastic = cls()
            self.elastic.setup(config)

        def step(self) -> dict[str, Any]:
            return self.elastic.step()

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self.elastic.save_checkpoint(checkpoint_dir)

        def load_checkpoint(self, checkpoint: str) -> None:
            self.elastic.load_checkpoint(checkpoint)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.elastic.cleanup()
            self.setup(new_config)
            return True

        def cleanup(self) -> None:
            self.elastic.cleanup()

    TuneTrainable.__name__ = TuneTrainable.__qualname__ = cls.__name__
    return TuneTrainable


def require_elastic_class(trainable: Any) -> type[ElasticTrainable]:
    """Returns the elastic class that a class is, or wraps.

    Raises:
        InvalidFieldError: it does neither.
    """
    from fluid.elastic.trainable import ElasticTrainable

    found = elastic_class_of(trainable) or trainable
    if not isinstance(found, type) or not issubclass(found, ElasticTrainable):
        raise InvalidFieldError("trainable", trainable, "must be a subclass of fluid.elastic.ElasticTrainable")
    return found

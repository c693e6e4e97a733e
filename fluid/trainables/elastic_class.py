"""The elastic class within a Ray Tune class that :func:`fluid.elastic.as_tune_trainable` made."""

from __future__ import annotations

from typing import Any

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

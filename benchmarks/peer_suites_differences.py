"""Why tests of other projects fail with Fluid in place: the one list, for ``peer_suites.py`` and its page."""

from __future__ import annotations

from typing import NamedTuple

#: Documented: Fluid does something else, as its documentation says.
ON_PURPOSE = "on purpose"
#: The test looks at something that only the peer's own machinery has.
OF_THE_TEST = "of the test"
#: Fluid should pass it.
DEFECT = "**defect**"


class Difference(NamedTuple):
    """Tests that differ for one reason.

    Attributes:
        suite: of ``peer_suites.py``.
        tests: patterns of the ids of the tests, such as ``"*::test_name*"``.
        kind: :data:`ON_PURPOSE`, :data:`OF_THE_TEST` or :data:`DEFECT`.
        why: for the page.
    """

    suite: str
    tests: tuple[str, ...]
    kind: str
    why: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "sklearn",
        ("*::test_search_callbacks_*",),
        ON_PURPOSE,
        "scikit-learn's callbacks of a search are not called ([limits](sklearn.md#limits))",
    ),
    Difference(
        "sklearn",
        ("*::test_multi_metric_search_forwards_metadata*",),
        OF_THE_TEST,
        "the test's scorers note in its own process that they were called; here other processes call them",
    ),
    Difference(
        "sklearn",
        ("*::test_search_cv_verbose_3*",),
        ON_PURPOSE,
        "the executor shows what fits print: equal lines once, and a moment later",
    ),
    Difference(
        "sklearn",
        ("*::test_grid_search_bad_param_grid",),
        ON_PURPOSE,
        "a constant in a grid is accepted: it is a space of one value",
    ),
    Difference(
        "sklearn",
        ("*::test_empty_cv_iterator_error",),
        DEFECT,
        "a splitter without splits: `min() arg is an empty sequence`, in place of a message that says so",
    ),
    Difference(
        "optuna",
        ("*::test_optimize_parallel*", "*::test_optimize_with_reseeding*"),
        ON_PURPOSE,
        "the objective has a `threading.Lock`: it cannot be sent to another process, and is refused with its name",
    ),
    Difference(
        "optuna",
        ("*::test_optimize_with_catch_invalid_type*",),
        ON_PURPOSE,
        "`catch=None` is refused by an `InvalidFieldError`, which is a `ValueError`, not a `TypeError`",
    ),
    Difference(
        "optuna",
        ("*::test_nested_optimization",),
        ON_PURPOSE,
        "`trial.study.optimize` within an objective is refused by an `AttributeError`, not a `RuntimeError`",
    ),
    Difference(
        "ray",
        ("*::test_trial_reuse_*", "*::test_multi_trial_reuse*", "*::test_reuse_enabled_error"),
        ON_PURPOSE,
        "`reuse_actors=True` shares processes and does not call `reset_config`, whose calls the tests count ([what "
        "changes](ray_tune.md#what-changes-and-what-does-not))",
    ),
    Difference(
        "ray",
        ("*::testBuiltInTrainableResources",),
        ON_PURPOSE,
        "a request that cannot be met fails at once; Ray Tune warns and waits ([resources](ray_tune.md#resources))",
    ),
)

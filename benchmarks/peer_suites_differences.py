"""Why tests of other projects fail with Fluid in place: the one list, for ``peer_suites.py`` and its tables."""

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
        OF_THE_TEST,
        "callbacks of a fit are called in a lane, with a copy of the search; the test's own class cannot be sent there",
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
        "the executor shows what fits print, a moment later",
    ),
    Difference(
        "sklearn",
        ("*::test_grid_search_bad_param_grid",),
        ON_PURPOSE,
        "a constant in a grid is accepted: it is a space of one value",
    ),
    Difference(
        "optuna",
        ("*::test_optimize_parallel*", "*::test_optimize_with_reseeding*"),
        ON_PURPOSE,
        "the objective has a `threading.Lock`: it cannot be sent to another process, and is refused with its name",
    ),
    Difference(
        "optuna",
        ("*::test_optimize_with_progbar_parallel_timeout",),
        ON_PURPOSE,
        "a progress bar and a timeout can be combined here, so nothing warns of it",
    ),
    Difference(
        "optuna",
        ("*::test_optimize_with_progbar[[]2]", "*::test_optimize_progbar_n_trials_prioritized[[]2]"),
        OF_THE_TEST,
        "of two equal trials at a time, the test wants the first one to end first",
    ),
    Difference(
        "optuna",
        ("*::test_optimize_with_progbar_timeout",),
        OF_THE_TEST,
        "a timeout of 0.01 s: on a busy machine it has passed before the first trial is asked for",
    ),
    Difference(
        "joblib",
        ("*::test_nested_backend_in_sequential*", "*::test_effective_n_jobs_None*"),
        ON_PURPOSE,
        "`Parallel()` without `n_jobs` means all devices where Fluid's backend is the default, not one worker",
    ),
    Difference(
        "joblib",
        ("*::test_threadpool_limitation_in_child_override*",),
        OF_THE_TEST,
        "the variables are set after the executor of all tests was made, whose lanes have those of its start",
    ),
    Difference(
        "joblib",
        (
            "*::test_backend_context_manager*",
            "*::test_backend_hinting_*",
            "*::test_loky_reuse_workers*",
            "*::test_nested_backend_context_manager*",
            "*::test_nested_parallelism_limit*",
            "*::test_parallel_as_context_manager*",
            "*::test_initializer_reused*",
            "*::test_initializer_not_reused*",
        ),
        OF_THE_TEST,
        "the class `LokyBackend`, or when loky uses its processes again",
    ),
    Difference(
        "joblib",
        ("*::test_multiple_generator_call_separated_gc*",),
        ON_PURPOSE,
        "two generators of one `Parallel` may be under way at a time; loky refuses the second one",
    ),
    Difference(
        "joblib",
        ("*::test_nested_parallel_warnings*",),
        OF_THE_TEST,
        "the test wants loky's warning that a nested call is sequential, or that there is none",
    ),
    Difference("joblib", ("*::test_error_capture*",), OF_THE_TEST, "the backend has no pool object"),
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
    Difference(
        "ray",
        ("*::testEarlyStopping",),
        ON_PURPOSE,
        "trials of no length: more of them have begun by the time that the stopper sees the results that end the sweep "
        "([how many at once](ray_tune.md#how-many-trials-at-once))",
    ),
    Difference(
        "ray",
        ("*::test_with_resources_*",),
        OF_THE_TEST,
        "the tests tell Ray of GPUs that the machine lacks; Fluid has its CPU cores, and refuses requests for GPUs",
    ),
    Difference(
        "ray",
        ("*::testSearcherSchedulerStr",),
        OF_THE_TEST,
        "the test looks at the class of the scheduler that Tune has; it is Fluid's, which asks the user's",
    ),
    Difference(
        "ray",
        ("*::testFileFree",),
        OF_THE_TEST,
        "the test allows the driver 19 open files; the log and the journal of Fluid's run folder are among them",
    ),
)

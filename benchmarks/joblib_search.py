"""Measures scikit-learn's GridSearchCV(n_jobs=2) on loky, joblib's own processes, and on Fluid, in one run.

    python benchmarks/joblib_search.py [--runs 5] [--json FILE]

Each measurement is a process of its own, imports left out; loky and Fluid take turns. "cold" is the first search of the
process, with the start of its worker processes (loky's pool; Fluid's executor); "warm" is the median of three more,
with the processes that there are. Both give the same ``cv_results_``, which is checked.

"svm": 16 candidates of a support vector machine on 600 images of scikit-learn's digits, 3 folds.
"tree": 50 candidates of a decision tree on breast_cancer, 5 folds: many short tasks.
"forest": 12 candidates of a random forest on digits, 3 folds.
"large": 8 candidates of a ridge regression on an array of 32 MB, 3 folds.
"calls": cross_val_score of a decision tree on breast_cancer, 5 folds, 20 times: many short calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import machine, run_apart

JOBS = 2
WARM = 3
BACKENDS = ("fluid", "loky")
#: Entries of cv_results_ that are seconds.
TIMES = ("mean_fit_time", "std_fit_time", "mean_score_time", "std_score_time")


def svm() -> Any:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    x, y = load_digits(return_X_y=True)
    grid = {"C": [0.1, 1.0, 10.0, 100.0], "gamma": [1e-4, 3e-4, 1e-3, 3e-3]}
    return results_of(GridSearchCV(SVC(), grid, cv=3, n_jobs=JOBS).fit(x[:600], y[:600]))


def tree() -> Any:
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import GridSearchCV
    from sklearn.tree import DecisionTreeClassifier

    grid = {"max_depth": list(range(1, 11)), "min_samples_leaf": [1, 3, 5, 7, 9]}
    search = GridSearchCV(DecisionTreeClassifier(random_state=0), grid, cv=5, n_jobs=JOBS)
    return results_of(search.fit(*load_breast_cancer(return_X_y=True)))


def forest() -> Any:
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    grid = {"n_estimators": [10, 20, 40], "max_depth": [4, 8], "max_features": [8, 16]}
    search = GridSearchCV(RandomForestClassifier(random_state=0), grid, cv=3, n_jobs=JOBS)
    return results_of(search.fit(*load_digits(return_X_y=True)))


def large() -> Any:
    import numpy as np
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV

    generator = np.random.default_rng(0)
    x = generator.normal(size=(20_000, 200))
    y = x @ generator.normal(size=200) + generator.normal(size=20_000)
    grid = {"alpha": [10.0**power for power in range(-3, 5)]}
    return results_of(GridSearchCV(Ridge(), grid, cv=3, n_jobs=JOBS).fit(x, y))


def calls() -> Any:
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeClassifier

    x, y = load_breast_cancer(return_X_y=True)
    models = [DecisionTreeClassifier(max_depth=depth, random_state=0) for depth in range(1, 21)]
    return [cross_val_score(model, x, y, cv=5, n_jobs=JOBS).tolist() for model in models]


SEARCHES: dict[str, Callable[[], Any]] = {"svm": svm, "tree": tree, "forest": forest, "large": large, "calls": calls}


def results_of(search: Any) -> Any:
    """What a search found, without what it took."""
    found = {name: list(map(str, values)) for name, values in search.cv_results_.items() if name not in TIMES}
    return [search.best_params_, found]


def measure(backend: str, name: str) -> dict[str, Any]:
    """Runs a search in this process: once with new worker processes, then with those."""
    import joblib
    import sklearn.datasets
    import sklearn.ensemble
    import sklearn.linear_model
    import sklearn.model_selection
    import sklearn.svm
    import sklearn.tree  # noqa: F401

    import fluid.integrations.joblib  # noqa: F401

    seconds, found = [], []
    options = {"devices": JOBS, "verbose": 0} if backend == "fluid" else {}
    begun = time.perf_counter()
    with joblib.parallel_config(backend, **options):
        for _ in range(1 + WARM):
            found.append(SEARCHES[name]())
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    assert all(each == found[0] for each in found)
    return {"cold": seconds[0], "warm": statistics.median(seconds[1:]), "found": found[0]}


def main() -> None:
    """Measures all searches, or, in a process of its own, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--search", choices=tuple(SEARCHES), action="append")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    searches = arguments.search or list(SEARCHES)
    if arguments.backend is not None:
        print(json.dumps(measure(arguments.backend, searches[0])))
        return
    figures: dict[str, Any] = {"machine": machine(), "jobs": JOBS, "runs": arguments.runs}
    print(f"{'':8} {'':5} {'fluid':>8} {'loky':>8}   loky/fluid")
    for name in searches:
        measured: dict[str, list[Any]] = {backend: [] for backend in BACKENDS}
        for number, turn in itertools.product(range(arguments.runs), range(2)):
            backend = BACKENDS[(number + turn) % 2]  # In turns also within a round, as the machine is shared.
            apart = run_apart(
                __file__, ["--backend", backend, "--search", name], what=f"{name} {backend}", timeout=600.0
            )
            if apart is not None:
                measured[backend].append(apart.figures)
        found = [each["found"] for backend in BACKENDS for each in measured[backend]]
        assert all(each == found[0] for each in found), "both give the same results"
        figures[name] = {}
        for state in ("cold", "warm"):
            fluid_s, loky_s = (statistics.median(each[state] for each in measured[backend]) for backend in BACKENDS)
            figures[name][state] = {"fluid_s": fluid_s, "loky_s": loky_s, "ratio": loky_s / fluid_s}
            print(f"{name:8} {state:5} {fluid_s:8.3f} {loky_s:8.3f} {loky_s / fluid_s:8.2f}x", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"written: {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Tunes a pipeline of scikit-learn on its handwritten digits; a pass over the data is an iteration.

    python examples/frameworks/sklearn_search.py [--samples 18] [--passes 9] [--jobs N] [--algorithm asha]

Needs ``pip install '.[sklearn]'``.
"""

from __future__ import annotations

import argparse

from scipy.stats import loguniform
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fluid.integrations.sklearn import FluidSearchCV


def main() -> None:
    """Runs the search, and prints its best candidate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=18, help="number of candidates")
    parser.add_argument("--passes", type=int, default=9, help="passes over the data of a candidate that is not stopped")
    parser.add_argument("--jobs", type=int, help="how many cores to use; by default all")
    parser.add_argument("--algorithm", default="asha", help="as FluidSearchCV has it")
    options = parser.parse_args()

    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    search = FluidSearchCV(
        make_pipeline(StandardScaler(), SGDClassifier(random_state=0)),
        {"sgdclassifier__alpha": loguniform(1e-6, 1), "sgdclassifier__penalty": ["l2", "l1"]},
        algorithm=options.algorithm,
        samples=options.samples,
        budget=options.passes,
        cv=3,
        n_jobs=options.jobs,
        random_state=0,
        verbose=1,
    )
    search.fit(x, y)
    used = search.cv_results_.get("n_resources")
    if used is not None:
        print(f"passes over the data: {used.sum()}, of {options.samples * options.passes} without early stopping")
    print(f"best: {search.best_params_}, right on {search.score(x_test, y_test):.1%} of the digits held out")


if __name__ == "__main__":
    main()

"""Makes the screenshots of the HTML page in docs/figures, from real sweeps: a small network on handwritten digits.

    python scripts/page_figures.py                 # runs three sweeps, one after the other
    python scripts/page_figures.py RUN [RUN ...]   # shows these runs instead; the first one alone, then all of them

It needs Chromium, scikit-learn, Optuna and Pillow (``make examples``).
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier

import fluid
from fluid.reports.analysis.importance import by_metric
from fluid.reports.page.html import html_page
from fluid.reports.run.loader import load_run
from fluid.search import choice, loguniform, uniform

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
#: The sweeps that are compared.
ALGORITHMS = ("asha", "hyperband", "random")

SPACE = {
    "lr": loguniform(1e-5, 1e-1),
    "batch_size": choice([16, 32, 64, 128]),
    "weight_decay": loguniform(1e-6, 1e-1),
    "momentum": uniform(0.5, 0.99),
    "net": {"width": choice([8, 16, 32, 64, 128]), "activation": choice(["relu", "tanh", "logistic"])},
    "pixels_kept": uniform(0.2, 1.0),
    "noise": uniform(0.0, 0.5),
}


def train(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Trains a network of one hidden layer on noisy digits, an epoch at a time."""
    random = np.random.default_rng(0)
    images, digits = load_digits(return_X_y=True)
    images = images / 16.0
    order = random.permutation(len(images))
    train, test = order[:1300], order[1300:]
    kept = random.random(images.shape[1]) < config["pixels_kept"]
    noisy = images * kept + random.normal(0.0, config["noise"], images.shape)
    network = MLPClassifier(
        (config["net"]["width"],),
        activation=config["net"]["activation"],
        solver="sgd",
        alpha=config["weight_decay"],
        batch_size=config["batch_size"],
        learning_rate_init=config["lr"],
        momentum=config["momentum"],
        random_state=0,
    )
    while True:
        network.partial_fit(noisy[train], digits[train], classes=np.arange(10))
        shares = network.predict_proba(images[test] * kept)
        accuracy = float((shares.argmax(axis=1) == digits[test]).mean())
        yield {"loss": float(log_loss(digits[test], shares, labels=np.arange(10))), "accuracy": accuracy}


def sweeps(folder: Path) -> list[Path]:
    """Runs the sweeps; returns their run folders."""
    found = []
    for algorithm in ALGORITHMS:
        samples = 27 if algorithm == "random" else 81
        run = folder / algorithm
        with fluid.FluidExecutor(run_dir=str(run), verbose=0) as executor:
            best = fluid.run(
                train,
                SPACE,
                metric="loss",
                mode="min",
                samples=samples,
                algorithm=algorithm,
                budget=27,
                name=algorithm,
                executor=executor,
            ).best
        print(f"{algorithm}: {best.trial_id}, loss {best.value:.4f}")
        found.append(run)
    return found


def main() -> None:
    """Makes the screenshots."""
    sys.path.append(str(ROOT / "tests"))
    from browser import running_browser

    with tempfile.TemporaryDirectory(prefix="page-figures-") as name:
        folder = Path(name)
        runs = [load_run(path) for path in map(Path, sys.argv[1:])] or [load_run(path) for path in sweeps(folder)]
        importances = [by_metric(run) for run in runs]
        one, several = folder / "one.html", folder / "several.html"
        one.write_text(html_page(runs[:1], importances=importances), encoding="utf-8")
        several.write_text(html_page(runs, importances=importances), encoding="utf-8")
        with running_browser() as browser:
            pictures = (
                (one, "report_page.png", 812, "header"),
                (several, "report_comparison.png", 1130, "header"),
            )
            for page_file, picture, height, first in pictures:
                with browser.page(1400, height) as page:
                    page.open(page_file)
                    page.run(f"document.querySelector('{first}').scrollIntoView(); scrollBy(0, -12)")
                    page.drawn()
                    image = Image.open(io.BytesIO(page.screenshot()))
                    image.convert("RGB").quantize(256, kmeans=4).save(FIGURES / picture, optimize=True)
                    print(f"wrote {FIGURES / picture}")


if __name__ == "__main__":
    main()

"""Data sets are read from their distributed files, and errors name what is missing."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_data import make_data
from models.data import CIFAR10, MNIST, WIKITEXT2, DataSet, load_cifar10, load_mnist, load_wikitext2, read_cifar10

from fluid.errors import InvalidFieldError, MissingDependencyError

SETS = pytest.mark.parametrize("dataset", [CIFAR10, MNIST, WIKITEXT2], ids=lambda dataset: dataset.name)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


@SETS
def test_a_folder_that_holds_it_is_taken(dataset: DataSet, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.parent)
    assert dataset.locate(made.name) == str(made)


@SETS
def test_a_folder_without_it_is_refused(dataset: DataSet, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=f"data=.*holds no {dataset.name}: there should be") as raised:
        dataset.locate(str(tmp_path))
    assert raised.value.field == "data"


@SETS
def test_without_a_folder_and_what_downloads_it(
    dataset: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for package in ("torchvision", "torchvision.datasets", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=f"--data DIR.*pip install {dataset.package}"):
        dataset.locate(None)


@SETS
def test_a_download_that_fails(dataset: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fetch(folder: Path) -> None:
        raise ConnectionError("no way out")

    with pytest.raises(MissingDependencyError, match=r"could not be downloaded \(no way out\); give a folder"):
        dataset._replace(fetch=fetch).locate(None)


@SETS
def test_what_was_downloaded_before_is_used(dataset: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "fluid-examples"
    fetched: list[Path] = []

    def fetch(folder: Path) -> None:
        fetched.append(folder)
        make_data(folder)

    for _ in range(2):
        assert dataset._replace(fetch=fetch).locate(None) == str(kept)
    assert fetched == [kept]


def test_cifar10_in_batches(made: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cifar")
    (batches := folder / "cifar-10-batches-py").mkdir()
    x_train, y_train, x_test, y_test = read_cifar10(made)

    def write(name: str, images: np.ndarray, labels: np.ndarray) -> None:
        content = {b"data": images.reshape(len(images), -1), b"labels": labels.tolist()}
        (batches / name).write_bytes(pickle.dumps(content))

    for number, (images, labels) in enumerate(zip(np.split(x_train, 5), np.split(y_train, 5), strict=True), start=1):
        write(f"data_batch_{number}", images, labels)
    write("test_batch", x_test, y_test)
    assert CIFAR10.locate(str(folder)) == str(folder)
    for ours, theirs in zip(read_cifar10(folder), (x_train, y_train, x_test, y_test), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_one_image_in_ten_is_set_aside(made: Path) -> None:
    (train, labels), (validation, _) = load_cifar10(str(made))
    assert train.shape == (360, 3, 32, 32)
    assert validation.shape == (40, 3, 32, 32)
    assert len(labels) == 360
    images = {image.tobytes() for image in train}
    assert not images & {image.tobytes() for image in validation}
    fewer = load_cifar10(str(made), 100)
    np.testing.assert_array_equal(fewer.train.images, train[:100])
    assert len(fewer.validation.labels) == 25


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "MNIST/raw"])
def test_mnist_as_its_site_has_it(
    made: Path, tmp_path_factory: pytest.TempPathFactory, packed: bool, below: str
) -> None:
    images, labels = load_mnist(str(made))
    folder = tmp_path_factory.mktemp("mnist")
    (place := folder / below).mkdir(parents=True, exist_ok=True)
    for name, array in (("images-idx3", images[:, 0]), ("labels-idx1", labels)):
        content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
        path = place / f"train-{name}-ubyte"
        if packed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
        else:
            path.write_bytes(content)
    assert MNIST.locate(str(folder)) == str(folder)
    for ours, theirs in zip(load_mnist(str(folder)), (images, labels), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def text(folder: Path, **parts: str) -> str:
    for part, words in parts.items():
        (folder / f"wiki.{part}.tokens").write_text(words, encoding="utf-8")
    return str(folder)


def test_words_are_numbered_by_how_frequent_they_are(tmp_path: Path) -> None:
    folder = text(tmp_path, train="b a b\n\na b c <unk>\n", valid="c a new\n", test="not this")
    assert WIKITEXT2.locate(folder) == folder
    words = load_wikitext2(folder)
    assert words.train.tolist() == [2, 3, 2, 1, 1, 3, 2, 4, 0, 1]  # <unk> is 0, the end of a line 1.
    assert words.validation.tolist() == [4, 3, 0, 1]
    assert words.vocabulary == 5


def test_fewer_words(tmp_path: Path) -> None:
    folder = text(tmp_path, train="b a b c " * 10, valid="c a " * 10)
    words = load_wikitext2(folder, 20, 1)
    assert words.train.tolist() == [2, 0, 2, 0] * 5
    assert words.validation.tolist() == [0, 0]
    assert words.vocabulary == 3


def test_the_test_text_stands_in_for_the_training_text(tmp_path: Path) -> None:
    folder = text(tmp_path, valid="x y", test="y y x")
    assert load_wikitext2(folder).train.tolist() == [2, 2, 3, 1]


def test_the_data_beside_the_checkout_is_read_too(data: Any) -> None:
    assert load_cifar10(data, 128).train.images.dtype == np.uint8
    assert load_mnist(data).images.shape[1:] == (1, 28, 28)
    assert load_wikitext2(data, 2_000, 100).train.max() < load_wikitext2(data, 2_000, 100).vocabulary

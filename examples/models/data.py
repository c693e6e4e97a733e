"""The data sets of the examples, as NumPy arrays and words, from a folder of files.

``CIFAR10``, ``MNIST`` and ``WIKITEXT2`` say which files they can be read from, in the order in which they are looked
for, and where they come from if no folder is given. Trials that run in one process share what was read.
"""

from __future__ import annotations

import functools
import gzip
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fluid.errors import InvalidFieldError, MissingDependencyError

#: Every how many images one is set aside to choose configurations by.
_SET_ASIDE = 10
#: Names of the parts of WikiText-2, in the two forms it is handed out in.
_TEXTS = {"train": ("train.txt", "wiki.train.tokens"), "valid": ("valid.txt", "wiki.valid.tokens")}
_TEST_TEXTS = ("test.txt", "wiki.test.tokens")
_UNKNOWN, _END = "<unk>", "<eos>"


class DataSet(NamedTuple):
    """A data set that an example learns from.

    Attributes:
        name: what it is called.
        files: what :attr:`find` looks for, in words.
        find: whether a folder holds it.
        fetch: downloads it into a folder, which then holds it.
        package: what ``fetch`` needs, as it is imported and as pip calls it.
    """

    name: str
    files: str
    find: Callable[[Path], bool]
    fetch: Callable[[Path], None]
    package: str

    def locate(self, folder: str | None) -> str:
        """Returns the absolute path of a folder that holds it; without one, downloads it into the user's cache.

        Raises:
            InvalidFieldError: the folder does not hold it.
            MissingDependencyError: what would download it is not installed, or cannot get it.
        """
        if folder is not None:
            if not self.find(Path(folder)):
                raise InvalidFieldError("data", folder, f"holds no {self.name}: there should be {self.files}")
            return os.path.abspath(folder)
        kept = cache_folder()
        if not self.find(kept):
            kept.mkdir(parents=True, exist_ok=True)
            how = f"give a folder (--data DIR) with {self.files}, or: pip install {self.package}"
            try:
                self.fetch(kept)
            except ImportError as error:
                raise MissingDependencyError(f"{self.name} cannot be downloaded, for {error}; {how}") from error
            except (OSError, RuntimeError, ValueError) as error:  # No network is each of these, by library.
                raise MissingDependencyError(f"{self.name} could not be downloaded ({error}); {how}") from error
        return str(kept)


def cache_folder() -> Path:
    """Where downloads and what is made of them are kept: ``$XDG_CACHE_HOME/fluid-examples``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluid-examples"


# -- images ---------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """``uint8`` images of shape ``(n, channels, size, size)``, and their labels from 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def first(self, count: int | None) -> Split:
        """The first so many; all if there is no count."""
        return Split(self.images[:count], self.labels[:count])


class Images(NamedTuple):
    """Images to learn from, and to choose configurations by."""

    train: Split
    validation: Split


@functools.cache
def load_cifar10(folder: str, count: int | None = None) -> Images:
    """CIFAR-10 but for its test images, one image in ten set aside.

    Args:
        folder: what :meth:`DataSet.locate` returned.
        count: how many images to learn from, with a quarter as many (as far as there are) to choose by; ``None`` for
            all there are.
    """
    images, labels = read_cifar10(Path(folder))[:2]
    aside = np.arange(len(labels)) % _SET_ASIDE == 0
    validated = None if count is None else max(1, count // 4)
    return Images(
        Split(images[~aside], labels[~aside]).first(count), Split(images[aside], labels[aside]).first(validated)
    )


def read_cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images ``(n, 3, 32, 32)`` and labels, then those of the test: all of it, or the part that is there.

    Raises:
        FileNotFoundError: it is not there.
    """
    packed, batches = folder / "cifar10-10k.npz", folder / "cifar-10-batches-py"
    if packed.is_file():
        with np.load(packed) as arrays:
            x_train, x_test = (arrays[name].transpose(0, 3, 1, 2) for name in ("x_train", "x_test"))
            return x_train, arrays["y_train"], x_test, arrays["y_test"]
    if not batches.is_dir():
        raise FileNotFoundError(f"there is neither {packed.name} nor {batches.name} in {folder}")
    parts = [_read_batch(batches / f"data_batch_{number}") for number in range(1, 6)]
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return x_train, y_train, *_read_batch(batches / "test_batch")


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    return batch[b"data"].reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"])


@functools.cache
def load_mnist(folder: str) -> Split:
    """Handwritten digits ``(n, 1, 28, 28)``: the training images, or the part of MNIST that the folder holds."""
    packed = Path(folder) / "mnist-10k.npz"
    if packed.is_file():
        with np.load(packed) as arrays:
            return Split(arrays["images"][:, None], arrays["labels"])
    images, labels = (_read_idx(_require(_idx_file(Path(folder), part))) for part in ("images-idx3", "labels-idx1"))
    return Split(images[:, None], labels)


def _idx_file(folder: Path, part: str) -> Path | None:
    places = (folder / "MNIST" / "raw", folder)
    names = (f"train-{part}-ubyte", f"train-{part}-ubyte.gz")
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def _read_idx(path: Path) -> np.ndarray:
    """An array in the format of MNIST's own site: two zero bytes, type, dimensions, their big-endian lengths, data."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# -- words ----------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """A text to learn from and one to choose configurations by, as numbers of words.

    Attributes:
        train, validation: ``int64``, one number a word or end of a line.
        vocabulary: how many different numbers there are.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int


@functools.cache
def load_wikitext2(folder: str, count: int | None = None, vocabulary: int | None = None) -> Words:
    """WikiText-2; where its training text is missing, the test text takes its place.

    Args:
        folder: what :meth:`DataSet.locate` returned.
        count: words to learn from, with a tenth as many to choose by; ``None`` for all there are.
        vocabulary: how many of the most frequent words are told apart, the others being one; ``None`` for all.
    """
    texts = {part: _require(_text_file(Path(folder), part)) for part in _TEXTS}
    words = {part: _read_words(path) for part, path in texts.items()}
    train = words["train"][:count]
    validation = words["valid"][: None if count is None else count // 10]
    # Ties in the order of the text, so that the numbers are the same everywhere.
    frequent = [word for word, _ in Counter(train).most_common() if word not in (_UNKNOWN, _END)]
    numbers = {word: number for number, word in enumerate([_UNKNOWN, _END, *frequent[:vocabulary]])}
    indexed = [np.array([numbers.get(word, 0) for word in text], np.int64) for text in (train, validation)]
    return Words(indexed[0], indexed[1], len(numbers))


def _text_file(folder: Path, part: str) -> Path | None:
    names = _TEXTS[part] + (_TEST_TEXTS if part == "train" else ())
    places = (folder / "wikitext-2", folder)
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _read_words(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [word for line in lines for word in (*line.split(), _END)]


def _require(path: Path | None) -> Path:
    if path is None:
        raise FileNotFoundError("the data that the sweep began with is not there any more")
    return path


# -- where they come from -------------------------------------------------------------------------------------


def _fetch_cifar10(folder: Path) -> None:
    from torchvision.datasets import CIFAR10 as torchvision_cifar10

    torchvision_cifar10(folder, download=True)


def _fetch_mnist(folder: Path) -> None:
    from torchvision.datasets import MNIST as torchvision_mnist

    torchvision_mnist(folder, download=True)


def _fetch_wikitext2(folder: Path) -> None:
    from datasets import load_dataset

    parts = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    (folder / "wikitext-2").mkdir(exist_ok=True)
    for part, name in (("train", "train.txt"), ("validation", "valid.txt")):
        (folder / "wikitext-2" / name).write_text("".join(parts[part]["text"]), encoding="utf-8")


CIFAR10 = DataSet(
    "CIFAR-10",
    "cifar-10-batches-py/ or cifar10-10k.npz",
    lambda folder: (folder / "cifar10-10k.npz").is_file() or (folder / "cifar-10-batches-py").is_dir(),
    _fetch_cifar10,
    "torchvision",
)
MNIST = DataSet(
    "MNIST",
    "MNIST/raw/, train-images-idx3-ubyte[.gz] with train-labels-idx1-ubyte[.gz], or mnist-10k.npz",
    lambda folder: (
        (folder / "mnist-10k.npz").is_file()
        or all(_idx_file(folder, part) is not None for part in ("images-idx3", "labels-idx1"))
    ),
    _fetch_mnist,
    "torchvision",
)
WIKITEXT2 = DataSet(
    "WikiText-2",
    "wikitext-2/ with valid.txt and train.txt or test.txt, or the same as wiki.*.tokens",
    lambda folder: all(_text_file(folder, part) is not None for part in _TEXTS),
    _fetch_wikitext2,
    "datasets",
)

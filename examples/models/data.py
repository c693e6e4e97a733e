"""The data sets of the examples, as NumPy arrays and words, from a folder of files.

``CIFAR10``, ``MNIST`` and ``WIKITEXT2`` name the files they can be read from, in the order in which they are searched
for, and download them if no folder is given. Trials load the data through ``fluid.shared``, so that all trials on a
machine have them in memory once; that is why no function here keeps what it returns.
"""

from __future__ import annotations

import gzip
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fluid.errors import InvalidFieldError, MissingDependencyError

#: One image in so many is held out for comparing configurations.
_SET_ASIDE = 10
#: Names of the parts of WikiText-2, in its two distributed forms.
_TEXTS = {"train": ("train.txt", "wiki.train.tokens"), "valid": ("valid.txt", "wiki.valid.tokens")}
_TEST_TEXTS = ("test.txt", "wiki.test.tokens")
_UNKNOWN, _END = "<unk>", "<eos>"


class DataSet(NamedTuple):
    """A data set of an example.

    Attributes:
        name: for people.
        files: the files that :attr:`find` looks for, for people.
        find: whether a folder holds it.
        fetch: downloads it into a folder.
        package: the package that ``fetch`` needs, by its import name and pip's name.
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
            MissingDependencyError: the package that downloads it is not installed, or the download failed.
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
            except (OSError, RuntimeError, ValueError) as error:  # Without a network, by library.
                raise MissingDependencyError(f"{self.name} could not be downloaded ({error}); {how}") from error
        return str(kept)


def cache_folder() -> Path:
    """Returns the folder of downloads and of what is made of them: ``$XDG_CACHE_HOME/fluid-examples``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluid-examples"


# -- images ---------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """``uint8`` images of shape ``(n, channels, size, size)``, and their labels from 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def first(self, count: int | None) -> Split:
        """Returns the first ``count`` images; all if that is ``None``."""
        return Split(self.images[:count], self.labels[:count])


class Images(NamedTuple):
    """Images for training, and held-out ones for comparing configurations."""

    train: Split
    validation: Split


def load_cifar10(folder: str, count: int | None = None) -> Images:
    """Returns CIFAR-10 without its test images; one image in ten is held out.

    Args:
        folder: what :meth:`DataSet.locate` returned.
        count: number of training images, with up to a quarter as many held-out ones; ``None`` for all.
    """
    images, labels = read_cifar10(Path(folder))[:2]
    aside = np.arange(len(labels)) % _SET_ASIDE == 0
    validated = None if count is None else max(1, count // 4)
    return Images(
        Split(images[~aside], labels[~aside]).first(count), Split(images[aside], labels[aside]).first(validated)
    )


def read_cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the training images ``(n, 3, 32, 32)`` and labels, then the test's, as far as the folder has them.

    Raises:
        FileNotFoundError: the folder has none.
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


def load_mnist(folder: str) -> Split:
    """Returns handwritten digits ``(n, 1, 28, 28)``: the training images, or the part of MNIST in the folder."""
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
    """Reads an array in MNIST's IDX format: two zero bytes, type, dimensions, their big-endian lengths, data."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# -- words ----------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """A training text and a validation text, as numbers of words.

    Attributes:
        train, validation: ``int64``, one number per word or end of line.
        vocabulary: how many different numbers there are.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int


def load_wikitext2(folder: str, count: int | None = None, vocabulary: int | None = None) -> Words:
    """Returns WikiText-2; the test text replaces a missing training text.

    Args:
        folder: what :meth:`DataSet.locate` returned.
        count: words of the training text, with a tenth as many for validation; ``None`` for all.
        vocabulary: number of the most frequent words that keep their own number; the others share one. ``None`` for
            all.
    """
    texts = {part: _require(_text_file(Path(folder), part)) for part in _TEXTS}
    words = {part: _read_words(path) for part, path in texts.items()}
    train = words["train"][:count]
    validation = words["valid"][: None if count is None else count // 10]
    # Ties in the order of the text, so that the numbers are the same on every machine.
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
        raise FileNotFoundError("the data that the sweep began with is missing")
    return path


# -- the data sets and their sources ----------------------------------------------------------------------------------


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

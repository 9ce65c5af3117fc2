"""Images for the demo: scikit-learn's digits, Fashion-MNIST from Debian, or any idx files."""

from __future__ import annotations

import gzip
import math
import shutil
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

PACKAGE = "dataset-fashion-mnist"
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_UNSIGNED_BYTE = 0x08


class DataError(ValueError):
    """Data that cannot be found or read; the message is for the user."""


@dataclass(frozen=True)
class Images:
    """Flat images, float32 in [0, 1], of shape [samples, pixels]; labels int64, [samples]."""

    name: str
    train: TensorDataset
    test_x: torch.Tensor
    test_y: torch.Tensor
    classes: int

    @property
    def pixels(self) -> int:
        return self.test_x.shape[1]


def load(choice: str) -> Images:
    """Return the data for ``--data``: "digits", "fashion-mnist" or a folder with idx files.

    Raises DataError.
    """
    if choice == "digits":
        return _digits()
    if choice == "fashion-mnist":
        return _from_idx("Fashion-MNIST", find(_package_files()))
    folder = Path(choice)
    if not folder.is_dir():
        raise DataError(f"--data {choice}: must be digits, fashion-mnist or a folder of idx files")
    return _from_idx(folder.resolve().name, find(folder.iterdir()))


def find(paths: Iterable[Path]) -> list[Path]:
    """Pick the four files of a data set, each plain or .gz. Raises DataError naming the missing."""
    # Some copies are called train-images.idx3-ubyte.
    by_name = {path.name.removesuffix(".gz").replace(".idx", "-idx"): path for path in paths}
    missing = [name for name in FILES if name not in by_name]
    if missing:
        raise DataError(f"no file {' or '.join(missing)} (or .gz) among the data files")
    return [by_name[name] for name in FILES]


def read_idx(path: Path) -> np.ndarray:
    """Return the array of unsigned bytes in an idx file, plain or gzipped. Raises DataError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise DataError(f"{path}: not an idx file of unsigned bytes")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise DataError(f"{path}: ends within its header")
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: {len(content) - header} bytes of data, but its header says {shape}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _digits() -> Images:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    # Shuffled once: the file is ordered by writer. 1437 samples to train with, 360 to test.
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(pixels[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return Images(
        "scikit-learn's digits", TensorDataset(x[:1437], y[:1437]), x[1437:], y[1437:], 10
    )


def _from_idx(name: str, paths: list[Path]) -> Images:
    arrays = [read_idx(path) for path in paths]
    tensors = []
    for images, labels, path in zip(arrays[::2], arrays[1::2], paths[::2], strict=True):
        if images.ndim < 2 or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
            raise DataError(
                f"{path}: images of shape {images.shape} and labels of shape {labels.shape} "
                "do not belong together"
            )
        x = torch.tensor(images.reshape(len(images), -1), dtype=torch.float32) / 255.0
        tensors += [x, torch.tensor(labels, dtype=torch.int64)]
    train_x, train_y, test_x, test_y = tensors
    if train_x.shape[1] != test_x.shape[1]:
        raise DataError(
            f"{paths[2]}: {test_x.shape[1]} pixels an image, but {train_x.shape[1]} in {paths[0]}"
        )
    classes = int(max(train_y.max(), test_y.max())) + 1
    return Images(name, TensorDataset(train_x, train_y), test_x, test_y, classes)


def _package_files() -> list[Path]:
    remedy = f"install it (apt install {PACKAGE}), or pass the folder of the files: --data DIR"
    if shutil.which("dpkg") is None:
        raise DataError(
            f"--data fashion-mnist: needs Debian's {PACKAGE}, here is no dpkg: {remedy}"
        )
    listing = subprocess.run(["dpkg", "-L", PACKAGE], capture_output=True, text=True)
    if listing.returncode != 0:
        raise DataError(f"--data fashion-mnist: Debian's {PACKAGE} is not installed: {remedy}")
    return [Path(line) for line in listing.stdout.splitlines()]

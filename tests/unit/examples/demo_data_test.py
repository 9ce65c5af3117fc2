"""The demo's data: idx files as published, and a sentence for each way they can be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import demo_data
import numpy as np
import pytest
import torch


def _idx(array: np.ndarray) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def _write(folder: Path, train: int = 6, test: int = 4, *, packed: bool = False) -> None:
    random = np.random.default_rng(0)
    for count, images, labels in (
        (train, demo_data.FILES[0], demo_data.FILES[1]),
        (test, demo_data.FILES[2], demo_data.FILES[3]),
    ):
        for name, array in (
            (images, random.integers(0, 256, (count, 3, 2))),
            (labels, np.arange(count) % 3),
        ):
            content = _idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_folder_of_idx_files(tmp_path: Path, packed: bool) -> None:
    _write(tmp_path, packed=packed)
    data = demo_data.load(str(tmp_path))
    x, y = data.train.tensors
    raw = demo_data.read_idx(demo_data.find(tmp_path.iterdir())[0])
    assert raw.shape == (6, 3, 2)
    assert torch.equal(x * 255, torch.tensor(raw.reshape(6, 6), dtype=torch.float32))
    assert y.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.test_x.shape, data.test_y.tolist()) == ((4, 6), [0, 1, 2, 0])
    assert (data.pixels, data.classes) == (6, 3)


def test_names_with_a_dot_are_found(tmp_path: Path) -> None:
    _write(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    found = demo_data.find(tmp_path.iterdir())
    assert found[0].name == "train-images.idx3-ubyte"


def test_missing_files_are_named(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / demo_data.FILES[3]).unlink()
    with pytest.raises(demo_data.DataError, match="t10k-labels-idx1-ubyte"):
        demo_data.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an idx file"),
        (b"\x89PNG and more", "not an idx file"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 0]), "not an idx file of unsigned bytes"),
        (bytes([0, 0, 8, 3, 0, 0]), "ends within its header"),
        (_idx(np.zeros((4, 3)))[:-1], r"11 bytes of data, but its header says \(4, 3\)"),
        (_idx(np.zeros((4, 3))) + b"x", "13 bytes of data"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(demo_data.DataError, match=f"broken: {words}"):
        demo_data.read_idx(path)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(_idx(np.zeros(9)))[:-6]])
def test_broken_gzip_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gz"
    path.write_bytes(content)
    with pytest.raises(demo_data.DataError, match=r"broken\.gz: cannot be read"):
        demo_data.read_idx(path)


def test_images_and_labels_of_different_length(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / demo_data.FILES[1]).write_bytes(_idx(np.zeros(5)))
    with pytest.raises(demo_data.DataError, match="do not belong together"):
        demo_data.load(str(tmp_path))


def test_unknown_choice() -> None:
    with pytest.raises(demo_data.DataError, match="--data mnits: must be digits, fashion-mnist"):
        demo_data.load("mnits")


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_data, "PACKAGE", "dataset-that-nobody-has")
    with pytest.raises(demo_data.DataError, match="--data DIR"):
        demo_data.load("fashion-mnist")


def test_digits_are_split_alike_every_time() -> None:
    first, second = demo_data.load("digits"), demo_data.load("digits")
    assert torch.equal(first.test_x, second.test_x)
    assert (len(first.train), len(first.test_y), first.pixels) == (1437, 360, 64)
    assert 0.0 <= float(first.test_x.min()) < float(first.test_x.max()) <= 1.0

"""Readers for CIFAR-10, WikiText-2 and the GPT-2 byte-pair encoding.

Two layouts are supported: the packed layout (gzip and xz, see `sources`) and the public archives. The content is
verified against a fixed sha256 in both cases.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from benchmarks.paper.sources import DATA_BYTES, DataSet, Found, PublicFile, find
from trimtab.core.errors import FormatError
from trimtab.core.files import read_bytes
from trimtab.tasks.task import DataSource

BATCH_IMAGES = 10_000
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_SHA256 = {
    "train images": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
    "test images": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
    "train labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}
WIKITEXT2_SHA256 = {
    "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
}
WIKITEXT2_BYTES = {"train": 10_797_148, "valid": 1_121_681}
GPT2_BPE_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_BPE_BYTES = {"encoder.json": 1_042_301, "vocab.bpe": 456_318}

_KRIZ = "https://www.cs.toronto.edu/~kriz"
_PYTORCH_EXAMPLES = (
    "https://raw.githubusercontent.com/pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8"
    "/word_language_model/data/wikitext-2"
)
_OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"

CIFAR10 = DataSet(
    "CIFAR-10",
    "cifar10",
    files=tuple(f"{name}.gz" for name in (*CIFAR10_BATCHES, "test_batch")),
    public=(
        PublicFile(
            f"{_KRIZ}/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
    ),
)
WIKITEXT2 = DataSet(
    "WikiText-2",
    "wikitext-2",
    files=tuple(f"{split}.txt.xz" for split in WIKITEXT2_SHA256),
    public=tuple(
        PublicFile(f"{_PYTORCH_EXAMPLES}/{split}.txt", digest, WIKITEXT2_BYTES[split])
        for split, digest in WIKITEXT2_SHA256.items()
    ),
)
GPT2_BPE = DataSet(
    "GPT-2 byte-pair encoding",
    "gpt2",
    files=tuple(GPT2_BPE_SHA256),
    public=tuple(
        PublicFile(f"{_OPENAI}/{name}", digest, GPT2_BPE_BYTES[name]) for name, digest in GPT2_BPE_SHA256.items()
    ),
)


class Images(NamedTuple):
    """CIFAR-10: images (N, 3, 32, 32) uint8 and labels (N,) uint8; N is 50,000 (training) or 10,000 (test)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: DataSource


class Texts(NamedTuple):
    """WikiText-2 (word-level version): training and validation split as UTF-8 bytes, newlines unchanged."""

    train: bytes
    valid: bytes
    source: DataSource


class BpeFiles(NamedTuple):
    """Verified files of the GPT-2 encoding: `encoder.json` (50,257 entries) and `vocab.bpe` (50,000 merges)."""

    encoder: Path
    merges: Path
    source: DataSource


def cifar10() -> Images:
    """Return CIFAR-10 (Krizhevsky 2009), images in their original order. Takes about 4 seconds.

    Raises:
        DataMissingError: The data set was not found.
        FormatError: A file is damaged.
    """
    found = find(CIFAR10)
    batches = _cifar10_archive(found.files) if found.is_public else _cifar10_folder(found.files)
    train, test = [batches[name] for name in CIFAR10_BATCHES], batches["test_batch"]
    arrays = {
        "train images": np.concatenate([images for images, _ in train]),
        "train labels": np.concatenate([labels for _, labels in train]),
        "test images": test[0],
        "test labels": test[1],
    }
    return Images(*arrays.values(), source=_verified(CIFAR10, found, arrays, CIFAR10_SHA256))


def wikitext2() -> Texts:
    """Return WikiText-2, word-level version (Merity et al. 2016). Perplexities on the raw version are not comparable.

    Raises:
        DataMissingError: The data set was not found.
        FormatError: A file is damaged.
    """
    found = find(WIKITEXT2)
    texts = {}
    for split, num_bytes in WIKITEXT2_BYTES.items():
        path = found.files[f"{split}.txt" if found.is_public else f"{split}.txt.xz"]
        texts[split] = (
            read_bytes(path, "a text", limit=DATA_BYTES) if found.is_public else _unpack(path, lzma.open, num_bytes)
        )
    return Texts(**texts, source=_verified(WIKITEXT2, found, texts, WIKITEXT2_SHA256))


def gpt2_bpe() -> BpeFiles:
    """Return the files of GPT-2's byte-level encoding (Radford et al. 2019).

    Raises:
        DataMissingError: The files were not found.
        FormatError: A file is damaged.
    """
    found = find(GPT2_BPE)
    contents = {name: read_bytes(found.files[name], "a text", limit=DATA_BYTES) for name in GPT2_BPE_SHA256}
    source = _verified(GPT2_BPE, found, contents, GPT2_BPE_SHA256)
    return BpeFiles(found.files["encoder.json"], found.files["vocab.bpe"], source)


def undo_differences(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode a decompressed batch file of the packed layout.

    The file contains the label bytes, then the planes R-G, G and B-G. Each plane is differenced along columns, then
    along rows, modulo 256.

    Returns:
        Images (N, 3, 32, 32) uint8 and labels (N,) uint8.
    """
    numbers = np.frombuffer(data, np.uint8)
    labels, planes = numbers[:BATCH_IMAGES], numbers[BATCH_IMAGES:].reshape(3, BATCH_IMAGES, 32, 32)
    planes = planes.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[::2] += planes[1]
    return np.ascontiguousarray(planes.swapaxes(0, 1)), labels.copy()  # a view of `data` would be read-only


def _cifar10_folder(files: Mapping[str, Path]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    num_bytes = BATCH_IMAGES * (1 + np.prod(CIFAR10_SHAPE).item())
    return {
        name.removesuffix(".gz"): undo_differences(_unpack(path, gzip.open, num_bytes)) for name, path in files.items()
    }


def _cifar10_archive(files: Mapping[str, Path]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the batches from the public archive in memory. No file is extracted, so no member can write outside."""
    (path,) = files.values()
    batches = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for name in (*CIFAR10_BATCHES, "test_batch"):
                member = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
                records = np.frombuffer(member.read() if member else b"", np.uint8).reshape(BATCH_IMAGES, -1)
                batches[name] = records[:, 1:].reshape(-1, *CIFAR10_SHAPE).copy(), records[:, 0].copy()
    except (OSError, EOFError, LookupError, ValueError, zlib.error, tarfile.TarError) as error:
        raise _damaged(path, error) from error
    return batches


def _unpack(path: Path, opener: Callable[[Path], IO[bytes]], num_bytes: int) -> bytes:
    """Return the unpacked content of a file, which must be exactly `num_bytes` long. Reads at most one byte more."""
    try:
        with opener(path) as stream:
            data = stream.read(num_bytes + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from error
    if len(data) != num_bytes:
        raise _damaged(path, f"{len(data):,} bytes, or more, unpacked instead of {num_bytes:,}")
    return data


def _verified(
    data_set: DataSet, found: Found, pieces: Mapping[str, bytes | np.ndarray], expected: Mapping[str, str]
) -> DataSource:
    """Verify the sha256 of each piece and return the source, whose sha256 covers all pieces in order."""
    whole = hashlib.sha256()
    for name, piece in pieces.items():
        digest = hashlib.sha256(piece).hexdigest()
        if digest != expected[name]:
            raise FormatError(
                f"{data_set.name} {name} ({found.origin})",
                got=f"data with sha256 {digest}",
                expected=expected[name],
                hint="The copy is damaged or another version: replace it, or point TRIMTAB_DATA elsewhere.",
            )
        whole.update(piece)
    return DataSource(data_set.name, found.origin, whole.hexdigest())


def _damaged(path: Path, why: object) -> FormatError:
    return FormatError(
        f"{path.parent.name}/{path.name}",
        got=f"a file that cannot be read ({why})",
        expected="an undamaged copy",
        hint="Replace it, or point TRIMTAB_DATA elsewhere.",
    )

"""Data sets bundled with installed packages. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import importlib
import platform
from typing import NamedTuple

import numpy as np

from trimtab.core.errors import DataMissingError, DependencyError
from trimtab.tasks.task import DataSource


class Digits(NamedTuple):
    """1,797 handwritten digits: images (N, 8, 8) uint8 with values from 0 to 16, labels (N,) uint8."""

    images: np.ndarray
    labels: np.ndarray
    source: DataSource


class Prose(NamedTuple):
    """English reference text as UTF-8 bytes."""

    text: bytes
    source: DataSource


def digits() -> Digits:
    """Return the test part of the UCI optical digits, bundled with scikit-learn.

    Raises:
        DependencyError: scikit-learn is not installed.
    """
    try:
        sklearn = importlib.import_module("sklearn")
        load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise DependencyError(
            "scikit-learn",
            got=f"none ({error})",
            expected="the package that carries the digits",
            hint="pip install 'trimtab[tasks]'",
        ) from error
    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    return Digits(images, labels, DataSource("digits", f"embedded in scikit-learn {sklearn.__version__}", digest))


def python_topics() -> Prose:
    """Return Python's reference texts: the values of `pydoc_data.topics` in key order, joined by newlines.

    The text depends on the Python version (466,195 bytes in 3.11.7).

    Raises:
        DataMissingError: This Python was built without `pydoc_data.topics`.
    """
    origin = f"{platform.python_implementation()} {platform.python_version()} pydoc_data.topics"
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataMissingError(
            "pydoc_data.topics",
            got=f"a Python without it ({error})",
            expected=origin,
            hint="Install the full standard library; digits_resnet does without.",
        ) from error
    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    return Prose(text, DataSource("Python topics", f"embedded in {origin}", hashlib.sha256(text).hexdigest()))

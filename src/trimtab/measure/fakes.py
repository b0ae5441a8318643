"""Tensors that have everything but memory. What torch offers for it is private, and is used here alone."""

from __future__ import annotations

import copy
import logging
from typing import Any, TypeVar

import torch

from trimtab.core.errors import DependencyError
from trimtab.measure.watching import come_back, stand_back

T = TypeVar("T")


class Fakes:
    """A world of fake tensors: operators have results of the right shape, dtype and aliasing, and compute nothing.

    While it is entered, models and optimizers are made without memory.

    Raises:
        DependencyError: this torch has no fake tensors where we look for them.
    """

    def __init__(self) -> None:
        try:
            from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
        except ImportError:
            raise DependencyError(
                "torch", given=torch.__version__, expected="one whose fake tensors are known", way_out="Use torch 2.13."
            ) from None
        self._copies, self.mode = FakeCopyMode, FakeTensorMode()
        self._log, self._level = logging.getLogger(FakeTensorMode.__module__), logging.NOTSET

    def copy(self, values: T) -> T:
        """Return a deep copy whose tensors are fakes; what was shared inside stays shared.

        What is fake already is of another world, and comes into this one too.
        """
        with self._copies(self.mode):
            return copy.deepcopy(values)

    def __enter__(self) -> Fakes:
        self.mode.__enter__()
        stand_back()
        self._level = self._log.level
        self._log.setLevel(logging.CRITICAL + 1)  # an operator that fails raises; torch logs its traceback besides
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.mode.__exit__(*error)
        finally:
            self._log.setLevel(self._level)
            come_back()

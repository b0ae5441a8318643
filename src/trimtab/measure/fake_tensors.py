"""Fake tensors: shape, dtype and strides without memory. Only this module uses torch's private interface."""

from __future__ import annotations

import copy
import logging
from typing import Any, TypeVar

import torch

from trimtab.core.errors import DependencyError
from trimtab.measure.dispatch_mode import come_back, stand_back

T = TypeVar("T")


class FakeTensors:
    """Context for fake tensors: operators return the correct shape, dtype and aliasing without computing values.

    Inside the context, new models and optimizers take no memory.

    Raises:
        DependencyError: This torch version has no fake tensors at the known place.
    """

    def __init__(self) -> None:
        try:
            from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
        except ImportError:
            raise DependencyError(
                "torch",
                got=torch.__version__,
                expected="2.13",
                problem=f"Fake tensors of torch {torch.__version__} are not supported.",
                hint="Install torch 2.13.",
                code="dependency.torch_version",
            ) from None
        self._copies, self.mode = FakeCopyMode, FakeTensorMode()
        self._log, self._level = logging.getLogger(FakeTensorMode.__module__), logging.NOTSET

    def copy(self, values: T) -> T:
        """Return a deep copy with fake tensors; shared objects stay shared.

        Fake tensors of another context are moved to this one.
        """
        with self._copies(self.mode):
            return copy.deepcopy(values)

    def __enter__(self) -> FakeTensors:
        self.mode.__enter__()
        stand_back()
        self._level = self._log.level
        # A failing operator raises an exception, and torch would log the traceback in addition.
        self._log.setLevel(logging.CRITICAL + 1)
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.mode.__exit__(*error)
        finally:
            self._log.setLevel(self._level)
            come_back()

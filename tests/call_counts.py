"""Values that no reference of a loss leads to: planning and recomputation neither hold nor restore them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

_HELD: list[SimpleNamespace] = []  # named in no function's code


class OutOfReach:
    """Attributes that are found by a number, in a list that is found by the name of this module."""

    def __init__(self, **values: Any) -> None:
        held = vars(sys.modules[__name__])["_HELD"]
        self._number = len(held)
        held.append(SimpleNamespace(**values))

    @property
    def held(self) -> SimpleNamespace:
        """The attributes; read and set by name."""
        found: SimpleNamespace = vars(sys.modules[__name__])["_HELD"][self._number]
        return found

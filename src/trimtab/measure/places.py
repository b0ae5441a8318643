"""Paths of objects that a training step can change, and their kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple


class ChangeKind(StrEnum):
    """What sort of object a forward or a loss changed."""

    PARAMETER = "parameter"
    FROZEN_PARAMETER = "frozen_parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    CONTAINER = "container"
    CLOSURE = "closure"
    GENERATOR = "generator"
    OPTIMIZER = "optimizer"
    GRADIENT = "gradient"
    BATCH = "batch"


class Place:
    """How an object is reached: a label after its parent's path, and the kind of change it would be.

    Args:
        function: name of the function whose closure or globals the path starts in.
        depth: functions and objects between a root and the object.
    """

    __slots__ = ("depth", "function", "kind", "label", "parent")

    def __init__(
        self, label: str, kind: ChangeKind, parent: Place | None = None, function: str = "", depth: int = 0
    ) -> None:
        self.label, self.kind, self.parent, self.function, self.depth = label, kind, parent, function, depth

    def path(self, more: str = "") -> str:
        """Return the whole path, followed by `more`."""
        labels, each, function = [more], self, ""
        while True:
            labels.append(each.label)
            if each.parent is None:
                function = each.function
                break
            each = each.parent
        path = "".join(reversed(labels)).removeprefix(".") or "model"
        return f"{path} in {function}" if function else path

    def then(self, label: str, kind: ChangeKind | None = None, *, deeper: bool = False) -> Place:
        """Return the place of something that the object here refers to."""
        return Place(label, kind or self.kind, self, "", self.depth + deeper)


class Reached(NamedTuple):
    """An object that can change: a tensor, container, array or generator; or the value of a name.

    Attributes:
        is_beside: reached through a function, and neither the model's nor the optimizer's.
        is_named: a container whose keys are attributes. get, put: read and set the value of a name.
        is_log: a container that functions only add to, and none reads; its items are not entered.
    """

    value: Any
    place: Place
    is_beside: bool
    is_named: bool = False
    is_log: bool = False
    get: functools.partial[Any] | None = None
    put: Callable[[Any], None] | None = None

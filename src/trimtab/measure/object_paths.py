"""Paths and kinds of the objects that a training step can change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple


class ChangeKind(StrEnum):
    """Kind of a changed object."""

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


class ObjectPath:
    """Location of an object: a label appended to its parent's path, and the object's kind.

    Args:
        label: Last part of the path.
        kind: Kind of the object.
        parent: Location of the referring object.
        function: Name of the function whose closure or globals start the path.
        depth: Number of functions and objects between a root and the object.
    """

    __slots__ = ("depth", "function", "kind", "label", "parent")

    def __init__(
        self, label: str, kind: ChangeKind, parent: ObjectPath | None = None, function: str = "", depth: int = 0
    ) -> None:
        self.label, self.kind, self.parent, self.function, self.depth = label, kind, parent, function, depth

    def path(self, more: str = "") -> str:
        """Return the complete path, followed by `more`."""
        labels, each, function = [more], self, ""
        while True:
            labels.append(each.label)
            if each.parent is None:
                function = each.function
                break
            each = each.parent
        path = "".join(reversed(labels)).removeprefix(".") or "model"
        return f"{path} in {function}" if function else path

    def then(self, label: str, kind: ChangeKind | None = None, *, deeper: bool = False) -> ObjectPath:
        """Return the location of an object that this one refers to."""
        return ObjectPath(label, kind or self.kind, self, "", self.depth + deeper)


class ReachableObject(NamedTuple):
    """A found object: a tensor, container, array or generator, or a variable.

    Attributes:
        value: The object.
        place: Its location.
        is_beside: True if it was reached through a function and does not belong to the model or optimizer.
        is_named: True for a dictionary of attributes.
        is_log: True for an append-only container, whose items are not followed.
        get: Reads the variable.
        put: Sets the variable.
    """

    value: Any
    place: ObjectPath
    is_beside: bool
    is_named: bool = False
    is_log: bool = False
    get: functools.partial[Any] | None = None
    put: Callable[[Any], None] | None = None

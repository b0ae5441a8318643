"""Find the definitions of public names in the syntax trees of `src`.

No module is imported, so that optional dependencies need not be installed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_WITH_SETTINGS = ("Plan", "Candidate")  # Classes with a field for every setting.
SOURCE = Path(__file__).parents[1] / "src"


class Defined(NamedTuple):
    """A definition.

    Attributes:
        module: dotted name of the module that contains the definition.
        node: syntax tree of the definition.
    """

    module: str
    node: ast.AST


def definition(name: str) -> Defined | None:
    """Return the definition of a dotted name, through re-exports and base classes; None if the name does not exist."""
    if (found := _syntax(name)) is not None:
        return Defined(name, found)
    parent, _, last = name.rpartition(".")
    scope = definition(parent) if parent else None
    if scope is None:
        return None
    if isinstance(scope.node, ast.Module):
        return _in_module(scope.module, scope.node, last)
    return _in_class(scope, last)


def first_line(name: str) -> str:
    """Return the first line of a name's docstring.

    Raises:
        LookupError: the name does not exist, or has no docstring.
    """
    found = definition(name)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    text = ast.get_docstring(found.node) if found is not None and isinstance(found.node, documented) else None
    if text is None:
        raise LookupError(f"{name}: not found, or without a docstring")
    return text.partition("\n")[0]


@functools.cache
def _syntax(module: str) -> ast.Module | None:
    path = SOURCE / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None


def _in_module(module: str, scope: ast.Module, wanted: str) -> Defined | None:
    for node in ast.walk(scope):  # Includes imports under TYPE_CHECKING.
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if wanted == (alias.asname or alias.name):
                return definition(f"{node.module}.{alias.name}")
    found = _bound(scope.body, wanted)
    return None if found is None else Defined(module, found)


def _in_class(scope: Defined, wanted: str) -> Defined | None:
    if not isinstance(scope.node, ast.ClassDef):
        return None
    own = _bound(scope.node.body, wanted) or next(_set_on_self(scope.node, wanted), None)
    if own is None and scope.node.name in _WITH_SETTINGS:
        return _setting(wanted)
    if own is not None:
        return Defined(scope.module, own)
    bases = (definition(f"{scope.module}.{base.id}") for base in scope.node.bases if isinstance(base, ast.Name))
    inherited = (_in_class(base, wanted) for base in bases if base is not None)
    return next((found for found in inherited if found is not None), None)


def _setting(wanted: str) -> Defined | None:
    """Return the class of a setting, which is a field of plans and candidates."""
    for path in sorted((SOURCE / "trimtab" / "settings").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = _bound(node.body, "name") if isinstance(node, ast.ClassDef) else None
            if isinstance(name, ast.Assign) and isinstance(name.value, ast.Constant) and name.value.value == wanted:
                return Defined(f"trimtab.settings.{path.stem}", node)
    return None


def _set_on_self(scope: ast.ClassDef, wanted: str) -> Iterator[ast.AST]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == wanted:
            yield node


def _bound(body: Iterable[ast.stmt], wanted: str) -> ast.AST | None:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if wanted in (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)):
            return node
    return None

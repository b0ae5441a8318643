"""Training tasks: model, data, metric and hand-tuned recipes. Built in, or loaded from user code (`my_module:task`)."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from trimtab.core.errors import FormatError, TrimtabError, ValueGivenError
from trimtab.tasks.own_data import of_datasets
from trimtab.tasks.task import DataSource, Metric, SampleDraws, StrongRecipe, Task, TaskData

__all__ = [
    "BUILT_IN",
    "DataSource",
    "Metric",
    "SampleDraws",
    "StrongRecipe",
    "Task",
    "TaskData",
    "load_task",
    "load_task_or_setup",
    "of_datasets",
]

BUILT_IN: tuple[str, ...] = ("words_gpt", "digits_resnet", "source_gpt")
# Tasks at the sizes of the paper, which need data from outside. A checkout has them in benchmarks/paper.
IN_CHECKOUT: tuple[str, ...] = (
    "cifar10_resnet",
    "wikitext2_gpt",
    "cifar10_resnet50",
    "cifar10_resnet50_7x7",
    "wikitext2_gpt2",
)


_loaded: dict[Path, tuple[tuple[int, int], ModuleType]] = {}  # Modules of files, by path, with the file's state.


def load_task(name: str) -> Task:
    """Return a built-in or user-defined task by name.

    Args:
        name: Built-in name, `my_module:attribute` (a module in the current folder, dots allowed) or
            `path/to/file.py:attribute`. The folder is importable while the user's code loads, and for a file in a
            package also the folder of the package.

    Raises:
        ValueGivenError: The built-in task, module, file or attribute does not exist.
        FormatError: The user's module fails to import, or the attribute is not a Task.
    """
    task = load_task_or_setup(name)
    if not isinstance(task, Task):
        raise FormatError(
            f"task {name}",
            problem=f"{name} is a function, but this command needs a trimtab.tasks.Task.",
            hint="A function setup(seed) works with plan, compare, race and ablate.",
            code="task.is_setup",
        )
    return task


def load_task_or_setup(name: str) -> Task | Callable[[int], Any]:
    """Return a task, or a function `setup(seed)` that builds a `trimtab.Loop`; name and errors as in `load_task`."""
    if name in BUILT_IN:
        return importlib.import_module(f"{__name__}.{name}").TASK  # type: ignore[no-any-return]
    if name in IN_CHECKOUT:
        file = f"benchmarks/paper/{name}.py"
        raise ValueGivenError(
            "task",
            problem=f"The package does not contain the task {name!r}, which is in {file} of a checkout.",
            hint=f"Run from a checkout with {file}:task.",
            code="task.in_checkout",
        )
    where, attribute = _split(name)
    module = _load_file(name, Path(where)) if where.endswith(".py") else _load_module(name, where)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        expected = f"an attribute {attribute!r} of {where}"
        hint = _did_you_mean(f"{where}:{n}" for n in near)
        hint = hint or f"Write a function {attribute}(seed) that returns a trimtab.Loop; `trimtab init` shows one."
        raise ValueGivenError("task", got=f"{name!r}", expected=expected, hint=hint)
    task = getattr(module, attribute)
    if not isinstance(task, Task) and (isinstance(task, type) or not callable(task)):
        raise FormatError(
            f"task {name}",
            got=f"a {type(task).__name__}",
            expected="a function setup(seed) that returns a trimtab.Loop, or a trimtab.tasks.Task, already built",
        )
    return task


def _split(name: object) -> tuple[str, str]:
    """Split `name` at its last colon into (module or file, attribute), so that a Windows drive letter is kept."""
    where, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    is_module = all(part.isidentifier() for part in where.split("."))
    if not colon or not attribute.isidentifier() or not (is_module or where.endswith(".py")):
        raise ValueGivenError(
            "task",
            got=repr(name),
            expected=f"one of {', '.join(BUILT_IN)}, or my_module:attribute, or path/to/file.py:attribute",
            hint=_did_you_mean(_near(name)),
        )
    return where, attribute


def _near(name: object) -> list[str]:
    """Return the built-in task with a similar name, or the tasks and functions that a file or module defines."""
    text = name.rstrip(":") if isinstance(name, str) else ""
    file = Path(text) if text.endswith(".py") else Path(*text.split(".")).with_suffix(".py") if text else None
    if file is None or not file.is_file():
        return difflib.get_close_matches(text, (*BUILT_IN, *IN_CHECKOUT), n=1)
    return [f"{text}:{defined}" for defined in _defined_in(file)]


def _defined_in(file: Path) -> list[str]:
    """Return the names of functions setup(seed) and tasks that a file defines, without running it."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and len(node.args.args) == 1]
    setups = [node.name for node in functions if node.args.args[0].arg == "seed"]
    calls = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    made = [node for node in calls if ast.unparse(node.value).partition("(")[0].endswith("Task")]
    tasks = [each.id for node in made for each in node.targets if isinstance(each, ast.Name)]
    return [*setups, *tasks] or [node.name for node in functions]


def _did_you_mean(names: Iterable[str]) -> str:
    found = list(names)[:3]
    return f"Did you mean {' or '.join(found)}?" if found else ""


def _load_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueGivenError("task", got=repr(name), expected=f"a file {path.name} that exists")
    path = path.resolve()
    written = path.stat()
    state = (written.st_mtime_ns, written.st_size)
    if path in _loaded and _loaded[path][0] == state:  # A command may ask for a task, and then for a setup.
        return _loaded[path][1]
    # dataclasses and pickle look the module up in sys.modules; the hash keeps its name distinct from installed modules.
    module_name = f"_trimtab_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueGivenError("task", got=repr(name), expected="a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _importing(name, path.parent), _importing(name, _package_root(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    _loaded[path] = state, module
    return module


def _package_root(path: Path) -> Path:
    """Return the folder that contains the outermost package of a file, or the file's folder outside a package."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _load_module(name: str, where: str) -> ModuleType:
    folder = Path.cwd()
    base = folder.joinpath(*where.split("."))
    if not (base.with_name(base.name + ".py").is_file() or (base / "__init__.py").is_file()):
        raise ValueGivenError(
            "task",
            got=repr(name),
            expected=f"a module {where} in the current folder, or one of {', '.join(BUILT_IN)}",
            hint="Run from the folder that holds it, or give the file: path/to/file.py:attribute.",
        )
    with _importing(name, folder):
        module = importlib.import_module(where)
    if not Path(module.__file__ or "/").resolve().is_relative_to(folder.resolve()):
        raise ValueGivenError(
            "task",
            got=f"{name!r}, but another module of that name is already imported",
            expected="a module of the current folder",
            hint="Rename it, or give the file: path/to/file.py:attribute.",
        )
    return module


@contextmanager
def _importing(name: str, folder: Path) -> Iterator[None]:
    """Make `folder` importable while the user's module runs. Raises FormatError if the import fails."""
    importlib.invalidate_caches()  # finds a module written a moment ago
    sys.path.insert(0, str(folder))
    try:
        yield
    except TrimtabError:
        raise
    except Exception as error:
        raise FormatError(
            f"task {name}", got=f"a module that raises {type(error).__name__}: {error}", expected="one that imports"
        ) from error
    finally:
        sys.path.remove(str(folder))

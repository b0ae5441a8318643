"""The house: a folder is a permission. Imports point downwards, and importing does no work (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# Lowest first. A module may import from its own layer and from those before it.
LAYERS = (
    "core",
    "errors",
    "losses",
    "nn",
    "progress_display",
    "carbon",
    "energy",
    "state",
    "measure",
    "techniques",
    "settings",
    "plans",
    "planner",
    "adaptive_batch",
    "training",
    "profiling",
    "distributed",
    "checkpoint",
    "api",
    "integrations",
    "tasks",
    "experiments",
    "cli",
)
# Stricter than the order: all that a package (or one module) may import of trimtab. The longest prefix decides.
ONLY = {
    "trimtab": {
        "trimtab.core",
        "trimtab.errors",
        "trimtab.plans",
        "trimtab.api",
        "trimtab.losses",
        "trimtab.training",
        "trimtab.distributed",
        "trimtab.checkpoint",
        "trimtab.experiments",
    },  # the package root alone, not what is below it
    "trimtab.core": {"trimtab.core"},
    "trimtab.progress_display": {"trimtab.core", "trimtab.progress_display"},
    "trimtab.carbon": {"trimtab.core", "trimtab.carbon"},
    "trimtab.energy": {"trimtab.core", "trimtab.energy"},
    "trimtab.state": {"trimtab.core", "trimtab.state"},
    "trimtab.measure": {"trimtab.core", "trimtab.losses", "trimtab.state", "trimtab.measure"},
    "trimtab.techniques": {"trimtab.core", "trimtab.nn", "trimtab.state", "trimtab.measure", "trimtab.techniques"},
    "trimtab.settings": {"trimtab.core", "trimtab.nn", "trimtab.techniques", "trimtab.settings"},
    "trimtab.plans": {"trimtab.core", "trimtab.settings", "trimtab.plans"},
    "trimtab.planner": {"trimtab.core", "trimtab.settings", "trimtab.plans", "trimtab.planner"},
    "trimtab.adaptive_batch": {"trimtab.core", "trimtab.adaptive_batch"},
    "trimtab.integrations": {
        "trimtab.core",
        "trimtab.plans",
        "trimtab.losses",
        "trimtab.training",
        "trimtab.api",
        "trimtab.integrations",
    },
    "trimtab.tasks": {"trimtab.core", "trimtab.losses", "trimtab.tasks", "trimtab.nn"},
    "trimtab.integrations.trainer_rules": {
        "trimtab.core",
        "trimtab.plans",
        "trimtab.settings",
        "trimtab.training",
        "trimtab.api",
        "trimtab.distributed.process_group",
        "trimtab.integrations",
    },
    "trimtab.integrations.planning_messages": {"trimtab.core", "trimtab.plans", "trimtab.settings"},
    "trimtab.integrations.trackers": {"trimtab.core"},
    "trimtab.integrations.tracking": {
        "trimtab.core",
        "trimtab.distributed.process_group",
        "trimtab.integrations",
    },
    "trimtab.experiments.result_table": {"trimtab.core", "trimtab.planner.statistics"},
    "trimtab.experiments.change_effects": {
        "trimtab.core",
        "trimtab.planner.statistics",
        "trimtab.experiments.result_table",
    },
    "trimtab.experiments.comparison": {
        "trimtab.experiments.change_effects",
        "trimtab.core",
        "trimtab.settings",
        "trimtab.plans",
        "trimtab.planner.statistics",
        "trimtab.experiments.pages",
        "trimtab.experiments.plan_changes",
        "trimtab.experiments.result_table",
        "trimtab.experiments.time_to_target",
    },
    "trimtab.experiments.time_to_target": {
        "trimtab.core",
        "trimtab.planner.statistics",
        "trimtab.experiments.result_table",
    },
    "trimtab.experiments.scaling": {
        "trimtab.core",
        "trimtab.plans",
        "trimtab.planner.statistics",
        "trimtab.experiments.comparison",
        "trimtab.experiments.result_table",
    },
    "trimtab.experiments.phase_result": {
        "trimtab.core",
        "trimtab.planner.statistics",
        "trimtab.experiments.comparison",
        "trimtab.experiments.result_table",
    },
}
ROOT_USERS = {"cli", "experiments"}  # the layers that use trimtab as its users do
STDLIB_ONLY = ("trimtab.core", "trimtab.carbon", "trimtab.plans", "trimtab.planner", "trimtab.adaptive_batch")
TABLES = {"trimtab.planner.recompute_solver"}  # of them, with numpy: millions of sums in the time of a plan
READERS = (
    "benchmark_rows",
    "change_effects",
    "comparison",
    "pages",
    "phase_result",
    "result_table",
    "results",
    "scaling",
    "time_to_target",
)
TORCH_FREE = (
    *STDLIB_ONLY,
    *(f"trimtab.experiments.{name}" for name in READERS),
)
REQUIRED = {"torch", "numpy"}
# Each optional package and the only modules that adapt it.
OPTIONAL = {
    "typer": {
        "trimtab.cli",
        "trimtab.cli.checkpoint_commands",
        "trimtab.cli.train_commands",
        "trimtab.cli.main",
        "trimtab.cli.planning_commands",
        "trimtab.cli.options",
        "trimtab.cli.output",
        "trimtab.cli.experiment_commands",
    },
    "rich": {"trimtab.progress_display"},
    "jinja2": {"trimtab.experiments.pages"},
    "sklearn": {"trimtab.tasks.embedded"},
    "deepspeed": {"trimtab.distributed.deepspeed_backend"},
    "torchao": {"trimtab.techniques.float8_products"},
    "pynvml": {"trimtab.energy.nvml"},
    "zeus": {"trimtab.energy.zeus"},
    "transformers": {
        "trimtab.cli.starters.transformers",
        "trimtab.experiments.named_models",
        "trimtab.integrations.transformers",
    },
    "timm": {"trimtab.experiments.named_models"},
    "torchvision": {"trimtab.experiments.named_models"},
    "accelerate": {"trimtab.integrations.accelerate", "trimtab.integrations.transformers"},
    "lightning": {"trimtab.integrations.lightning"},
    "safetensors": {"trimtab.checkpoint.state_files"},
    "zlib_ng": {"trimtab.checkpoint.atomic_directory"},
    "mlflow": {"trimtab.integrations.trackers"},
    "trackio": {"trimtab.integrations.trackers"},
    "wandb": {"trimtab.integrations.trackers"},
}
MAX_LINES = 800
NO_NAMES = {"utils", "util", "common", "tools", "helpers", "helper"}

Sources = Mapping[str, str]  # path below src, with slashes -> text


def module_name(path: str) -> str:
    """Return the dotted name of a file below src."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, package: str) -> bool:
    """Return whether a dotted name is a package or lies in it."""
    return name == package or name.startswith(package + ".")


@functools.cache  # each rule looks at the same files
def imports(path: str, text: str, modules: frozenset[str]) -> tuple[tuple[int, str], ...]:
    """Return (line, module) of every import, also inside functions, under TYPE_CHECKING and by literal name."""
    return tuple(_imports(path, text, modules))


def _imports(path: str, text: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import, also inside functions, under TYPE_CHECKING and by literal name."""
    package = module_name(path).split(".")
    if PurePosixPath(path).name != "__init__.py":
        package.pop()
    tree = ast.parse(text)
    # Settings, which plans hold, and the text of plans name the types of plans.
    types = {id(each) for node in ast.walk(tree) if _is_for_types(node) for each in node.body}
    for node in ast.walk(tree):
        named = node.module if isinstance(node, ast.ImportFrom) and id(node) in types else None
        if package[1:2] in (["settings"], ["plans"]) and within(named or "", "trimtab.plans"):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package):
                yield node.lineno, "<above the package>"
                continue
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            named = [f"{base}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in dict.fromkeys(n if n in modules else base for n in named))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def all_imports(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """Yield (importing module, what it imports, place)."""
    modules = frozenset(module_name(path) for path in sources)
    for path, text in sources.items():
        for line, target in imports(path, text, modules):
            yield module_name(path), target, f"{path}:{line}"


def layer_violations(sources: Sources) -> list[str]:
    """Return what breaks the order of layers or a stricter rule."""
    found = []
    for module in map(module_name, sources):
        if module != "trimtab" and module.split(".")[1] not in LAYERS:
            found.append(f"{module}: belongs to no layer")
    for module, target, place in all_imports(sources):
        if not within(target, "trimtab"):
            found += [f"{place}: {target}"] if target.startswith("<") else []
            continue
        layer = module.partition(".")[2].partition(".")[0]
        if target == "trimtab":
            if layer not in ROOT_USERS:
                found.append(f"{place}: {module} imports the package root")
            continue
        aim = target.split(".")[1]
        if layer in LAYERS and (aim not in LAYERS or LAYERS.index(aim) > LAYERS.index(layer)):
            found.append(f"{place}: {module} imports upwards: {target}")
            continue
        rules = [name for name in ONLY if (module == name if name == "trimtab" else within(module, name))]
        if rules and not any(within(target, allowed) for allowed in ONLY[max(rules, key=len)]):
            found.append(f"{place}: {module} may not import {target}")
    return found


def package_violations(sources: Sources) -> list[str]:
    """Return imports of other packages from where they may not be."""
    found = []
    for module, target, place in all_imports(sources):
        top = target.partition(".")[0]
        if top == "trimtab" or top in sys.stdlib_module_names or target.startswith("<"):
            continue
        if any(within(module, name) for name in STDLIB_ONLY) and not (top == "numpy" and module in TABLES):
            found.append(f"{place}: {module} is standard library only, yet imports {target}")
        elif top == "torch" and any(within(module, name) for name in TORCH_FREE):
            found.append(f"{place}: {module} reads values only, yet imports torch")
        elif top not in REQUIRED and module not in OPTIONAL.get(top, ()):
            found.append(f"{place}: {module} is not the module that adapts {top}")
    return found


def stale_permissions(sources: Sources) -> list[str]:
    """Return modules that hold a permission for an optional package and do not use it."""
    used = {(target.partition(".")[0], module) for module, target, _ in all_imports(sources)}
    existing = {module_name(path) for path in sources}
    held = ((package, module) for package, modules in OPTIONAL.items() for module in sorted(modules & existing))
    return [f"{module}: no longer imports {package}" for package, module in held if (package, module) not in used]


def cycle_violations(sources: Sources) -> list[str]:
    """Return one import cycle, if there is any."""
    graph: dict[str, set[str]] = {module_name(path): set() for path in sources}
    for module, target, _ in all_imports(sources):
        if target in graph and target != module:
            graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["cycle: " + " -> ".join(error.args[1])]
    return []


def shape_violations(sources: Sources) -> list[str]:
    """Return files that are too long or named for nothing."""
    lines = {path: len(text.splitlines()) for path, text in sources.items()}
    found = [f"{path}: {n} lines, more than {MAX_LINES}" for path, n in lines.items() if n > MAX_LINES]
    for path in sources:
        if bad := NO_NAMES & set(PurePosixPath(path).with_suffix("").parts):
            found.append(f"{path}: {bad.pop()} names nothing; say what it holds")
    return found


CHECKERS = {
    "layers": layer_violations,
    "packages": package_violations,
    "permissions": stale_permissions,
    "cycles": cycle_violations,
    "shapes": shape_violations,
}


def house() -> dict[str, str]:
    """Return every source file."""
    files = sorted((SOURCE / "trimtab").rglob("*.py"))
    return {file.relative_to(SOURCE).as_posix(): file.read_text(encoding="utf-8") for file in files}


@pytest.mark.parametrize("checker", CHECKERS.values(), ids=CHECKERS)
def test_house_keeps_its_rules(checker):
    sources = house()
    assert len(sources) > 20, "the sources were not found"
    assert checker(sources) == []


def source(path: str, text: str) -> dict[str, str]:
    return {f"trimtab/{path}": text}


TRESPASSES = {
    "torch inside a function of core": ("packages", source("core/x.py", "def f():\n    import torch"), "torch"),
    "numpy in planner": ("packages", source("planner/x.py", "from numpy.linalg import norm"), "numpy"),
    "torch by its literal name": ("packages", source("core/x.py", "import_module('torch')"), "torch"),
    "torch in a page": ("packages", source("experiments/pages.py", "import torch.nn as nn"), "torch"),
    "torch in the result": (
        "packages",
        source("experiments/comparison.py", "from torch import Tensor"),
        "torch",
    ),
    "an undeclared package": ("packages", source("training/x.py", "import psutil"), "psutil"),
    "an optional package elsewhere": ("packages", source("api.py", "from rich import print"), "rich"),
    "an unused permission": ("permissions", source("cli/experiment_commands.py", "import rich"), "typer"),
    "upward": ("layers", source("training/x.py", "from trimtab.tasks.task import Task"), "upwards: trimtab.tasks.task"),
    "upward in a function": ("layers", source("measure/x.py", "def f():\n    import trimtab.api"), "upwards"),
    "upward and relative": ("layers", source("core/x.py", "from ..training import a"), "upwards: trimtab.training"),
    "upward from a package": ("layers", source("core/__init__.py", "from ..planner import a"), "upwards"),
    "upward by folder": (
        "layers",
        source("core/x.py", "from .. import planner") | source("planner/__init__.py", ""),
        "upwards: trimtab.planner",
    ),
    "upward for types": ("layers", source("planner/x.py", "if T:\n    from trimtab.training import a"), "upwards"),
    "above the package": ("layers", source("core/x.py", "from ... import y"), "above the package"),
    "planner reading measure": ("layers", source("planner/x.py", "import trimtab.measure.timing"), "may not import"),
    "tasks reading training": ("layers", source("tasks/x.py", "from trimtab.training.run import Run"), "may not"),
    "integrations reading planner": ("layers", source("integrations/x.py", "import trimtab.planner.search"), "may not"),
    "result reading compare": ("layers", source("experiments/scaling.py", "from .compare import a"), "may not"),
    "result reading planner": (
        "layers",
        source("experiments/comparison.py", "import trimtab.planner.search"),
        "may not",
    ),
    "the root reading tasks": ("layers", source("__init__.py", "from trimtab.tasks import load_task"), "may not"),
    "the root read from inside": ("layers", source("training/x.py", "from trimtab import Plan"), "package root"),
    "a folder without a layer": ("layers", source("plugins/x.py", ""), "no layer"),
    "a cycle": (
        "cycles",
        source("core/a.py", "from trimtab.core import b") | source("core/b.py", "def f():\n    from . import a"),
        "trimtab.core.a",
    ),
    "a long file": (
        "shapes",
        source("core/x.py", "\n" * 801) | source("core/y.py", "") | source("core/z.py", ""),
        "801 lines",
    ),
    "a folder named utils": ("shapes", source("utils/x.py", ""), "utils"),
    "a file named helpers": ("shapes", source("core/helpers.py", ""), "helpers"),
}


@pytest.mark.parametrize(("checker", "sources", "expected"), TRESPASSES.values(), ids=TRESPASSES)
def test_a_trespass_is_caught(checker, sources, expected):
    found = CHECKERS[checker](sources)
    assert len(found) == 1, found
    assert expected in found[0]


ALLOWED = {
    "downward": source("training/x.py", "import torch\nfrom trimtab.core import errors\nfrom . import layout"),
    "root by a user": source("experiments/compare.py", "import trimtab\nfrom trimtab import plan"),
    "optional in its place": source("cli/output.py", "def f():\n    import typer"),
    "result on values": source("experiments/pages.py", "import jinja2\nfrom . import result_table"),
    "root offering the front door": source("__init__.py", "from trimtab.api import plan"),
    "a chain is no cycle": source("core/a.py", "from . import b") | source("core/b.py", "import json"),
}


@pytest.mark.parametrize("sources", ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_is_let_through(sources):
    assert [violation for checker in CHECKERS.values() for violation in checker(sources)] == []


def run_fresh(code: str) -> str:
    """Return what a fresh interpreter prints."""
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def torch_free_modules() -> list[str]:
    names = map(module_name, house())
    return ["trimtab", *(name for name in names if any(within(name, free) for free in TORCH_FREE))]


def test_values_and_decisions_load_without_torch():
    loaded = f"import importlib, sys\nfor name in {torch_free_modules()!r}: importlib.import_module(name)\n"
    assert run_fresh(loaded + "print('torch' in sys.modules)") == "False"


def test_front_door_loads_torch_on_first_use():
    code = "import sys, trimtab\nbefore = 'torch' in sys.modules\ntrimtab.plan\nprint(before, 'torch' in sys.modules)"
    assert run_fresh(code) == "False True"


def test_every_public_name_exists():
    """And no other is public: what the root imports for itself has an underscore, or is a module below it."""
    public = (
        "import types, trimtab\n"
        "star = {}; exec('from trimtab import *', star)\n"
        "names = {n for n in dir(trimtab) if not n.startswith('_')}\n"
        "own = {n for n in names if not isinstance(getattr(trimtab, n), types.ModuleType)} | {'errors'}\n"
        "listed = list(trimtab.__all__)\n"
        "print(listed == sorted(set(listed)), sorted(own - set(listed)), set(listed) - own, set(listed) - set(star))"
    )
    assert run_fresh(public) == "True ['Any', 'TYPE_CHECKING', 'annotations'] set() set()"


def test_types_are_told_of_the_same_names_that_are_loaded_late():
    text = house()["trimtab/__init__.py"]
    told = [node for node in ast.parse(text).body if isinstance(node, ast.If)]
    names = {alias.name: node.module for block in told for node in block.body for alias in node.names}
    assert run_fresh("import trimtab\nprint(sorted(trimtab._LAZY.items()))") == str(sorted(names.items()))


def listing_modules() -> list[str]:
    return [module_name(path) for path, text in house().items() if "\n__all__ = [" in text]


def test_every_listed_name_exists():
    modules = listing_modules()
    assert {"trimtab", "trimtab.tasks", "trimtab.cli"} <= set(modules)
    absent = (
        f"import importlib\nmodules = map(importlib.import_module, {modules!r})\n"
        "print([(m.__name__, n) for m in modules for n in m.__all__ if not hasattr(m, n)])"
    )
    assert run_fresh(absent) == "[]"


# What `import trimtab` loads: values, and nothing that has work to do or takes a while.
LOADED = {
    "trimtab",
    "trimtab.errors",
    "trimtab.plans",
    "trimtab.plans.plan",
    "trimtab.plans.plan_text",
    *(name for name in map(module_name, house()) if within(name, "trimtab.settings")),
    "trimtab.core",
    "trimtab.core.files",
    "trimtab.core.hardware",
    "trimtab.core.record",
    "trimtab.core.serialization",
    "trimtab.core.batch_rule",
    "trimtab.core.validation",
    "trimtab.core.choice",
    "trimtab.core.energy_reading",
    "trimtab.core.errors",
    "trimtab.core.objective",
    "trimtab.core.recompute_schedule",
    "trimtab.core.parallelism",
    "trimtab.core.stopping_rule",
    "trimtab.core.units",
}
MAX_MODULES = 141  # with those of the standard library, and what the interpreter itself begins with


def test_importing_loads_values_alone():
    code = (
        "import sys\nbare = set(sys.modules)\nimport trimtab\n"
        "print([sorted(n for n in sys.modules if n.partition('.')[0] == 'trimtab'), len(sys.modules),"
        " sorted({n.partition('.')[0] for n in set(sys.modules) - bare} - sys.stdlib_module_names)])"
    )
    ours, num_modules, packages = ast.literal_eval(run_fresh(code))
    assert set(ours) == LOADED
    assert packages == ["trimtab"]
    assert num_modules <= MAX_MODULES, "is one of them needed before it is used?"


def test_the_table_of_layers_is_of_those_there_are_from_the_highest():
    text = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, flags=re.MULTILINE)
    assert tuple(reversed(rows)) == LAYERS


PROBE = """
import logging, os, signal, sys, threading, warnings
opened = []
sys.addaudithook(lambda event, _: opened.append(event) if event.startswith(('socket.', 'subprocess.')) else None)
def state():
    return {
        'signal': [(s, signal.getsignal(s)) for s in signal.valid_signals()],
        'thread': threading.enumerate(),
        'warnings': list(warnings.filters),
        'logging': (list(logging.root.handlers), logging.root.level, logging.root.manager.disable,
                    [n for n in logging.root.manager.loggerDict if n.startswith('trimtab')]),
        'environment': dict(os.environ),
        'hooks': (sys.excepthook, sys.displayhook, threading.excepthook, list(sys.path), list(sys.meta_path)),
        'opened': list(opened),
    }
before = state()
{code}
after = state()
print(' '.join(name for name in before if before[name] != after[name]))
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import socket; socket.socket().close()", "opened"),
        ("signal.signal(signal.SIGTERM, lambda *_: None)", "signal"),
        ("t = threading.Thread(target=threading.Event().wait, daemon=True); t.start()", "thread"),
        ("warnings.simplefilter('ignore')", "warnings"),
        ("logging.basicConfig()", "logging"),
        ("os.environ['A_VARIABLE'] = '1'", "environment"),
        ("sys.path.insert(0, 'x')", "hooks"),
        ("import trimtab", ""),
    ],
)
def test_importing_does_no_work(code, expected):
    assert run_fresh(PROBE.replace("{code}", code)) == expected


def test_long_tests_exist():
    """Every test that `make test` leaves out is a function of its file."""
    root = Path(__file__).parents[1]
    lines = (root / "tests" / "soak" / "long_tests.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == sorted(set(listed))
    for each in listed:
        file, _, name = each.partition("::")
        assert name.partition("[")[0].partition("::")[0] in (root / file).read_text(encoding="utf-8"), each

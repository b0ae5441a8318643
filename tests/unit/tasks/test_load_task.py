"""`load_task`: built-in names, the user's modules and files, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.objective import PRECISIONS
from trimtab.tasks import BUILT_IN, IN_CHECKOUT, Task, load_task

USER_TASK = """
from torch import nn, optim, ones
from my_rows import NUM_ROWS
from trimtab.tasks import DataSource, Metric, Task, TaskData
ten = Task(
    name="ten", description="", make_model=lambda: nn.Linear(1, 1), make_optimizer=lambda m: optim.SGD(m.parameters()),
    loss_fn=lambda m, b: m(b[0]).mean(), metric=Metric("loss", False, lambda m, b: 0.0), targets=(1.0,),
    load_data=lambda: TaskData((ones(NUM_ROWS, 1),), ((ones(1, 1),),), DataSource("ones", "made here", "0")),
    batch_size=1, budget_samples=1, eval_every_samples=1,
)
not_a_task = 3
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A folder with a user's task, and everything imported from it forgotten afterwards."""
    before = set(sys.modules)
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "my_rows.py").write_text("NUM_ROWS = 10")
    (folder / "my_tasks.py").write_text(USER_TASK)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text(USER_TASK)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "syntax.py").write_text("def")
    (folder / "json.py").write_text(USER_TASK)
    (folder / "refused.py").write_text("from trimtab.core.validation import integer\ninteger('rows', 0)")
    monkeypatch.chdir(folder)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_page_on_starting_has_it_as_it_is(name):
    task, page = load_task(name), Path(__file__).parents[3] / "docs" / "start.md"
    targets = f"{task.targets[0]:g} to {task.targets[-1]:g}"
    row = f"| `{name}` | {task.description} | {task.batch_size} | {targets} |"
    assert row in page.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_is_whole(name):
    task = load_task(name)
    assert isinstance(task, Task)
    assert task.name == name
    assert task.budget_samples % task.eval_every_samples == 0
    assert task.eval_every_samples % task.batch_size == 0
    assert 10 <= task.budget_samples // task.eval_every_samples <= 20
    easiest_first = sorted(task.targets, reverse=not task.metric.higher_is_better)
    assert list(task.targets) == easiest_first
    assert task.reference.declared
    assert task.reference.precision == "fp32"
    assert task.strong is not None
    assert task.strong.precision in PRECISIONS
    assert task.strong.budget_samples % task.eval_every_samples == 0
    assert 2 <= task.budget_samples / task.strong.budget_samples <= 4
    assert task.adapted_samples == task.strong.budget_samples  # the adapted plan and the peer have the same horizon


def test_targets_and_rates_are_those_of_the_paper():
    task = load_task("digits_resnet")
    (group,) = task.make_optimizer(task.make_model()).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.999), 0.01)
    assert group["fused"] is None
    assert group["foreach"] is None
    its = load_task("source_gpt")
    assert not its.metric.higher_is_better
    with raises(ValueGivenError, code="value.invalid", field="task.targets"):
        replace(its, targets=tuple(reversed(its.targets)))
    with pytest.raises(ValueGivenError) as raised:
        load_task("cifar100")
    assert all(name in str(raised.value) for name in BUILT_IN)


@pytest.mark.parametrize(
    "name", ["my_tasks:ten", "package.inner:ten", "my_tasks.py:ten", "./package/../my_tasks.py:ten"]
)
def test_a_user_task_is_found(user_folder, name):
    path_before = list(sys.path)
    task = load_task(name)
    assert task.name == "ten"
    assert task.load_data().num_samples == 10
    assert sys.path == path_before


def test_a_file_is_found_from_elsewhere_with_what_it_imports(user_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_task(f"{user_folder / 'my_tasks.py'}:ten").name == "ten"
    (user_folder / "package" / "outer.py").write_text("from package.inner import ten")
    monkeypatch.chdir(tmp_path)
    assert load_task(f"{user_folder / 'package' / 'outer.py'}:ten").name == "ten"
    assert str(user_folder) not in sys.path


@pytest.mark.parametrize(
    "name",
    [
        "",
        "digits",
        "DIGITS_RESNET",
        "my_tasks",
        ":ten",
        "my_tasks:",
        "my_tasks:ten:ten",
        "my-tasks:ten",
        ".my_tasks:ten",
        "no_such_module:ten",
        "package:ten",
        "my_tasks:eleven",
        "my_tasks:ten.name",
        "no_such_file.py:ten",
        "my_tasks.py:eleven",
        "package/inner:ten",
        "os:path",
        "torch:nn",
        "numpy.linalg:norm",
        "json:ten",
        None,
        3,
    ],
)
def test_a_bad_name_is_refused(user_folder, name):
    with pytest.raises(ValueGivenError) as raised:
        load_task(name)
    assert str(name) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_tasks:not_a_task", "a int"),
        ("my_tasks.py:not_a_task", "a int"),
        ("broken:ten", "ZeroDivisionError"),
        ("broken.py:ten", "ZeroDivisionError"),
        ("syntax:ten", "SyntaxError"),
        ("syntax.py:ten", "SyntaxError"),
    ],
)
def test_what_is_there_and_no_task_is_a_format_error(user_folder, name, said):
    path_before, modules_before = list(sys.path), set(sys.modules)
    with pytest.raises(FormatError, match=said):
        load_task(name)
    assert sys.path == path_before
    assert not {module for module in set(sys.modules) - modules_before if "broken" in module or "syntax" in module}


def test_what_a_user_file_imports_raises_and_defines_is_its_own(user_folder):
    with raises(ValueGivenError, code="value.invalid", field="rows"):
        load_task("refused:ten")
    (user_folder / "with_class.py").write_text(USER_TASK + "\nclass Row: pass\nten.make_model.row = Row()\n")
    import pickle

    row = load_task("with_class.py:ten").make_model.row
    assert type(pickle.loads(pickle.dumps(row))) is type(row)


def test_importing_tasks_loads_no_optional_package():
    code = (
        "import sys, trimtab.tasks, trimtab.tasks.embedded\n"
        "for name in trimtab.tasks.BUILT_IN: trimtab.tasks.load_task(name)\n"
        "print(sorted({'sklearn', 'torchvision'} & set(sys.modules)))"
    )
    source = Path(__file__).resolve().parents[3] / "src"
    env = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"targets": (0.9, 0.8)}, "task.targets"),  # hardest first
        ({"targets": (0.8, 0.8)}, "task.targets"),
        ({"targets": (0.8, float("nan"))}, "task.targets"),
        ({"targets": ("0.8",)}, "task.targets"),
        ({"metric": max}, "task.metric"),
        ({"reference": "bf16"}, "task.reference"),
        ({"strong": "sgd"}, "task.strong"),
        ({"adapted_samples": 0}, "task.adapted_samples"),
        ({"batch_size": 2.5}, "task.batch_size"),
        ({"loss_fn": None}, "task.loss_fn"),
    ],
)
def test_a_task_that_cannot_be_is_refused_at_once(changes, field):
    with pytest.raises(ValueGivenError, match=field):
        replace(load_task("digits_resnet"), **changes)


@pytest.mark.parametrize("name", IN_CHECKOUT)
def test_a_task_of_the_paper_is_refused_with_the_place_of_its_file(name):
    with raises(ValueGivenError, code="task.in_checkout", field="task") as caught:
        load_task(name)
    assert f"benchmarks/paper/{name}.py:task" in caught.value.hint
    file, _, attribute = caught.value.hint.removesuffix(".").rpartition(" ")[2].partition(":")
    assert load_task(f"{Path(__file__).parents[3] / file}:{attribute}").name == name

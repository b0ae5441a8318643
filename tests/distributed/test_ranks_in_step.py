"""Ranks of a comparison do the same, whatever their own clocks, metrics and files say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_cases

import trimtab
from trimtab.core.serialization import from_json
from trimtab.experiments import result_table
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.subject import RunOptions
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import storage_bytes

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
sys.path.insert(0, str(TASKS))
from smooth_task import counting  # noqa: E402
from tiny_task import task as tiny  # noqa: E402

pytestmark = pytest.mark.slow

RANK = """
    from dataclasses import replace
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    sys.path.insert(0, case)
    from smooth_task import ODD_ROWS, counting
    from tiny_task import task
    import trimtab
    from trimtab.profiling import trials
    from trimtab.core.serialization import to_json
    from trimtab.core.errors import TrimtabError
    from trimtab.plans.plan import Plan
    from trimtab.distributed import process_group
    from trimtab.experiments.comparison import Comparison
    from trimtab.experiments.result_table import Row, ResultTable
    from trimtab.experiments.subject import RunOptions
    from trimtab.experiments.task_plans import job_ranks

    trials.BLOCK_S = 0.003
    process_group.TIMEOUT_S = 8.0
    found = {}
    table = ResultTable.of([Row("a", 0, 0, "seconds", float(rank), "s")])

    def options(name, ranks, **how):
        return RunOptions(out=folder / name, together=ranks, **how)

    with job_ranks() as ranks:
        found["each"] = ranks.each(rank + 0.5)
        found["made"] = ranks.made(ResultTable, lambda: table).values
        found["absent"] = ranks.read(ResultTable, folder / "absent.json") is None
        ranks.write(folder / f"of-{rank}.json", table)
        found["read"] = ranks.read(ResultTable, folder / f"of-{rank}.json").values
        torch.manual_seed(0)
        ranks.draw_apart(0)
        found["draws"] = torch.rand(2).tolist()

        def slow_loss(model, batch):
            time.sleep(0.01 * rank)
            return task.loss_fn(model, batch)

        noted = replace(task.metric, evaluate=lambda model, batches: float("nan") if rank else 0.25)
        slow = replace(task, loss_fn=slow_loss, metric=noted)
        plan = Plan.fixed(16, num_ranks=2, zero_stage=0)
        how = {"steps": 12, "pairs": 1, "evaluate_every": 4}
        found["slow"] = to_json(trimtab.compare(slow, plan=plan, options=options("slow", ranks, **how)))

        made = trimtab.compare(task, options=options("made_here", ranks, steps=6, pairs=1))
        found["plan"] = [made.plan.batch_size, made.plan.num_ranks, made.plan.zero_stage.value, to_json(made.plan)]
        found["whole"] = to_json(made)
        share = Plan.fixed(-(-ODD_ROWS // 2), 6, num_ranks=2, zero_stage=1)
        odd = trimtab.compare(counting, plan=share, options=options("odd", ranks, pairs=1, to_end=True))
        found["odd"] = to_json(odd)
        try:
            trimtab.compare(task, plan=plan, options=options("made_here", ranks, steps=6, pairs=1))
        except TrimtabError as error:
            found["another"] = [type(error).__name__, str(error), getattr(error, "is_echo", None)]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, list[dict]]:
    """What two ranks found that ran it all, by rank."""
    folder = tmp_path_factory.mktemp("in_step")
    ranks = run_cases(RANK, folder, str(TASKS))[0]
    for each in ranks:
        for name in ("slow", "whole", "odd"):
            each[name] = from_json(Comparison, each[name])
    return folder / "0", ranks


def test_figures_and_files_are_rank_0s_on_all(found):
    folder, ranks = found
    for each in ranks:
        assert each["each"] == [0.5, 1.5]
        assert each["made"] == each["read"] == [0.0]
        assert each["absent"]
    assert (folder / "of-0.json").exists()
    assert not (folder / "of-1.json").exists()


def test_each_rank_draws_numbers_of_its_own(found):
    torch.manual_seed(0)
    assert found[1][0]["draws"] == torch.rand(2).tolist() != found[1][1]["draws"]


def test_a_paired_run_is_the_same_on_ranks_whose_clocks_differ(found):
    one, other = (each["slow"].table for each in found[1])
    for arm in ("baseline", "plan"):
        columns = [
            [(row.round, row.value) for row in table.select(metric, arm)]
            for table in (one, other)
            for metric in ("seconds", "samples", "evaluation:accuracy")
        ]
        assert columns[:3] == columns[3:]
        seconds, samples, metrics = columns[:3]
        assert sum(value for _, value in samples) == 12 * 32
        assert all(s >= 0.01 * n / 32 for (_, s), (_, n) in zip(seconds, samples, strict=True))
        assert [value for _, value in metrics] == [0.25] * 3


def test_a_peak_counts_the_buckets_that_ddp_holds(found):
    """Of as many samples on one process, and a bucket for each gradient."""
    half = replace(tiny, batch_size=tiny.batch_size // 2)
    # The larger of two: memory of earlier tests that is freed during a measured step lowers its count.
    loops = [trimtab.compare(half, plan=Plan.fixed(16), options=RunOptions(3, 1)) for _ in range(2)]
    whole, *alone = (each.table.value("peak_memory", "baseline") for each in (found[1][0]["whole"], *loops))
    buckets = storage_bytes(tiny.make_model().parameters())
    assert whole == pytest.approx(max(alone) + buckets, rel=0.05)
    assert buckets > 0.1 * whole


def test_the_plan_is_made_by_rank_0_for_its_share(found):
    one, other = found[1]
    assert one["plan"] == other["plan"]
    assert one["plan"][:3] == [16, 2, 0]
    assert one["whole"].num_ranks == 2
    assert any("DistributedDataParallel" in note for note in one["whole"].notes)


def test_uneven_shares_train_as_one_process_does_and_ddp_does_not(found):
    ends = {arm: result_table.final_values(found[1][0]["odd"].table, arm)["entropy"][0] for arm in ("baseline", "plan")}
    alone = trimtab.compare(counting, plan=Plan.fixed(33), options=RunOptions(pairs=1, to_end=True))
    expected = result_table.final_values(alone.table, "baseline")["entropy"][0]
    assert ends["plan"] == pytest.approx(expected, rel=1e-5)
    assert ends["baseline"] != pytest.approx(expected, rel=1e-4)


def test_a_folder_of_another_comparison_is_refused_on_all_ranks_and_said_by_one(found):
    (kind, text, echo), (other_kind, other_text, other_echo) = (each["another"] for each in found[1])
    assert (kind, echo) == ("FormatError", None)
    assert "different settings: --plan" in text
    assert (other_kind, other_echo) == ("RankError", True)
    assert "different settings: --plan" in other_text
    assert json.loads((found[0] / "made_here" / "settings.json").read_text())["ranks"] == "2"

"""Ranks of a comparison do the same, whatever their own clocks, metrics and files say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_cases

from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.paired_runs.inspect_arm import measure_arm
from trimtab.experiments.paired_runs.paired_run import PairedArm, race
from trimtab.state.peak_memory import storage_bytes

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
sys.path.insert(0, str(TASKS))
from smooth_task import counting  # noqa: E402
from tiny_task import BATCH_SIZE, load_data  # noqa: E402
from tiny_task import task as tiny  # noqa: E402

pytestmark = pytest.mark.slow

RANK = """
    from dataclasses import replace
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    sys.path.insert(0, case)
    from smooth_task import ODD_ROWS, counting
    from tiny_task import task
    from trimtab.profiling import trials
    from trimtab.core.serialization import to_json
    from trimtab.core.errors import TrimtabError, ValueGivenError
    from trimtab.plans.plan import Plan
    from trimtab.distributed import process_group
    from trimtab.experiments.paired_runs import paired_run as race_module
    from trimtab.experiments.comparison.compare import CompareOptions, compare
    from trimtab.experiments.paired_runs.paired_run import TimedBlock, PairedArm, race
    from trimtab.experiments.comparison_context import comparison_ranks
    from trimtab.experiments.baselines.replica import ReplicaLoop

    trials.BLOCK_S = 0.003
    process_group.TIMEOUT_S = 8.0
    cpu, found = torch.device("cpu"), {}

    def refused(ranks, error):
        try:
            with ranks.entering():
                raise error
        except type(error) as raised:
            return ranks.may_leave(raised)

    class Slow(ReplicaLoop):
        def step(self, batches):
            time.sleep(0.01 * rank)
            return super().step(batches)

    def blocks(record):
        return [[e.detail["rows"], e.detail["seconds"], e.detail["cpu_s"]] for e in record.events]

    with comparison_ranks() as ranks:
        found["each"] = ranks.each(rank + 0.5)
        found["made"] = to_json(ranks.made(TimedBlock, lambda: TimedBlock(3, 1.0, rank)))
        found["absent"] = ranks.read(TimedBlock, folder / "absent.json") is None
        ranks.write(folder / f"of-{rank}.json", TimedBlock(5, 1.0, rank))
        found["read"] = to_json(ranks.read(TimedBlock, folder / f"of-{rank}.json"))
        found["turn"] = ranks.in_turn(lambda: [time.time(), time.sleep(0.2), time.time()])
        torch.manual_seed(0)
        ranks.draw_apart(0)
        found["draws"] = torch.rand(2).tolist()
        found["alike"] = refused(ranks, ValueGivenError("plan", got="it", expected="another"))
        found["apart"] = refused(ranks, ValueGivenError("plan", got=f"that of {rank}", expected="another"))
        found["broken"] = refused(ranks, RuntimeError("no room left"))
        if rank:
            found["alone"] = refused(ranks, ValueGivenError("plan", got="it", expected="another"))
        else:
            with ranks.entering():
                pass
            found["alone"] = False
        ranks.each(0.0)

        race_module._BLOCK_S, race_module._BLOCK_STEPS = 0.1, 2
        noted = replace(task.metric, evaluate=lambda model, batches: float("nan") if rank else 0.25)
        its = replace(task, metric=noted, budget_samples=100_000, eval_every_samples=32 * 32)
        one, other = race(
            [PairedArm("reference", Slow, 100_000), PairedArm("self", ReplicaLoop, 64 * 32)],
            its, its.load_data(), 0, cpu, cap_s=1.0, together=ranks,
        )
        found["slow"], found["ends"] = blocks(one), [[r.end.reason, r.end.detail["rows"]] for r in (one, other)]
        found["metrics"] = [e.metrics["accuracy"] for r in (one, other) for e in r.evaluations]

        few = CompareOptions(num_pairs=1, whole_pairs=0, quick=True, adapt=(), peers=False)
        bad = Plan.fixed(16, num_ranks=2, zero_stage=3, memory_layout="channels_last")
        left = compare(task, folder / "left", few, command="", plan=bad, together=ranks)
        found["left"] = [[arm.name, arm.error or "", len(arm.step_s), arm.peak_bytes] for arm in left.arms]
        whole = compare(task, folder / "made_here", few, command="", together=ranks)
        plan = whole.plans["equivalent"]
        found["plan"] = [plan.batch_size, plan.num_ranks, plan.zero_stage.value, to_json(plan)]
        found["whole"] = [whole.num_ranks, [len(arm.step_s) for arm in whole.arms], len(whole.trials), whole.notes]
        share = Plan.fixed(-(-ODD_ROWS // 2), 6, num_ranks=2, zero_stage=1)
        once = CompareOptions(num_pairs=1, adapt=(), peers=False)
        odd = compare(counting, folder / "odd", once, command="", plan=share, together=ranks)
        found["odd"] = [[arm.name, arm.final_metric] for arm in odd.arms]
        found["odd_terms"] = [odd.arm("reference").terms_per_s[0] * odd.arm("reference").step_s[0] / ODD_ROWS]
        found["odd_notes"] = odd.notes
        try:
            compare(task, folder / "made_here", few, command="", plan=bad, together=ranks)
        except TrimtabError as error:
            found["another"] = [type(error).__name__, str(error), getattr(error, "is_echo", None)]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, list[dict]]:
    """What two ranks found that ran it all, by rank."""
    folder = tmp_path_factory.mktemp("in_step")
    return folder / "0", run_cases(RANK, folder, str(TASKS))[0]


def test_figures_and_files_are_rank_0s_on_all(found):
    folder, ranks = found
    for each in ranks:
        assert each["each"] == [0.5, 1.5]
        assert json.loads(each["made"]) == {"rows": 3, "seconds": 1.0, "cpu_s": 0, "energy_j": None}
        assert json.loads(each["read"]) == {"rows": 5, "seconds": 1.0, "cpu_s": 0, "energy_j": None}
        assert each["absent"]
    assert (folder / "of-0.json").exists()
    assert not (folder / "of-1.json").exists()
    assert ranks[0]["turn"][2] <= ranks[1]["turn"][0]


def test_each_rank_draws_numbers_of_its_own(found):
    torch.manual_seed(0)
    assert found[1][0]["draws"] == torch.rand(2).tolist() != found[1][1]["draws"]


@pytest.mark.parametrize(("case", "leaves"), [("alike", True), ("apart", False), ("broken", False), ("alone", False)])
def test_an_arm_leaves_where_every_rank_refuses_it_alike(found, case, leaves):
    assert [each[case] for each in found[1]] == [leaves, leaves]


def test_a_race_is_the_same_on_ranks_whose_clocks_differ(found):
    one, other = found[1]
    assert one["slow"] == other["slow"]
    rows, seconds, cpu_s = zip(*one["slow"], strict=True)
    assert rows[0] == 2 * 32  # nothing is known of a step before the first block
    assert max(rows[1:]) > 2 * 32
    assert all(each >= 0.01 * n / 32 for n, each in zip(rows, seconds, strict=True))  # as long as the slow rank takes
    assert min(cpu_s) > 0
    assert one["ends"] == other["ends"]
    assert [reason for reason, _ in one["ends"]] == ["cap", "budget"]
    assert one["metrics"] == other["metrics"]
    assert set(one["metrics"]) == {0.25}


def test_a_plan_that_every_rank_refuses_leaves_and_the_reference_is_raced(found):
    one, other = found[1]
    assert one["left"] == other["left"]
    arms = {name: (error, pairs) for name, error, pairs, _ in one["left"]}
    assert arms["reference"] == arms["self"] == ("", 1)
    assert "channels_last" in arms["equivalent_plan"][0]


def test_a_peak_counts_the_buckets_that_ddp_holds(found):
    """Of as many rows on one process, and a bucket for each gradient."""
    peak = next(peak for name, _, _, peak in found[1][0]["left"] if name == "reference")
    alone = measure_arm(ReferenceLoop, replace(tiny, batch_size=BATCH_SIZE // 2), load_data(), torch.device("cpu"))
    buckets = storage_bytes(tiny.make_model().parameters())
    assert peak == pytest.approx(alone.peak_bytes + buckets, rel=0.03)
    assert buckets > 0.1 * peak


def test_the_plan_is_made_by_rank_0_for_its_share(found):
    one, other = found[1]
    assert one["plan"] == other["plan"]
    assert one["plan"][:3] == [16, 2, 0]
    num_ranks, pairs, trials, notes = one["whole"]
    assert (num_ranks, pairs) == (2, [1, 1, 1])
    assert trials > 0
    assert any("the shard of rank 0" in note for note in notes)
    assert one["whole"] == other["whole"]


def test_uneven_shares_train_as_one_process_does_and_ddp_is_said_not_to(found):
    one, other = found[1]
    assert one["odd"] == other["odd"]
    final = {name: metric[0] for name, metric in one["odd"]}
    entry = PairedArm("reference", ReferenceLoop, counting.budget_samples)
    (alone,) = race([entry], counting, load_data(), 0, torch.device("cpu"))
    expected = alone.evaluations[-1].metrics["entropy"]
    assert final["equivalent_plan"] == pytest.approx(expected, rel=1e-5)
    assert final["reference"] == final["self"] != pytest.approx(expected, rel=1e-4)
    assert any("different numbers of samples or loss terms" in note for note in one["odd_notes"])


def test_terms_are_those_that_all_ranks_counted(found):
    facts = measure_arm(ReferenceLoop, counting, load_data(), torch.device("cpu"))
    assert 0.5 < facts.terms_per_sample < 1
    assert found[1][0]["odd_terms"] == pytest.approx([facts.terms_per_sample])


def test_a_folder_of_another_comparison_is_refused_on_all_ranks_and_said_by_one(found):
    (kind, text, echo), (other_kind, other_text, other_echo) = (each["another"] for each in found[1])
    assert (kind, echo) == ("FormatError", None)
    assert "different settings: plan" in text
    assert (other_kind, other_echo) == ("RankError", True)
    assert "different settings: plan" in other_text

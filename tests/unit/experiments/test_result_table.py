"""The long table of results, and the figures that are queries on it."""

from __future__ import annotations

import math

import pytest
from raising import raises

from trimtab.core.errors import FormatError
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments import result_table
from trimtab.experiments.result_table import LOSS, PEAK, SAMPLES, SECONDS, ResultTable, Row


def blocks(arm, seed, seconds, samples=10):
    for number, taken in enumerate(seconds):
        yield Row(arm, seed, number, SECONDS, taken, "s")
        yield Row(arm, seed, number, SAMPLES, samples, "samples")


def losses(arm, seed, values):
    for number, value in enumerate(values):
        yield Row(arm, seed, number, LOSS, value, "")


def test_a_table_is_written_and_read_and_keeps_the_order_of_its_rows():
    rows = [Row("a", 0, 1, LOSS, 2.5, ""), Row("b", 1, 0, LOSS, math.inf, ""), Row("a", -1, -1, PEAK, 4.0, "B")]
    table = from_json(ResultTable, to_json(ResultTable.of(rows)))
    assert next(iter(table)) == rows[0]
    assert math.isnan(list(table)[1].value)
    assert table.value(PEAK, "a") == 4.0
    assert table.value(PEAK, "b") is None
    assert len(ResultTable.of([])) == 0


def test_a_table_of_another_schema_or_of_unequal_columns_is_refused():
    with raises(FormatError, code="format.invalid", field="table.schema"):
        ResultTable(schema=99)
    with raises(FormatError, code="format.invalid", field="table"):
        ResultTable(arms=("a",))


def test_the_speed_of_a_pair_is_that_of_its_blocks_without_the_first():
    table = ResultTable.of([*blocks("b", 0, [9.0, 2.0, 2.0, 2.0]), *blocks("p", 0, [9.0, 1.0, 1.0, 1.0])])
    assert result_table.speed_of_pair(table, "p", "b", 0).mean == pytest.approx(2.0)


def test_a_disturbed_block_hardly_moves_the_speed_of_a_pair():
    ours = [1.0, *[1.0] * 19, 50.0]
    table = ResultTable.of([*blocks("b", 0, [1.0, *[1.2] * 20]), *blocks("p", 0, ours)])
    assert result_table.speed_of_pair(table, "p", "b", 0).mean == pytest.approx(1.2, rel=0.01)


def test_samples_count_where_arms_take_unequal_blocks():
    table = ResultTable.of([*blocks("b", 0, [1.0] * 4, samples=10), *blocks("p", 0, [1.0] * 4, samples=20)])
    assert result_table.speed_of_pair(table, "p", "b", 0).mean == pytest.approx(2.0)


def test_rounds_are_paired_where_an_arm_skips_some():
    rows = [*blocks("b", 0, [1.0, 1.0, 4.0, 1.0]), *blocks("p", 0, [1.0, 0.5])]
    rows += [Row("p", 0, 3, SECONDS, 0.5, "s"), Row("p", 0, 3, SAMPLES, 10, "samples")]
    assert result_table.speed_of_pair(ResultTable.of(rows), "p", "b", 0).mean == pytest.approx(2.0)


def test_the_speed_over_pairs_has_a_t_interval():
    rows = [
        row
        for seed, ours in enumerate([1.0, 1.1, 0.9, 1.0, 1.05])
        for row in (*blocks("b", seed, [2.0] * 5), *blocks("p", seed, [ours] * 5))
    ]
    found = result_table.speed(ResultTable.of(rows), "p", "b")
    assert found.n == 5
    assert found.low < found.mean < found.high
    assert result_table.speed(ResultTable.of(rows), "missing", "b") is None


def test_losses_are_compared_over_the_last_third():
    rows = [*losses("b", 0, [9.0, 9.0, 4.0]), *losses("p", 0, [1.0, 1.0, 4.04])]
    table = ResultTable.of([*rows, *blocks("b", 0, [1.0] * 3), *blocks("p", 0, [1.0] * 3)])
    assert result_table.loss_difference(table, "p", "b").mean == pytest.approx(1.0)
    assert result_table.loss_curve(table, "p", 0) == [(10, 1.0), (20, 1.0), (30, 4.04)]

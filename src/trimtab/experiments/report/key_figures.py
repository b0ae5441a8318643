"""Key figures under the headline of a report."""

from __future__ import annotations

from dataclasses import replace

from trimtab.experiments.comparison.arms import PLAN_ARMS
from trimtab.experiments.comparison.comparison_result import Arm, Comparison, Ratio
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import tables
from trimtab.experiments.report.document import Tile

_LABEL = 48  # Longest name in characters.


def key_figures(comparison: Comparison) -> tuple[Tile, ...]:
    """Return the tiles under the headline, for a single plan: the equivalent plan if present."""
    leading = next((arm for key in ("equivalent", "tuned") if (arm := comparison.arm(PLAN_ARMS[key]))), None)
    if leading is None:
        return ()
    metrics = ("throughput", "peak_memory", "final_metric_difference")
    counted = () if comparison.meter.is_absent else ("energy",)
    tiles = [_ratio_tile(comparison, leading, name) for name in (*metrics, *counted)]
    tiles += _target_tile(comparison, leading)
    # The remaining runs of a failed arm must not be read without a note of the failure.
    said = "; this arm failed, see the table of all arms" if leading.error else ""
    return tuple(replace(tile, detail=tile.detail + said) for tile in tiles)


def _ratio_tile(comparison: Comparison, arm: Arm, name: str) -> Tile:
    rows = [row for row in comparison.ratios if row.arm == arm.name and row.metric == name]
    row = next((row for row in rows if row.against == "reference"), rows[0] if rows else None)
    label = say.measure(name, comparison).capitalize()
    if row is None:
        return Tile(label, say.UNMEASURED, say.arm_name(arm))
    return tile_of(
        label, row.ratio, say.words_for(row, comparison), f"against {say.label_of_arm(comparison, row.against, _LABEL)}"
    )


def _target_tile(comparison: Comparison, arm: Arm) -> tuple[Tile, ...]:
    rows = [row for row in comparison.target_rows if row.arm == arm.name and row.charged]
    rows = [row for row in rows if row.against == "reference"] or rows
    if not rows:
        return ()
    order = {target: rung for rung, target in enumerate(comparison.targets)}
    row = max(rows, key=lambda row: (row.reached_arm > 0, order.get(row.target, -1)))
    # The figure is a speed-up (above 1 is better); the label "time" would suggest the opposite.
    label = f"Speed-up to {comparison.metric} {say.metric(row.target)}, planning counted"
    value, _ = tables.target_estimate(row)
    if row.ratio and not row.bound and row.reached_arm:
        return (tile_of(label, row.ratio, say.ratio, f"against {say.label_of_arm(comparison, row.against, _LABEL)}"),)
    reached = f"reached by {row.reached_arm} of {row.n}, other arm {row.reached_against}"
    if row.n < say.PAIRS_FOR_A_VERDICT:
        return (Tile(label, say.NO_VERDICT, f"{value}; {reached}"),)
    return (Tile(label, value, reached),)


def tile_of(label: str, value: Ratio, words: say.Words, against: str) -> Tile:
    """Return a ratio as a key figure with its interval, or with the raw pairs below five pairs."""
    if value.counted:
        return Tile(label, words(value.mean), f"counted allocated bytes; {against}")
    if value.n < say.PAIRS_FOR_A_VERDICT:
        return Tile(label, say.NO_VERDICT, f"raw pairs {say.raw_pairs(value, words)}; {against}")
    return Tile(label, words(value.mean), f"95% interval {say.interval(value, words)}, n = {value.n}; {against}")

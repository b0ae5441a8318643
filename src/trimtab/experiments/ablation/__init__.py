"""Ablation: every change of a plan alone and removed from the plan, with effects and intervals."""

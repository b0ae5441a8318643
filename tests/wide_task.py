"""A task of a quarter million parameters, as a file that a command is given, and what a rank is told to hold of it."""

from __future__ import annotations

import brief
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trimtab.core.parallelism import Parallelism
from trimtab.distributed.rank_memory import trace_rank

# Beside a file tiny.py, which has another task on the same data.
WIDE = f"""{brief.CODE}
import gc
from dataclasses import replace
import tiny
from torch import nn
from trimtab.distributed import dry_run

dry_run._BLOCK_S, dry_run._PAIRS = 0.02, 6
gc.collect()
gc.freeze()  # what is imported is then in no collection, of which planning asks for many

def make_model():
    return nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))

task = replace(tiny.task, name="wide", make_model=make_model)
"""


def least_of(stage: int) -> int:
    """Return what one of two ranks is told to hold of the wide task, in windows of one micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    batches = tuple((torch.ones(rows, 16), torch.zeros(rows, dtype=torch.long)) for rows in (2, 4))
    loop = (model, torch.optim.AdamW(model.parameters()), lambda model, b: cross_entropy(model(b[0]), b[1]), batches)
    return trace_rank(*loop, (2, 4), Parallelism(2, stage), counts_scratch=True).peak_bytes(2)

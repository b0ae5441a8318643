"""Published step times of several GPUs, with their models and links.

Selection: data parallelism only (DDP, or FSDP over all ranks), with published batch size, micro-batches and activation
checkpointing. Excluded: fp8, tensor, pipeline and context parallelism, and sharding within nodes only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.micro.prediction_models import over_classes, over_tokens
from benchmarks.micro.published_cases import PIXELS, Gpt2Small, Style, resnet
from benchmarks.micro.published_ranks_models import Llama, LossFn, Mpt, Shape, over_wide_tokens
from trimtab.core.hardware import LINKS, DeviceSpec, Link, absent_device, absent_link, over_nodes
from trimtab.core.parallelism import Parallelism

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A published model.

    Args:
        name: Display name.
        make: Returns the model.
        loss_fn: Training loss.
        shape: Shape of a transformer; None for image models.
        casts: True if parameters and optimizer also have the precision of the step.
        tokens: Tokens per sample; 0 for images.
    """

    name: str
    make: Callable[[], nn.Module]
    loss_fn: LossFn
    shape: Shape | None = None
    casts: bool = False
    tokens: int = 0

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return a batch of inputs and targets."""
        if self.tokens:
            return torch.zeros(rows, self.tokens).long(), torch.zeros(rows, self.tokens).long()
        return torch.zeros(rows, 3, PIXELS, PIXELS), torch.zeros(rows).long()

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Return AdamW for text, SGD with momentum for images."""
        if self.tokens:
            return torch.optim.AdamW(model.parameters(), fused=fused)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @property
    def recompute(self) -> str:
        """Activation checkpointing of the blocks: "none", "half" or "all"."""
        return "none" if self.shape is None else self.shape.recompute


@dataclass(frozen=True)
class Joined:
    """Devices and links of a cluster.

    Args:
        device: Name in trimtab's device table, or a specification.
        inside: Link within a node.
        between: Link of a rank's port to other nodes; None for a single node.
        ranks_of_node: Ranks per node.
        is_stated: True if the source states the links.
    """

    device: str | DeviceSpec
    inside: Link
    between: Link | None = None
    ranks_of_node: int = 8
    is_stated: bool = True

    @property
    def spec(self) -> DeviceSpec:
        """Specification of the device."""
        return absent_device(self.device) if isinstance(self.device, str) else self.device

    def flat(self, ranks: int) -> Link:
        """Return a hop of a flat ring, with the bandwidth of a rank's port if there are several nodes."""
        return self.inside if ranks <= self.ranks_of_node or self.between is None else self.between

    def rings(self, ranks: int) -> Link:
        """Return a hop of parallel rings, one per port of a node."""
        if ranks <= self.ranks_of_node or self.between is None:
            return self.inside
        return over_nodes(self.inside, self.between, self.ranks_of_node)


@dataclass(frozen=True)
class Case:
    """A published step, per rank.

    Args:
        source: Key of the source.
        model: Model.
        joined: Devices and links.
        how: Parallelism.
        rows: Samples per micro-batch.
        step_s: Published seconds per window.
        micro_batches: Micro-batches per window.
        precision: Precision of the step.
        compiled: True if the model was compiled.
        fused: True for a fused optimizer.
        held_bytes: Published peak of a rank, if any.
        is_reserved: True if `held_bytes` is memory reserved by the allocator, False if allocated.
    """

    source: str
    model: Model
    joined: Joined
    how: Parallelism
    rows: int
    step_s: float
    micro_batches: int = 1
    precision: str = "bf16"
    compiled: bool = False
    fused: bool = False
    held_bytes: float | None = None
    is_reserved: bool = True


@dataclass(frozen=True)
class Efficiency:
    """Weak-scaling efficiency from two published steps with equal batch size per rank."""

    fewer: Case
    more: Case

    @property
    def published(self) -> float:
        """Published efficiency: seconds with fewer ranks divided by seconds with more ranks."""
        return self.fewer.step_s / self.more.step_s


def _transformer(kind: Callable[[Shape], nn.Module], name: str, shape: Shape, loss_fn: LossFn) -> Model:
    return Model(name, functools.partial(kind, shape), loss_fn, shape, tokens=shape.tokens)


# torchtitan: H100 of 96 GB of HBM2e, 500 W; one port of 400 Gb/s each.


_TITAN_DEVICE = replace(
    absent_device("H100 SXM"), name="H100 96GB HBM2e", bandwidth_bytes_s=2.4e12, memory_bytes=96 * 10**9
)
_TITAN = Joined(_TITAN_DEVICE, LINKS["nvlink:H100"], LINKS["ib:NDR"])
_LLAMA_8B = Shape(4096, 32, 32, 128_256, 8192, kv_heads=8, hidden=14_336, recompute="half")


def _torchtitan() -> list[Case]:
    model, rows = _transformer(Llama, "Llama 3.1 8B", _LLAMA_8B, over_wide_tokens), 2
    told = {(8, False): (5762, 82.4), (8, True): (6667, 77.0), (128, False): (5605, 67.0), (128, True): (6514, 62.0)}
    return [
        Case(
            "torchtitan",
            model,
            _TITAN,
            Parallelism(ranks, 3, gather_dtype="bf16"),
            rows,
            rows * _LLAMA_8B.tokens / rate,
            compiled=compiled,
            held_bytes=held * GIB,
        )
        for (ranks, compiled), (rate, held) in told.items()
    ]


# KempnerForge: nodes of 4 H200, a port of 400 Gb/s each.


_KEMPNER = Joined("H200", LINKS["nvlink:H200"], LINKS["ib:NDR"], ranks_of_node=4)


def _kempner() -> list[Case]:
    more = {"kv_heads": 8, "recompute": "all"}
    small = _transformer(Llama, "Llama 8B", Shape(4096, 32, 32, 128_256, 4096, hidden=14_336, **more), over_tokens)
    large = _transformer(Llama, "Llama 15B", Shape(5120, 40, 40, 128_256, 4096, hidden=17_920, **more), over_tokens)

    def case(model: Model, ranks: int, rows: int, k: int, rate: float, held: float, **more: Any) -> Case:
        step_s, how = k * rows * model.tokens * ranks / rate, Parallelism(ranks, 3, gather_dtype="bf16")
        given = ("KempnerForge", model, _KEMPNER, how, rows, step_s, k)
        return Case(*given, fused=True, held_bytes=held * GIB, is_reserved=False, **more)

    return [
        case(large, 8, 4, 4, 35_405, 88.5),
        case(small, 4, 4, 2, 38_983, 61.1, compiled=True),
        case(small, 32, 4, 4, 297_384, 51.3, compiled=True),
    ]


# llm-foundry: Composer's FSDP reduces after each micro-batch (composer/distributed/dist_strategy.py).


_MPT = {  # width, heads, blocks
    "125M": (768, 12, 12),
    "350M": (1024, 16, 24),
    "760M": (1536, 12, 24),
    "1B": (2048, 16, 24),
    "3B": (2560, 20, 32),
    "7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "30B": (7168, 56, 48),
    "70B": (8192, 64, 80),
}
_ROCE = replace(LINKS["ib:HDR"], name="roce:200", source="llm-foundry: 1600 Gb/s a node; latency: NCCL's tuning table")
_MOSAIC = {
    "H100": Joined("H100 SXM", LINKS["nvlink:H100"], LINKS["ib:NDR"], is_stated=False),
    "A100 40GB": Joined("A100", LINKS["nvlink:A100"], _ROCE),
    "A100 80GB": Joined("A100 80GB", LINKS["nvlink:A100"], _ROCE),
}
# Size, activation checkpointing, ranks, samples per micro-batch, micro-batches, tokens/s per rank. Gradients are
# reduced in fp32, except on the A100 of 40 GB. Stage 2 is SHARD_GRAD_OP, stage 3 FULL_SHARD. A sample has 2048 tokens.
_FOUNDRY: dict[tuple[str, int], tuple[tuple[str, bool, int, int, int, float], ...]] = {
    ("H100", 3): (
        ("760M", False, 8, 24, 2, 63_147),
        ("1B", False, 8, 14, 1, 45_455),
        ("1B", False, 16, 20, 1, 46_037),
        ("1B", False, 64, 20, 1, 44_402),
        ("3B", False, 32, 6, 3, 23_021),
        ("3B", False, 64, 6, 3, 22_525),
        ("7B", False, 8, 6, 1, 10_643),
        ("7B", False, 128, 6, 1, 10_475),
        ("7B", False, 512, 6, 1, 9_670),
        ("13B", False, 8, 2, 1, 4_792),
        ("13B", False, 64, 2, 1, 4_800),
        ("13B", True, 128, 16, 1, 5_080),
        ("13B", True, 512, 16, 1, 4_952),
        ("30B", True, 8, 3, 21, 2_002),
        ("30B", True, 128, 8, 1, 2_199),
        ("30B", True, 512, 8, 1, 2_115),
        ("70B", True, 128, 8, 1, 1_058),
        ("70B", True, 512, 8, 1, 1_007),
    ),
    ("H100", 2): (
        ("1B", False, 128, 12, 1, 44_123),
        ("1B", False, 512, 12, 1, 39_837),
        ("3B", False, 128, 8, 1, 23_422),
        ("3B", False, 512, 8, 1, 21_664),
    ),
    ("A100 80GB", 3): (
        ("125M", False, 8, 40, 2, 142_830),
        ("1B", False, 8, 14, 4, 20_513),
        ("7B", False, 8, 6, 2, 4_641),
        ("13B", False, 8, 2, 3, 2_262),
    ),
    ("A100 40GB", 3): (
        ("125M", False, 16, 26, 1, 130_535),
        ("125M", False, 128, 26, 1, 123_936),
        ("760M", False, 16, 12, 1, 29_607),
        ("760M", False, 128, 12, 1, 28_940),
        ("1B", False, 8, 8, 8, 19_271),
        ("3B", False, 32, 6, 1, 9_914),
        ("3B", False, 128, 6, 1, 9_538),
        ("7B", True, 8, 12, 4, 3_679),
        ("7B", True, 32, 18, 1, 3_725),
        ("7B", True, 128, 18, 1, 3_623),
        ("13B", True, 64, 16, 1, 1_976),
        ("13B", True, 128, 16, 1, 1_972),
    ),
}


@functools.cache
def _mpt(size: str, recomputes: bool) -> Model:
    width, heads, blocks = _MPT[size]
    shape = Shape(width, heads, blocks, 50_368, 2048, recompute="all" if recomputes else "none")
    return _transformer(Mpt, f"MPT {size}", shape, over_tokens)


def _foundry() -> list[Case]:
    found = []
    for (device, stage), rows in _FOUNDRY.items():
        reduce_dtype = "bf16" if device == "A100 40GB" else "fp32"
        for size, recomputes, ranks, micro_batch, k, rate in rows:
            model = _mpt(size, recomputes)
            how = Parallelism(ranks, stage, reduce_dtype, reduces_once=False, gather_dtype="bf16")
            step_s = k * micro_batch * model.tokens / rate
            found.append(Case("llm-foundry", model, _MOSAIC[device], how, micro_batch, step_s, k))
    return found


# fms-fsdp without compilation: 400 Gb/s per node of 8.


_EFA = replace(LINKS["ib:HDR"], name="efa:50", bytes_per_s=400e9 / 8 / 8, source="fms-fsdp: 400 Gb/s a node; latency: ")
_IBM = Joined("A100 80GB", LINKS["nvlink:A100"], replace(_EFA, source=f"{_EFA.source}NCCL's tuning table"))


def _fms() -> list[Case]:
    found = []
    for name, blocks, hidden, rows, rate in (("Llama 2 34B", 48, 22_016, 8, 772), ("Llama 2 70B", 80, 28_672, 6, 380)):
        shape = Shape(8192, 64, blocks, 32_000, 4096, kv_heads=8, hidden=hidden, recompute="all")
        model, how = _transformer(Llama, name, shape, over_tokens), Parallelism(128, 3, "bf16", gather_dtype="bf16")
        found.append(Case("fms-fsdp", model, _IBM, how, rows, rows * shape.tokens / rate))
    return found


# Replicas.


def _replicas() -> list[Efficiency]:
    dgx, found = Joined("A100 80GB", LINKS["nvlink:A100"]), []
    images = Model("resnet50", lambda: resnet((3, 4, 6, 3), bottleneck=True), over_classes)
    for precision, one, eight in (("tf32", 938, 7248), ("fp16", 2470, 16_621)):
        alone, joined = (
            Case("DeepLearningExamples", images, dgx, Parallelism(ranks), 256, 256 * ranks / rate, precision=precision)
            for ranks, rate in ((1, one), (8, eight))
        )
        found.append(Efficiency(alone, joined))
    style = Style(fused_attention=True, apart=True, dropout=0.1)
    text = Model("gpt2", lambda: Gpt2Small(style), over_tokens, casts=True, tokens=1024)
    cards = Joined("A100", absent_link("nvlink", "A100"), is_stated=False)
    one, four = (
        Case(
            "LLMs-from-scratch",
            text,
            cards,
            Parallelism(ranks, reduce_dtype="bf16" if ranks > 1 else "fp32"),
            32,
            32 * 1024 * ranks / rate,
            compiled=True,
            fused=True,
            held_bytes=held * GIB,
        )
        for ranks, rate, held in ((1, 142_156, 22.5078), (4, 419_259, 22.7969))
    )
    return [*found, Efficiency(one, four)]


def _pairs(cases: list[Case]) -> list[Efficiency]:
    """Return pairs of cases that differ only in ranks, each with the case of fewest ranks."""
    found, fewest = [], dict[Any, Case]()
    for case in sorted(cases, key=lambda each: each.how.ranks):
        key = (case.source, case.model.name, case.model.recompute, id(case.joined), case.compiled, case.rows)
        key += (case.micro_batches, replace(case.how, ranks=1, zero_stage=3))
        if key in fewest and case.how.zero_stage == fewest[key].how.zero_stage:
            found.append(Efficiency(fewest[key], case))
        fewest.setdefault(key, case)
    return found


_REPLICAS = _replicas()
_SHARDED = [*_torchtitan(), *_kempner(), *_foundry(), *_fms()]
CASES = (*(each.more for each in _REPLICAS), *_SHARDED)
EFFICIENCIES = (*_REPLICAS, *_pairs(_SHARDED))
# Sources of the figures, accessed 2026-11-24.
SOURCES = {
    "torchtitan": "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3",
    "KempnerForge": "github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling and config_validation",
    "llm-foundry": "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
    "fms-fsdp": "github.com/foundation-model-stack/fms-fsdp, README.md of 2024-02-21",
    "DeepLearningExamples": "github.com/NVIDIA/DeepLearningExamples, PyTorch/.../resnet50v1.5/README.md (21.03 NGC)",
    "LLMs-from-scratch": "github.com/rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md (torch 2.6)",
}

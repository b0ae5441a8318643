"""Published step times of one GPU in eager mode, with their models.

Models reproduce the operators of the published code, including inefficient ones such as attention that stores its
scores. Shapes in comments: B samples, T tokens, D width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.micro.prediction_models import over_classes, over_tokens

WORDS, TOKENS, PIXELS, CLASSES = 50_257, 1024, 224, 1000


class OwnNorm(nn.Module):
    """Layer norm of elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        centred = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        return self.scale * centred + self.shift


def own_gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU from elementary operators."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


@dataclass(frozen=True)
class Style:
    """Implementation of a transformer.

    Args:
        fused_attention: True for torch's scaled dot-product attention.
        own_parts: True for layer norm and GELU from elementary operators.
        apart: True for separate layers of queries, keys and values.
        dropout: Dropout probability.
        causal: True for causal attention.
    """

    fused_attention: bool = False
    own_parts: bool = False
    apart: bool = False  # also unties the output layer
    dropout: float = 0.0
    causal: bool = True


class Attention(nn.Module):
    """Multi-head attention, with stored scores unless fused."""

    def __init__(self, width: int, heads: int, style: Style) -> None:
        super().__init__()
        self.heads, self.style, bias = heads, style, not style.apart
        parts = [nn.Linear(width, width, bias=bias) for _ in range(3)]
        self.reads = nn.ModuleList(parts if style.apart else [nn.Linear(width, 3 * width)])
        self.project, self.drop = nn.Linear(width, width), nn.Dropout(style.dropout)
        if style.causal:
            self.register_buffer("mask", torch.ones(TOKENS, TOKENS).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        rows, tokens, width = x.shape
        read = [layer(x) for layer in self.reads] if self.style.apart else self.reads[0](x).split(width, 2)
        q, k, v = (each.view(rows, tokens, self.heads, -1).transpose(1, 2) for each in read)  # (B, H, T, D/H)
        if self.style.fused_attention:
            drop = self.style.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=self.style.causal)
        else:
            scores = (q @ k.transpose(2, 3)) * (width // self.heads) ** -0.5  # (B, H, T, T)
            if self.style.causal:
                scores = scores.masked_fill(self.mask[:tokens, :tokens], -math.inf)
            y = self.drop(torch.softmax(scores, -1)) @ v
        return self.project(y.transpose(1, 2).reshape(rows, tokens, width))


class Block(nn.Module):
    """Pre-norm transformer block, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, style: Style) -> None:
        super().__init__()
        norm = OwnNorm if style.own_parts else nn.LayerNorm
        self.norm1, self.norm2, self.attention = norm(width), norm(width), Attention(width, heads, style)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.style = nn.Dropout(style.dropout), style

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        x = x + self.drop(self.attention(self.norm1(x)))
        y = self.expand(self.norm2(x))
        y = own_gelu(y) if self.style.own_parts else F.gelu(y, approximate="tanh" if self.style.causal else "none")
        return x + self.drop(self.contract(y))


class Gpt2Small(nn.Module):
    """GPT-2 Small: twelve blocks of width 768 (Radford et al. 2019)."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        width = 768
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, 12, style) for _ in range(12)))
        self.norm, self.head = (OwnNorm if style.own_parts else nn.LayerNorm)(width), nn.Linear(width, WORDS, False)
        if not style.apart:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, V)."""
        embedded = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(embedded)))


class Vit(nn.Module):
    """Vision transformer with patches and a class token (Dosovitskiy et al. 2020)."""

    def __init__(self, width: int, heads: int, patch: int, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (PIXELS // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, Style(causal=False)) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class Residual(nn.Module):
    """Basic or bottleneck block with in-place ReLU and the stride in the 3x3 convolution (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        kernels = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        basic = [(channels, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for before, after, size, step in kernels if bottleneck else basic:
            layers += [*_convolution(before, after, size, step), nn.ReLU(inplace=True)]
        self.body, self.relu = nn.Sequential(*layers[:-1]), nn.ReLU(inplace=True)
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C', H / stride, W / stride)."""
        y = self.body(x)
        y += self.shortcut(x)
        return self.relu(y)


def _convolution(before: int, after: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)


def resnet(depths: Sequence[int], *, bottleneck: bool) -> nn.Module:
    """Return a residual network for 224x224 images."""
    stem = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for index in range(depth):
            blocks.append(Residual(channels, width, 2 if stage and not index else 1, bottleneck=bottleneck))
            channels = 4 * width if bottleneck else width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def vgg(depths: Sequence[int], *, norm: bool) -> nn.Module:
    """Return a VGG network (Simonyan and Zisserman 2014), without dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else [])]
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.Conv2d(512, 4096, 7), nn.ReLU(inplace=True), nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *head, nn.Flatten(), nn.Linear(4096, CLASSES))


@dataclass(frozen=True)
class Published:
    """A published step.

    Args:
        source: Key of the source.
        device: Name of the device.
        name: Name of the model.
        make: Returns the model.
        rows: Batch size.
        precision: Precision of the step.
        step_s: Published seconds per step.
        fused: True for a fused optimizer.
        cast: True if parameters and all tensors have the precision, instead of autocast.
        reserved_bytes: Memory reserved by torch's allocator at the end, if published.
    """

    source: str
    device: str
    name: str
    make: Callable[[], nn.Module]
    rows: int
    precision: str
    step_s: float
    fused: bool = False
    cast: bool = False
    reserved_bytes: float | None = None

    @property
    def reads_tokens(self) -> bool:
        """True if a sample is a sequence of tokens, False if it is an image."""
        return self.name.startswith("gpt2")

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch of inputs and targets."""
        if self.reads_tokens:
            return torch.zeros(self.rows, TOKENS).long(), torch.zeros(self.rows, TOKENS).long()
        return torch.zeros(self.rows, 3, PIXELS, PIXELS), torch.zeros(self.rows).long()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW for text, SGD with momentum for images."""
        if self.reads_tokens:
            return torch.optim.AdamW(model.parameters(), fused=self.fused)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @property
    def loss_fn(self) -> Callable[[nn.Module, Any], Tensor]:
        """Return the mean cross-entropy."""
        return over_tokens if self.reads_tokens else over_classes


def _ladder() -> list[Published]:
    source, tied = "build-nanogpt", Style()
    steps = {"fp32": 1.0, "tf32": 0.333, "bf16": 0.3}
    return [
        Published(source, "A100 80GB", "gpt2 scores kept", lambda: Gpt2Small(tied), 16, precision, seconds)
        for precision, seconds in steps.items()
    ]


def _tips() -> list[Published]:
    rows, apart = 8, {"apart": True, "dropout": 0.1}
    own, torchs = Style(own_parts=True, **apart), Style(**apart)
    sdpa = Style(fused_attention=True, **apart)

    def case(name: str, style: Style, precision: str, rate: float, held: float, **more: Any) -> Published:
        given = (f"gpt2 {name}", lambda: Gpt2Small(style), rows, precision, rows * TOKENS / rate)
        return Published("LLMs-from-scratch", "A100", *given, reserved_bytes=held * 2**30, **more)

    return [
        case("written out", own, "fp32", 12_526, 26.2422),
        case("written out", own, "tf32", 27_648, 26.2422),
        case("written out", own, "tf32", 28_399, 26.2422, fused=True),
        case("written out", own, "bf16", 45_486, 13.7871, fused=True, cast=True),
        case("scores kept", torchs, "bf16", 55_256, 11.5645, fused=True, cast=True),
        case("sdpa", sdpa, "bf16", 91_901, 5.9004, fused=True, cast=True),
    ]


_RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
_VGGS = {"vgg11": ((1, 1, 2, 2, 2), False), "vgg16_bn": ((2, 2, 3, 3, 3), True)}
_VITS = {
    "vit_tiny_patch16": (192, 3, 16),
    "vit_small_patch16": (384, 6, 16),
    "vit_small_patch32": (384, 6, 32),
    "vit_base_patch16": (768, 12, 16),
    "vit_base_patch32": (768, 12, 32),
    "vit_large_patch16": (1024, 16, 16, 24),
}
# Batch size, and published seconds per memory format.
_TIMM = {
    "resnet18": (512, {"channels_last": 0.146713, "keep": 0.184877}),
    "resnet34": (512, {"channels_last": 0.250813, "keep": 0.314992}),
    "resnet50": (512, {"channels_last": 0.419528, "keep": 0.618983}),
    "resnet101": (256, {"channels_last": 0.34074, "keep": 0.448321}),
    "resnet152": (192, {"channels_last": 0.380547, "keep": 0.516516}),
    "vgg11": (512, {"channels_last": 0.536508, "keep": 0.619706}),
    "vgg16_bn": (256, {"channels_last": 0.543999, "keep": 0.658276}),
    "vit_tiny_patch16": (512, {"keep": 0.222408}),
    "vit_small_patch16": (384, {"keep": 0.363872}),
    "vit_small_patch32": (512, {"keep": 0.114289}),
    "vit_base_patch16": (192, {"keep": 0.490391}),
    "vit_base_patch32": (512, {"keep": 0.299695}),
    "vit_large_patch16": (64, {"keep": 0.544981}),
}


def _maker(name: str) -> Callable[[], nn.Module]:
    if name in _RESNETS:
        depths, bottleneck = _RESNETS[name]
        return lambda: resnet(depths, bottleneck=bottleneck)
    if name in _VGGS:
        counts, norm = _VGGS[name]
        return lambda: vgg(counts, norm=norm)
    return lambda: Vit(*_VITS[name])


def _images() -> list[Published]:
    found = []
    for name, (rows, layouts) in _TIMM.items():
        for layout, seconds in layouts.items():
            called = f"{name} channels_last" if layout != "keep" else name
            found.append(Published("timm", "RTX 3090", called, _maker(name), rows, "fp16", seconds))
    for precision, rate in (("tf32", 938), ("fp16", 2470)):
        rows = 256
        given = ("resnet50 channels_last", _maker("resnet50"), rows, precision, rows / rate)
        found.append(Published("DeepLearningExamples", "A100 80GB", *given))
    return found


CASES = (*_ladder(), *_tips(), *_images())
# Sources of the figures, accessed 2026-11-24.
SOURCES = {
    "build-nanogpt": "A. Karpathy, Let's reproduce GPT-2 (124M), 2024: milliseconds in the titles of its chapters",
    "LLMs-from-scratch": "github.com/rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md (torch 2.6)",
    "timm": "github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-n*-pt112-cu113-rtx3090.csv",
    "DeepLearningExamples": "github.com/NVIDIA/DeepLearningExamples, PyTorch/.../resnet50v1.5/README.md (21.03 NGC)",
}

"""Models of prediction.py: one of each common kind, sized for two cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet

CLASSES, TOKENS, LONG_TOKENS, VOCABULARY, LARGE_VOCABULARY = 10, 128, 512, 2048, 16_384
Batch = tuple[Tensor, ...]


class Bottleneck(nn.Module):
    """Bottleneck block with in-place ReLU (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 4 width, H / stride, W / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50: 7x7 stem and 3, 4, 6, 3 bottleneck blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        stages, channels = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes)."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class ViT(nn.Module):
    """Vision transformer: patches of 8 pixels, class token, torch's pre-norm encoder layers."""

    def __init__(self, width: int = 192, depth: int = 6, pixels: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (pixels // 8) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


class Bert(nn.Module):
    """BERT: post-norm encoder layers over token embeddings with padding, and a vocabulary head."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, V)."""
        embedded = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.encoder(embedded, src_key_padding_mask=x == 0))


class Lstm(nn.Module):
    """Two-layer LSTM over token embeddings."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, V)."""
        return self.head(self.layers(self.tokens(x))[0])


class TwoConvolutions(nn.Sequential):
    """Two convolutions, a level of a U-Net."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            *(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True)),
            *(nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True)),
        )


class UNet(nn.Module):
    """U-Net with three levels (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        w = width
        self.down = nn.ModuleList([TwoConvolutions(3, w), TwoConvolutions(w, 2 * w), TwoConvolutions(2 * w, 4 * w)])
        self.middle = TwoConvolutions(4 * w, 8 * w)
        self.rise = nn.ModuleList([nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (4 * w, 2 * w, w)])
        self.up = nn.ModuleList([TwoConvolutions(2 * c, c) for c in (4 * w, 2 * w, w)])
        self.head = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes, H, W)."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([kept.pop(), rise(x)], 1))
        return self.head(x)


class Mlp(nn.Sequential):
    """Multilayer perceptron: five layers of width 1024."""

    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        super().__init__(*layers, nn.Linear(1024, CLASSES))


def over_classes(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of logits (B, classes, ...)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def over_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V)."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _images(pixels: int) -> Callable[[int], Batch]:
    return lambda rows: (torch.randn(rows, 3, pixels, pixels), torch.randint(0, CLASSES, (rows,)))


def _tokens(rows: int, length: int = TOKENS) -> Batch:
    return torch.randint(1, VOCABULARY, (rows, length)), torch.randint(0, VOCABULARY, (rows, length))


def _maps(rows: int) -> Batch:
    return torch.randn(rows, 3, 64, 64), torch.randint(0, CLASSES, (rows, 64, 64))


def _text(rows: int) -> tuple[Tensor]:
    return (torch.randint(0, LARGE_VOCABULARY, (rows, TOKENS + 1)),)


def _gpt(*, tied: bool, words: int = VOCABULARY, dropout: float = 0.1) -> nn.Module:
    return GPT(GPTShape(words, TOKENS, num_layers=4, num_heads=4, width=192, dropout=dropout, tied_head=tied))


def _gpt2_small() -> nn.Module:
    return GPT(GPTShape(50_257, LONG_TOKENS, num_layers=12, num_heads=12, width=768, dropout=0.1, tied_head=True))


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Args:
        make: Returns a new model.
        batch: Returns a batch of a given size.
        loss_fn: Training loss.
        sizes: Batch sizes to try.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[[Any, Batch], Any]
    sizes: tuple[int, int]


KINDS = {
    "resnet18": Kind(lambda: ResNet(width=64), _images(32), over_classes, (4, 16)),
    "resnet50": Kind(ResNet50, _images(96), over_classes, (4, 8)),
    "vit": Kind(ViT, _images(64), over_classes, (4, 16)),
    "gpt": Kind(lambda: _gpt(tied=False), _tokens, over_tokens, (4, 8)),
    "gpt_tied": Kind(lambda: _gpt(tied=True), _tokens, over_tokens, (4, 8)),
    "gpt_head": Kind(lambda: _gpt(tied=False, words=LARGE_VOCABULARY), _text, next_token_loss, (4, 16)),
    "bert": Kind(Bert, _tokens, over_tokens, (4, 8)),
    "lstm": Kind(Lstm, _tokens, over_tokens, (4, 8)),
    "unet": Kind(UNet, _maps, over_classes, (4, 8)),
    "mlp": Kind(
        Mlp, lambda rows: (torch.randn(rows, 1024), torch.randint(0, CLASSES, (rows,))), over_classes, (16, 256)
    ),
}
# Only for frontier.py: GPT-2 Small with 512 tokens per sample, and a GPT without dropout.
MORE_KINDS = {
    "gpt2_small": Kind(_gpt2_small, lambda rows: _tokens(rows, LONG_TOKENS), over_tokens, (2, 4)),
    "gpt_no_dropout": Kind(lambda: _gpt(tied=True, dropout=0.0), _tokens, over_tokens, (4, 8)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
}

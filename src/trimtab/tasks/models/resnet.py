"""Residual networks (He et al. 2015, arXiv:1512.03385) for CIFAR.

Shapes in comments: B images, C channels, H x W pixels, W_i channels of stage i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError

Block = Callable[[int, int, int], nn.Module]


class BasicBlock(nn.Module):
    """Basic block: `relu(x + bn2(conv2(relu(bn1(conv1(x))))))`.

    A 1x1 convolution projects the shortcut if shapes differ. The ReLU is not in place, because activation checkpointing
    needs the saved inputs unchanged.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network. Every stage after the first doubles the width and halves the resolution.

    The defaults are ResNet-18 for CIFAR. The built-in tasks also use width 16.

    Args:
        width: Channels of the stem and of the blocks in the first stage.
        depths: Blocks per stage: (2, 2, 2, 2) for ResNet-18, (3, 4, 6, 3) for ResNet-50.
        in_channels: 3 for colour, 1 for gray.
        num_classes: Number of logits.
        block: Returns a block for (input channels, width, stride).
        expansion: Output channels of a block divided by its width.
        stem: Layers before the first stage, with `width` output channels; None for a 3x3 convolution of stride 1.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        depths: Sequence[int] = (2, 2, 2, 2),
        in_channels: int = 3,
        num_classes: int = 10,
        block: Block = BasicBlock,
        expansion: int = 1,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("in_channels", in_channels), ("num_classes", num_classes)):
            validation.integer(name, value)
        if not depths:
            raise ValueGivenError("depths", got="no stages", expected="blocks of each stage, as (2, 2, 2, 2)")
        if stem is None:
            convolution = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
            stem = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())
        self.stem = stem
        widths = [width * 2**stage for stage in range(len(depths))]
        # Input channels of every stage, then output channels of the last.
        channels = [width, *(expansion * each for each in widths)]
        self.stages = nn.Sequential()
        for stage, depth in enumerate(depths):
            blocks = nn.Sequential(block(channels[stage], widths[stage], min(stage, 1) + 1))
            for _ in range(validation.integer("depths", depth) - 1):
                blocks.append(block(channels[stage + 1], widths[stage], 1))
            self.stages.append(blocks)
        self.head = nn.Linear(channels[-1], num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) of `images` (B, in_channels, H, W)."""
        x = self.stages(self.stem(images))  # (B, W_last, H', W')
        return self.head(x.mean(dim=(2, 3)))


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the identity, or a 1x1 convolution if the shapes of input and output differ."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


def _initialise(module: nn.Module) -> None:
    """Initialise convolutions with He et al.'s normal distribution (arXiv:1502.01852), variance 2 / fan_out."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

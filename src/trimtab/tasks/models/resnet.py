"""Residual networks (He et al. 2015, arXiv:1512.03385) with a choice of two stems.

"3x3" has stride 1, as is usual for CIFAR. "7x7" has stride 2 and max pooling, as published for ImageNet. On images of
32x32 pixels the 3x3 stem takes 15.7 times the FLOP.

Shapes in comments: B images, C channels, H x W pixels, W_i channels of stage i.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError

STEMS = ("3x3", "7x7")


class BasicBlock(nn.Module):
    """Basic block: `relu(x + bn2(conv2(relu(bn1(conv1(x))))))`.

    A 1x1 convolution projects the shortcut if shapes differ. The ReLU is not in place, because activation checkpointing
    needs the saved inputs unchanged.
    """

    expansion = 1  # output channels divided by width

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """Bottleneck block: 1x1 convolution to `width`, 3x3 convolution, 1x1 convolution to four times `width`.

    The 3x3 convolution has the stride (ResNet v1.5), as in torchvision and in published FLOP of ResNet-50. He et al.
    place it in the first 1x1 convolution.
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 4 width, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network. Every stage after the first doubles the width and halves the resolution.

    The defaults are ResNet-18 for CIFAR. The built-in tasks also use width 16.

    Args:
        width: Channels of the stem and of the blocks in the first stage.
        depths: Blocks per stage: (2, 2, 2, 2) for ResNet-18, (3, 4, 6, 3) with `Bottleneck` for ResNet-50.
        in_channels: 3 for colour, 1 for gray.
        num_classes: Number of logits.
        block: `BasicBlock` or `Bottleneck`.
        stem: "3x3" or "7x7".
    """

    def __init__(
        self,
        *,
        width: int = 64,
        depths: Sequence[int] = (2, 2, 2, 2),
        in_channels: int = 3,
        num_classes: int = 10,
        block: type[BasicBlock | Bottleneck] = BasicBlock,
        stem: str = "3x3",
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("in_channels", in_channels), ("num_classes", num_classes)):
            validation.integer(name, value)
        validation.one_of("stem", stem, STEMS)
        if not depths:
            raise ValueGivenError("depths", got="no stages", expected="blocks of each stage, as (2, 2, 2, 2)")
        self.stem = _stem(in_channels, width, stem)
        widths = [width * 2**stage for stage in range(len(depths))]
        channels = [
            width,
            *(block.expansion * each for each in widths),
        ]  # input channels of every stage, then output channels of the last
        self.stages = nn.Sequential(
            *(
                _stage(block, channels[stage], widths[stage], validation.integer("depths", depth), min(stage, 1) + 1)
                for stage, depth in enumerate(depths)
            )
        )
        self.head = nn.Linear(channels[-1], num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) of `images` (B, in_channels, H, W)."""
        x = self.stages(self.stem(images))  # (B, W_last, H', W')
        return self.head(x.mean(dim=(2, 3)))


def resnet50(stem: str, num_classes: int = 10) -> ResNet:
    """Return ResNet-50. With 10 classes it has 23,520,842 (3x3 stem) or 23,528,522 (7x7 stem) parameters."""
    return ResNet(width=64, depths=(3, 4, 6, 3), num_classes=num_classes, block=Bottleneck, stem=stem)


def _stem(in_channels: int, width: int, kind: str) -> nn.Sequential:
    if kind == "3x3":
        return nn.Sequential(nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    first = nn.Conv2d(in_channels, width, 7, 2, padding=3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _stage(
    block: type[BasicBlock | Bottleneck], in_channels: int, width: int, num_blocks: int, stride: int
) -> nn.Sequential:
    first = block(in_channels, width, stride)
    return nn.Sequential(first, *(block(block.expansion * width, width, 1) for _ in range(num_blocks - 1)))


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


def _initialise(module: nn.Module) -> None:
    """Initialise convolutions with He et al.'s normal distribution (arXiv:1502.01852), variance 2 / fan_out."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

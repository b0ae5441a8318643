"""Residual networks for small images (He et al. 2015, arXiv:1512.03385), with the 3x3 stem used on CIFAR.

Shapes in comments: B images, C channels, H x W pixels; W_i channels of stage i.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError


class BasicBlock(nn.Module):
    """`relu(x + bn(conv(relu(bn(conv(x))))))`, the shortcut projected by a 1x1 convolution where the shape changes.

    The rectifier is not in place: recomputing a block (activation checkpointing) needs its saved inputs unchanged.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, out_channels, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stack of basic blocks, width doubled and resolution halved at each stage after the first.

    `ResNet()` with width 64 is ResNet-18 for CIFAR; width 16 is the thin one of the built-in tasks.

    Args:
        width: channels of the stem and of the first stage.
        depths: basic blocks in each stage; (2, 2, 2, 2) is the 18-layer network.
        in_channels: 3 for colour, 1 for gray.
        num_classes: width of the head.
    """

    def __init__(
        self, *, width: int = 64, depths: Sequence[int] = (2, 2, 2, 2), in_channels: int = 3, num_classes: int = 10
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("in_channels", in_channels), ("num_classes", num_classes)):
            checks.integer(name, value)
        if not depths:
            raise ValueGivenError("depths", given="no stages", expected="blocks of each stage, as (2, 2, 2, 2)")
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        widths = [width * 2**stage for stage in range(len(depths))]
        self.stages = nn.Sequential(
            *(
                _stage(
                    widths[max(stage - 1, 0)], widths[stage], checks.integer("depths", depth), stride=min(stage, 1) + 1
                )
                for stage, depth in enumerate(depths)
            )
        )
        self.head = nn.Linear(widths[-1], num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) of `images` (B, in_channels, H, W)."""
        x = self.stages(self.stem(images))  # (B, W_last, H', W')
        return self.head(x.mean(dim=(2, 3)))


def _stage(in_channels: int, out_channels: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels, 1) for _ in range(num_blocks - 1)))


def _initialise(module: nn.Module) -> None:
    """Draw convolutions as He et al. 2015 do (arXiv:1502.01852): normal, variance 2 / fan_out."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

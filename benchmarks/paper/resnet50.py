"""ResNet-50 (He et al. 2015, arXiv:1512.03385) with a choice of two stems, because the paper does not name its stem.

"3x3" has stride 1, as is usual for CIFAR. "7x7" has stride 2 and max pooling, as published for ImageNet. On images of
32x32 pixels the 3x3 stem takes 15.7 times the FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core import validation
from trimtab.tasks.models.resnet import ResNet, shortcut

STEMS = ("3x3", "7x7")
EXPANSION = 4  # output channels of a block divided by its width


def resnet50(stem: str, num_classes: int = 10) -> ResNet:
    """Return ResNet-50. With 10 classes it has 23,520,842 (3x3 stem) or 23,528,522 (7x7 stem) parameters."""
    return bottleneck_resnet(stem, 64, (3, 4, 6, 3), num_classes)


def bottleneck_resnet(stem: str, width: int, depths: Sequence[int], num_classes: int) -> ResNet:
    """Return a residual network of bottleneck blocks.

    Args:
        stem: "3x3" or "7x7".
        width: Channels of the stem, and width of the first stage.
        depths: Blocks per stage.
        num_classes: Number of logits.

    Raises:
        ValueGivenError: The stem is unknown.
    """
    first = None
    if validation.one_of("stem", stem, STEMS) == "7x7":
        convolution = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        first = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    return ResNet(
        width=width, depths=depths, num_classes=num_classes, block=Bottleneck, expansion=EXPANSION, stem=first
    )


class Bottleneck(nn.Module):
    """Bottleneck block: 1x1 convolution to `width`, 3x3 convolution, 1x1 convolution to four times `width`.

    The 3x3 convolution has the stride (ResNet v1.5), as in torchvision and in published FLOP of ResNet-50. He et al.
    place it in the first 1x1 convolution.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 4 width, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))

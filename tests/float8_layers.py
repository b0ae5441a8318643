"""torchao's interface of float8 training with products that are emulated here, where torchao is not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass

import torch
from torch import nn


def cast(x, dtype=torch.float8_e4m3fn):
    """Return a tensor rounded to scaled float8."""
    scale = torch.finfo(dtype).max / x.detach().abs().max().float().clamp(min=1e-12)
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    """x @ weight.T with operands in float8, also in the backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return cast(x) @ cast(weight).to(x.dtype).T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = cast(gradient, torch.float8_e5m2)
        of_weight = gradient.flatten(0, -2).T @ cast(x).flatten(0, -2)
        return gradient @ cast(weight).to(gradient.dtype), of_weight.to(weight.dtype)


class Float8Linear(nn.Linear):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            y = Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@dataclass
class Float8LinearConfig:
    emulate: bool = False
    pad_inner_dim: bool = False


def convert_to_float8_training(module, *, config):
    assert config.emulate
    for name, layer in list(module.named_children()):
        with torch.device("meta"):
            new = Float8Linear(layer.in_features, layer.out_features, bias=False)
        new.weight, new.bias = layer.weight, layer.bias
        setattr(module, name, new)
    return module


def provide(monkeypatch):
    """Make `torchao.float8` importable."""
    if importlib.util.find_spec("torchao") is not None:
        return
    fake = types.ModuleType("torchao.float8")
    fake.Float8LinearConfig, fake.convert_to_float8_training = Float8LinearConfig, convert_to_float8_training
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)

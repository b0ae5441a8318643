"""Precision: autocast, dynamic loss scaling, and the global TF32 flag (paper eqs. 13-16), restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.measure.machine import native_precisions
from trimtab.state import process_state
from trimtab.state.process_state import hold_tf32

# Process-wide flags shared by runs: set by the first run that needs a flag, restored by the last run to close.

Undo = Callable[[], None]


class SharedMode:
    """Reference-counted flag for concurrent runs, released in any order; `apply` sets it and returns its undo."""

    def __init__(self, apply: Callable[[], Undo]) -> None:
        self._apply = apply
        self._holders = 0

    def hold(self) -> Undo:
        """Set the flag and count a holder; return a function that releases the flag.

        The flag is set even with other holders, since a suspension may have cleared the flag.
        """
        undo = self._apply()
        if self._holders == 0:
            self._undo = undo
        self._holders += 1
        return self._let_go

    def _let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._undo()


def _retain_memory() -> Undo:
    if not process_state.can_retain():
        raise ValueGivenError(
            "plan.allocator",
            problem='allocator="retain" needs glibc\'s malloc with default settings, but this process has another C '
            "library or a MALLOC_ environment variable.",
            hint='Use a plan with allocator="keep", or unset the MALLOC_ variables.',
            code="allocator.not_settable",
        )
    before = process_state.allocator_mode()
    process_state.set_allocator_mode("retain")
    return lambda: process_state.set_allocator_mode(before)


retained_memory = SharedMode(_retain_memory)


WIDER = ("bf16", "fp32")  # Precisions with a wider range than fp16.
_AS_IT_IS = contextlib.nullcontext()
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_available(precision: str, device: torch.device) -> None:
    """Raise `ValueGivenError` if the device does not support a precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueGivenError(
            "plan.precision",
            got=f"tf32 for a model on the device {device.type!r}",
            expected="a model on a CUDA device",
            hint="Use a plan with precision='fp32', or move the model to the GPU before trimtab.start.",
            code="precision.unavailable",
        )


def dtype_of(precision: str) -> torch.dtype | None:
    """Return the autocast dtype of a precision; None without autocast."""
    return _DTYPES.get(precision)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of a precision; a null context for fp32 and tf32."""
    dtype = _DTYPES.get(precision)
    return _AS_IT_IS if dtype is None else torch.autocast(device.type, dtype=dtype)


def fp16_replacement(device: torch.device) -> str:
    """Return the replacement for fp16 after repeated overflows: bf16 if the device supports it natively, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if "bf16" in native_precisions() else "fp32"


class MixedPrecision(Stateful):
    """Precision of a run: autocast, and for fp16 torch's dynamic loss scaler, which `scales` the loss."""

    def __init__(self, name: str, device: torch.device) -> None:
        check_available(name, device)
        self.name, self._device = name, device
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self.scales = self._scaler is not None
        self._before = 0.0  # Loss scale before the last step.
        self._scale: float | None = None  # Last value read, since reading synchronises; None if it may have changed.

    @property
    def loss_scale(self) -> float | None:
        """Current loss scale; None without a loss scale."""
        if self._scaler is not None and self._scale is None:
            self._scale = self._scaler.get_scale()
        return self._scale

    @property
    def scale_on_device(self) -> float | Tensor:
        """Loss scale as a device tensor, available without synchronisation; 1.0 without a loss scale."""
        return 1.0 if self._scaler is None else self._scaler.scale(torch.ones((), device=self._device))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for the forward pass."""
        return autocast(self.name, self._device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the scaled loss to call backward on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the loss scale; at most once between two steps."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; return False if a gradient overflowed and the step was skipped."""
        if self._scaler is None:
            optimizer.step()
            return True
        self._before = self._scaler.get_scale() if self._scale is None else self._scale
        self._scaler.step(optimizer)
        self._scaler.update()
        self._scale = self._scaler.get_scale()
        return self._scale >= self._before

    def keep_scale(self, *, where: bool) -> None:
        """Restore the loss scale from before the last step `where` the loss scale did not cause the skip."""
        if where and self._scaler is not None:
            self._scaler.update(self._before)
            self._scale = self._before

    def renew(self) -> None:
        """Reset the scaler at the same scale, since torch's scaler allows a single unscale between updates."""
        if self._scaler is not None:
            state = self._scaler.state_dict()
            self._scaler = torch.amp.GradScaler(self._device.type)
            self._scaler.load_state_dict(state)

    def leave_fp16(self, name: str | None = None) -> None:
        """Switch to bf16 or fp32 for the rest of the run."""
        self.name, self._scaler, self._scale = name or fp16_replacement(self._device), None, None
        self.scales = False

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "scaler": None if self._scaler is None else self._scaler.state_dict()}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return a function that restores a `state_dict()`, even if the saved run had switched from fp16."""
        require_keys("state.precision", state, ("name", "scaler"))
        left = self.name == "fp16" and state["name"] in WIDER
        if state["name"] != self.name and not left:
            raise ValueGivenError(
                "state.precision",
                got=repr(state["name"]),
                expected=f"{self.name!r}, the precision of the plan",
                hint="Resume with the plan of the checkpointed run.",
                code="resume.precision_differs",
            )
        if (state["scaler"] is None) != (left or self._scaler is None):
            expected = "no scaler" if left or self._scaler is None else "the state of a loss scaler"
            raise ValueGivenError("state.precision.scaler", got=f"{state['scaler']!r:.80}", expected=expected)
        scaler = None if self._scaler is None or left else self._scaler
        checked = None if scaler is None else _checked_scaler(state["scaler"], scaler.state_dict())

        def load() -> None:
            if left:
                self.leave_fp16(state["name"])
            elif scaler is not None and checked is not None:
                scaler.load_state_dict(checked)
                self._scale = None

        return load


def _checked_scaler(state: Any, expected: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state, Mapping) or state.keys() != expected.keys():
        raise ValueGivenError(
            "state.precision.scaler", got=f"{state!r:.80}", expected="the keys " + ", ".join(expected)
        )
    for name, value in state.items():
        high = torch.iinfo(torch.int32).max if name == "_growth_tracker" else torch.finfo(torch.float32).max
        # Bounds of torch's own representation after a step.
        validation.number(f"state.precision.scaler.{name}", value, low=0, high=high)
    return dict(state)


tf32 = SharedMode(hold_tf32)

"""Precision: autocast, dynamic loss scale, and the global fp32 mode (paper eqs. 13-16), each put back when done."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Choice, Mark, Plan
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.measure.process_state import hold_tf32
from trimtab.runtime.modes import SharedMode

WIDER = ("bf16", "fp32")  # than fp16, in range
_AS_IT_IS = contextlib.nullcontext()
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_available(precision: str, device: torch.device) -> None:
    """Raise `ValueGivenError` when the device cannot run a precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueGivenError(
            "plan.precision", given=f"tf32 on {device.type}", expected="a CUDA device for tf32", way_out="Use fp32."
        )


def dtype_of(precision: str) -> torch.dtype | None:
    """Return what a precision's autocast casts to; None where there is none."""
    return _DTYPES.get(precision)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context for the forward pass; one that does nothing for fp32 and tf32."""
    dtype = _DTYPES.get(precision)
    return _AS_IT_IS if dtype is None else torch.autocast(device.type, dtype=dtype)


def wider(device: torch.device) -> str:
    """Return what takes fp16's place where it overflows: bf16 where the device computes in it, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any("bf16" in name and found is True for name, found in capabilities.items()) else "fp32"


class MixedPrecision(Part):
    """The precision a run computes in: autocast, and torch's dynamic loss scaler where it is fp16.

    Raises:
        ValueGivenError: the device cannot run it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        check_available(name, device)
        self.name, self._device = name, device
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._before = 0.0  # the loss scale before the last step
        self._scale: float | None = None  # as it was last read, which waits for the device; None: it may be another

    @property
    def scales(self) -> bool:
        """Whether there is a loss scale."""
        return self._scaler is not None

    @property
    def loss_scale(self) -> float | None:
        """The loss scale; None where there is none."""
        if self._scaler is not None and self._scale is None:
            self._scale = self._scaler.get_scale()
        return self._scale

    @property
    def scale_on_device(self) -> float | Tensor:
        """The loss scale where the gradients are, to be computed with without waiting for it; 1.0 without one."""
        return 1.0 if self._scaler is None else self._scaler.scale(torch.ones((), device=self._device))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the forward pass."""
        return autocast(self.name, self._device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring gradients to their true size; once between two steps."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; returns whether it stepped: it does not where a gradient overflowed."""
        if self._scaler is None:
            optimizer.step()
            return True
        self._before = self._scaler.get_scale() if self._scale is None else self._scale
        self._scaler.step(optimizer)
        self._scaler.update()
        self._scale = self._scaler.get_scale()
        return self._scale >= self._before

    def keep_scale(self, *, where: bool) -> None:
        """Go on at the loss scale before the step that was just tried, where that was not to blame for what it met."""
        if where and self._scaler is not None:
            self._scaler.update(self._before)
            self._scale = self._before

    def renew(self) -> None:
        """Go on at the same scale without the step that was begun: torch's own scaler unscales once between updates."""
        if self._scaler is not None:
            state = self._scaler.state_dict()
            self._scaler = torch.amp.GradScaler(self._device.type)
            self._scaler.load_state_dict(state)

    def leave_fp16(self, name: str | None = None) -> None:
        """Compute in a precision of fp32's range from here on."""
        self.name, self._scaler, self._scale = name or wider(self._device), None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the name and the scaler's state."""
        return {"name": self.name, "scaler": None if self._scaler is None else self._scaler.state_dict()}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`, also where that run had left fp16.

        Raises:
            FormatError, ValueGivenError: not such a state, or of another precision.
        """
        require_keys("state.precision", state, ("name", "scaler"))
        left = self.name == "fp16" and state["name"] in WIDER
        if state["name"] != self.name and not left:
            raise ValueGivenError(
                "state.precision", given=repr(state["name"]), expected=f"{self.name}, as the plan has it"
            )
        if (state["scaler"] is None) != (left or self._scaler is None):
            expected = "no scaler" if left or self._scaler is None else "the state of a loss scaler"
            raise ValueGivenError("state.precision.scaler", given=f"{state['scaler']!r:.80}", expected=expected)
        scaler = None if self._scaler is None or left else self._scaler
        checked = None if scaler is None else _checked_scaler(state["scaler"], scaler.state_dict())

        def load() -> None:
            if left:
                self.leave_fp16(state["name"])
            elif scaler is not None:
                scaler.load_state_dict(checked)
                self._scale = None

        return load


def in_place(plan: Plan, name: str, reason: str) -> Plan:
    """Return a plan with another precision in place of its own."""
    choice = Choice(name, f"in place of {plan.precision.value}: {reason}", Mark.ROUNDING, changed=True)
    return replace(plan, precision=choice)


def _checked_scaler(state: Any, expected: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state, Mapping) or state.keys() != expected.keys():
        raise ValueGivenError(
            "state.precision.scaler", given=f"{state!r:.80}", expected="the keys " + ", ".join(expected)
        )
    for name, value in state.items():
        high = torch.iinfo(torch.int32).max if name == "_growth_tracker" else torch.finfo(torch.float32).max
        checks.number(f"state.precision.scaler.{name}", value, low=0, high=high)  # as torch holds them once a step was
    return dict(state)


tf32 = SharedMode(hold_tf32)

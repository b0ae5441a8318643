"""Additions to DeepSpeed: transfer of optimizer state into shards and back, and removal of DeepSpeed from a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

State = dict[Tensor, dict[str, Any]]
_LEFT = {"_external_params", "all_parameters", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"}


def put_state(zero: Any, had: State) -> None:
    """Copy existing optimizer state into the shards; DeepSpeed starts without state."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    kinds: dict[str, Any] = next(iter(had.values()))
    sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    for flat in zero.fp32_partitioned_groups_flat if sharded else zero.single_partition_of_fp32_groups:
        zero.optimizer.state[flat] = {k: torch.zeros_like(flat) if _is_whole(v) else _copy(v) for k, v in kinds.items()}
    _link(zero)
    for parameter, state in had.items():
        for key in filter(lambda key: _is_whole(state[key]), state):
            if sharded:  # DeepSpeed's setter for full state ignores the last rank's padding and raises
                safe_set_local_optimizer_state(parameter, _own_part(parameter, state[key]), key)
            else:
                safe_set_full_optimizer_state(parameter, state[key], key)


def _own_part(parameter: Any, whole: Tensor) -> Tensor:
    size = parameter.partition_numel()
    padded = nn.functional.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
    return padded.narrow(0, size * dist.get_rank(), size)


def gather_full_state(zero: Any, parameters: list[Tensor]) -> tuple[dict[Tensor, Tensor], State]:
    """Return full parameters and their full optimizer state; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _link(zero)
    kinds: dict[str, Any] = next(iter(zero.optimizer.state.values()), {})
    full = {each: safe_get_full_fp32_param(each).clone().view(_shape(each)) for each in parameters}
    states: State = {}
    for each in parameters if kinds else []:
        states[each] = {
            key: safe_get_full_optimizer_state(each, key).clone().view(_shape(each))
            if _is_whole(value)
            else _copy(value)
            for key, value in kinds.items()
        }
    return full, states


def restore_plain_model(model: nn.Module, full: dict[Tensor, Tensor]) -> None:
    """Turn a destroyed engine's model back into a plain torch model, with the same parameter objects."""
    for parameter, value in full.items():
        parameter.data = value.to(parameter.dtype)
        for name in [name for name in vars(parameter) if name not in ("requires_grad", "data", "grad")]:
            delattr(parameter, name)
    for module in model.modules():
        if "_original_parameters" in vars(module):
            module._parameters = vars(module).pop("_original_parameters")
        for name in [name for name in vars(module) if name.startswith("ds_") or name in _LEFT]:
            delattr(module, name)


def _link(zero: Any) -> None:
    # DeepSpeed links only the first group's state, after its first step
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _shape(parameter: Any) -> torch.Size:
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0

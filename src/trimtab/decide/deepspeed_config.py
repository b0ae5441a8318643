"""DeepSpeed configuration of a plan."""

from __future__ import annotations

from typing import Any

from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan

# Reduction bucket if the plan has no size: DeepSpeed's default takes 2 GB on every rank.
BUCKET_BYTES = 2**26
_SENT = {"fp32": "fp32", "bf16": "bf16"}


def config_of(plan: Plan, num_elements: int) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize` of a plan with the DeepSpeed engine.

    Micro-batch boundaries, loss scaling, clipping and autocast stay with trimtab's loop; their entries are neutral.

    Args:
        plan: plan with `engine` "deepspeed".
        num_elements: number of parameter elements; an upper bound for buckets.

    Raises:
        ValueGivenError: the plan has a different engine, or settings that DeepSpeed does not support here.
    """
    if plan.engine.value != "deepspeed":
        raise ValueGivenError("plan.engine", got=repr(plan.engine.value), expected="'deepspeed'")
    for name, bad in (("precision", "fp16"), ("compiled", True)):
        if getattr(plan, name).value == bad:
            raise ValueGivenError(
                f"plan.{name}",
                got=repr(bad),
                problem=f"engine='deepspeed' does not support {name}={bad!r}.",
                hint=f"Choose another {name}, or engine='torch'.",
            )
    if plan.batch_rule is not None:
        raise ValueGivenError(
            "plan.batch_rule",
            got=repr(plan.batch_rule.policy),
            problem="engine='deepspeed' does not support an adaptive batch size: DeepSpeed does not expose the "
            "gradients that the noise scale is computed from.",
            hint="Plan without adapt='batch', or choose engine='torch'.",
        )
    wanted = int(plan.bucket_bytes.value or BUCKET_BYTES) // 4
    bucket = max(2, min(wanted, num_elements // 2 * 2 + 2))  # DeepSpeed's stages require an even number.
    zero = {
        "stage": plan.zero_stage.value,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,  # True would replace torch.nn.functional.linear in the whole process.
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": _SENT[str(plan.reduce_dtype.value)],
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }

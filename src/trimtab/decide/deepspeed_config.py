"""DeepSpeed's own configuration of a plan, as JSON holds it."""

from __future__ import annotations

from typing import Any

from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan

# Of a buffer that gradients are reduced in, where the plan does not say: DeepSpeed's own takes 2 GB on every rank.
BUCKET_BYTES = 2**26
_SENT = {"fp32": "fp32", "bf16": "bf16"}


def config_of(plan: Plan, num_elements: int) -> dict[str, Any]:
    """Return what `deepspeed.initialize` takes for a plan whose engine it is.

    The loop says which micro-batch is a window's last, scales and clips by itself, and has autocast of its own: what
    the configuration would say of those is left at nothing.

    Args:
        num_elements: of all parameters: no buffer is larger.

    Raises:
        ValueGivenError: the plan has another engine, or what DeepSpeed's stages do not go with here.
    """
    if plan.engine.value != "deepspeed":
        raise ValueGivenError("plan.engine", given=repr(plan.engine.value), expected="deepspeed")
    for name, bad in (("precision", "fp16"), ("compiled", True)):
        if getattr(plan, name).value == bad:
            given = f"{bad}, with DeepSpeed"
            raise ValueGivenError(f"plan.{name}", given=given, expected="another value, or the torch engine")
    if plan.batch_rule is not None:
        given = "a batch rule, with DeepSpeed, whose gradients cannot be seen"
        raise ValueGivenError("plan.batch_rule", given=given, expected="none, or the torch engine")
    wanted = int(plan.bucket_bytes.value or BUCKET_BYTES) // 4
    bucket = max(2, min(wanted, num_elements // 2 * 2 + 2))  # an even number, as its stages ask
    zero = {
        "stage": plan.zero_stage.value,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,  # or torch.nn.functional.linear is another for the whole process
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": _SENT[str(plan.reduce_dtype.value)],
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }

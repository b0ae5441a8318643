"""trimtab: plan, apply and prove the compute settings of a PyTorch training loop."""

__version__ = "0.1.0"

"""Data parallel (DDP)."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holotrain.parallel.powersgd import PowerSGD

KEY = "powersgd"
"""Key of its state in checkpoints."""


class CompressingDDP(DDPStrategy):
    """Lightning's DDPStrategy, with communication hooks that also work on the CPU.

    Args:
        compression: ``"none"``, ``"bf16"`` or ``"powersgd"`` (:mod:`~holotrain.parallel.powersgd`); checkpoints contain the
            state of PowerSGD.
        options: options of DDPStrategy.
    """

    def __init__(self, compression: str = "none", **options: Any) -> None:
        super().__init__(**options)
        self.compression = compression
        self.powersgd: PowerSGD | None = None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        modules = model.named_modules()
        constants = [f"{path}.{name}".lstrip(".") for path, part in modules for name in part._non_persistent_buffers_set]
        # Non-persistent buffers are equal in all processes and need not be broadcast before each forward.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        if self.compression == "bf16":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self.compression == "powersgd":
            self.powersgd = PowerSGD(self.model.module.named_parameters())
            self.model.register_comm_hook(self.powersgd, PowerSGD.send)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.powersgd is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = self.powersgd.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.powersgd is not None and KEY in checkpoint:
            self.powersgd.load_state_dict(checkpoint[KEY])


def ddp(compression: str, **options: Any) -> DDPStrategy:
    """The DDP strategy. Gradients are views of the communication buckets, which saves a copy."""
    return CompressingDDP(compression, gradient_as_bucket_view=True, **options)

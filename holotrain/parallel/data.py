"""Data parallel: every process has the whole model and its share of each batch (DDP)."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK = 4
"""Of PowerSGD's approximation of a gradient: what the paper takes for language models."""

WARM_UP = 100
"""Steps before PowerSGD begins: the gradients of the first ones are of no low rank."""


class CompressingDDP(DDPStrategy):
    """Lightning's DDP, whose hooks work on the CPU too.

    Args:
        compression: ``"none"``, ``"bf16"`` or ``"powersgd"`` (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression
            for Distributed Optimization", 2019).
        options: DDPStrategy's.
    """

    def __init__(self, compression: str = "none", **options: Any) -> None:
        super().__init__(**options)
        self.compression = compression

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        modules = model.named_modules()
        constants = [f"{path}.{name}".lstrip(".") for path, part in modules for name in part._non_persistent_buffers_set]
        # What no checkpoint holds is the same everywhere, and need not be sent before every forward.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        if self.compression == "bf16":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self.compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=WARM_UP, min_compression_rate=2
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def ddp(compression: str, **options: Any) -> DDPStrategy:
    """The strategy; gradients are views of what is sent, which saves a copy of them."""
    return CompressingDDP(compression, gradient_as_bucket_view=True, **options)

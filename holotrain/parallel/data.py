"""Data parallel (DDP)."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = {"none": None, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class DataParallel(DDPStrategy):
    """Lightning's DDPStrategy. Gradients are views of the communication buckets, which saves a copy.

    Args:
        compression: the data type in which gradients are sent: ``"none"`` (their own), ``"bf16"`` or ``"fp16"``.
        options: options of DDPStrategy.
    """

    def __init__(self, compression: str = "none", **options: Any) -> None:
        super().__init__(ddp_comm_hook=HOOKS[compression], gradient_as_bucket_view=True, **options)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        modules = model.named_modules()
        constants = [f"{path}.{name}".lstrip(".") for path, part in modules for name in part._non_persistent_buffers_set]
        # Non-persistent buffers are equal in all processes and need not be broadcast before each forward.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:  # Lightning registers it on GPUs only
            self.model.register_comm_hook(None, self._ddp_comm_hook)

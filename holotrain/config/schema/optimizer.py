"""When the optimizer steps: an option of every optimizer, beside those of its class."""

from typing import Any

from holotrain.config.schema.classes import ERROR_DIFFUSION, is_a
from holotrain.errors import UserError

IN_BACKWARD = "in_backward"
"""The option that is not passed on to the optimizer's class."""


class Stepping:
    """
    Args:
        in_backward: step each parameter in the backward, as soon as its gradient is complete, and free the gradient
    """

    def __init__(self, in_backward: bool = False) -> None:
        pass


def steps_in_backward(config: Any) -> bool:
    return getattr(config.optimizer, IN_BACKWARD, False)


def check_in_backward(config: Any) -> None:
    """
    Args:
        config: the options of a command.

    Raises:
        UserError: the optimizer steps in the backward, and something else needs all gradients after it.
    """
    if not steps_in_backward(config):
        return
    trainer = config.trainer
    by_norm = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
    unclipped = "trainer.gradient_clip_val=null, or trainer.gradient_clip_algorithm=value"
    refused = {
        f"trainer={trainer.strategy} averages gradients after it; use trainer=default": trainer.strategy != "single",
        "accumulation adds gradients up after it; use trainer.accumulate_grad_batches=1": trainer.accumulate_grad_batches > 1,
        f"clipping by norm needs all gradients; use {unclipped}": by_norm,
        "16-mixed unscales gradients after it; use trainer.precision=bf16-mixed": trainer.precision == "16-mixed",
        "synthesis rewrites gradients after it; use synthesis=none": config.synthesis is not None,
        "a CUDA graph holds all gradients; use backward.cuda_graph=false": config.backward.cuda_graph,
        "error diffusion is measured between backward and step; set it to false": is_a(config.task, ERROR_DIFFUSION),
        "DDP and FSDP2 average gradients after it; plan without devices": getattr(config, "devices", None) is not None,
    }
    for reason, found in refused.items():
        if found:
            raise UserError(f"optimizer.{IN_BACKWARD}: steps within the backward, and {reason}")

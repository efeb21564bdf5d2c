"""What would make a training need less memory."""

import lightning.pytorch as pl

from holotrain.config.budget import budget_of
from holotrain.config.make_plan import make_plan
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import AUTO, PLAIN, reversible, schedules_of
from holotrain.planning import ALLOCATORS


def advice(config: RunConfig, data: pl.LightningDataModule, device: str) -> list[str]:
    """Overrides under which a training would fit, by its plan, and such of other options as take less memory.

    Args:
        data: set up.
        device: ``"cuda"`` or ``"cpu"``.
    """
    planned = _planned(config, data, device)
    settled = {override.partition("=")[0] for override in planned}
    return planned + [override for override in rules(config) if override.partition("=")[0] not in settled]


def _planned(config: RunConfig, data: pl.LightningDataModule, device: str) -> list[str]:
    if device not in ALLOCATORS:
        return []
    try:
        plan = make_plan(config, data, device, budget_of(config, device))
    except Exception:  # of any kind: there may be too little memory even for a plan
        return []
    if plan.fits:  # then something else has taken the memory
        return []
    batch, _ = config.batch_option
    wanted = [override for override in plan.remedies if override.startswith(("backward=", batch))]
    return [f"{override} (fits, by the plan)" for override in wanted]


def rules(config: RunConfig) -> list[str]:
    """Overrides that lessen the memory of a step, each with its reason, the one that costs a training least first.

    Not predictions: each lessens the memory, and none is known to be enough.
    """
    return [*_backward(config), *_precision(config), *_batch(config)]


def _backward(config: RunConfig) -> list[str]:
    backward = config.backward
    if len(schedules_of(config.model.kind)) == 1:
        return []
    if reversible(config.model.kind):
        if backward.kind in (*PLAIN, AUTO):
            return ["backward=reversible (stores nothing between blocks)"]
        if backward.store:
            return ["backward.store=0 (blocks that store their activations)"]
        return ["backward.keep=[] (results that are kept)"] if backward.keep else []
    found = ["backward=checkpoint (stores only what lies between blocks)"] if backward.kind in ("autograd", AUTO) else []
    return [*found, f"model=rev_{config.model.kind}_... (a reversible model stores nothing between blocks)"]


def _precision(config: RunConfig) -> list[str]:
    lower = {"64-true": "32-true", "32-true": "bf16-mixed"}.get(config.trainer.precision)
    return [f"trainer.precision={lower} (activations of half the size)"] if lower else []


def _batch(config: RunConfig) -> list[str]:
    option, size = config.batch_option
    smallest = config.data.context if option == "data.max_tokens" else 1
    if size // 2 < smallest:
        return []
    halved = f"{option}={size // 2}"
    if config.backward.cuda_graph:  # which cannot accumulate
        return [f"{halved} (half a batch a step)"]
    twice = 2 * config.trainer.accumulate_grad_batches
    return [f"{halved} trainer.accumulate_grad_batches={twice} (the same batch in two parts)"]

"""Overrides that make a training need less memory."""

import lightning.pytorch as pl

from holotrain.config.commands import RunConfig
from holotrain.config.given import PYTHON_OBJECT
from holotrain.config.groups import AUTO, OBJECT_GROUPS, PLAIN, reversible, takes
from holotrain.config.plans import NO_OPTION, budget_of, planner_of
from holotrain.planning import ALLOCATORS, Plan, make_plan


def advice(config: RunConfig, data: pl.LightningDataModule, device: str) -> list[str]:
    """Overrides under which the training fits, by its plan, then other overrides that need less memory.

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
        plan = make_plan(planner_of(config, data, device), budget_of(config, device))
    except Exception:  # there may be too little memory even for a plan
        return []
    if plan.fits:  # something else uses the memory
        return []
    option, _ = config.batch_option
    wanted = [override for override in remedies(config, plan) if override.startswith(("backward=", option, NO_OPTION))]
    return [f"{override} (fits, by the plan)" for override in wanted]


def remedies(config: RunConfig, plan: Plan) -> list[str]:
    """Overrides, each of which makes the run fit by its plan; those that store most come first."""
    if plan.budget is None:
        return []
    undone = {"store": "0", "keep": "[]", "blocks": "[]"}  # options that other backwards do not support
    resets = "".join(f" backward.{name}={value}" for name, value in undone.items() if getattr(config.backward, name))
    fitting = [name for name, found in plan.footprints.items() if found.bound <= plan.budget and name != plan.backward]
    sizes = [
        f"batches of {limit.value} samples{_options_of_data(config)}"
        if limit.option == NO_OPTION
        else f"{limit.option}={limit.value}"
        for limit in plan.limits
        if limit.value
    ]
    return [f"backward={name}{resets}" for name in fitting] + sizes


def _options_of_data(config: RunConfig) -> str:
    """Where the size of batches is set, if no option of a known name does."""
    options = [] if config.data.target == PYTHON_OBJECT else OBJECT_GROUPS["data"].options(config.data.target)
    named = ", ".join(f"data.{name}" for name in options)
    return f" (options: {named})" if named else " (which the data module sets)"


def rules(config: RunConfig) -> list[str]:
    """Overrides that reduce the memory of a step, each with its reason, the cheapest first.

    None of them is a prediction: each reduces memory, but it may not be enough.
    """
    return [*_backward(config), *_precision(config), *_batch(config)]


def _backward(config: RunConfig) -> list[str]:
    backward = config.backward
    if not takes(config.model, "backward"):
        return []
    if reversible(config.model):
        if backward.kind in (*PLAIN, AUTO):
            return ["backward=reversible (stores no activations between blocks)"]
        if backward.store:
            return ["backward.store=0 (no block stores its activations)"]
        return ["backward.keep=[] (no results are stored for the backward pass)"] if backward.keep else []
    found = ["backward=checkpoint (stores only the inputs of blocks)"] if backward.kind in ("autograd", AUTO) else []
    return [*found, "model=rev_... (a reversible model stores no activations between blocks)"]


def _precision(config: RunConfig) -> list[str]:
    lower = {"64-true": "32-true", "32-true": "bf16-mixed"}.get(config.trainer.precision)
    return [f"trainer.precision={lower} (halves the activations)"] if lower else []


def _batch(config: RunConfig) -> list[str]:
    option, size = config.batch_option
    if size is None:
        return [f"smaller batches{_options_of_data(config)}"]
    smallest = config.data.context if option == "data.max_tokens" else 1
    if size // 2 < smallest:
        return []
    halved = f"{option}={size // 2}"
    if config.backward.cuda_graph or config.steps_in_backward:  # which do not support accumulation
        return [f"{halved} (half the batch size)"]
    twice = 2 * config.trainer.accumulate_grad_batches
    return [f"{halved} trainer.accumulate_grad_batches={twice} (the same effective batch size)"]

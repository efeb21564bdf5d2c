"""What helps a training that does not fit into memory."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import lightning.pytorch as pl

from holotrain.commands.failures import OutOfMemory, as_out_of_memory
from holotrain.commands.planners import NO_OPTION, longest_context, planner_of, variants_of
from holotrain.config.build import check_optimizer
from holotrain.config.command_options import RunConfig
from holotrain.config.objects import PYTHON_OBJECT
from holotrain.config.option_groups import ADAMW, LOW_BIT, OBJECT_GROUPS, takes
from holotrain.errors import UserError
from holotrain.numeric import counted, in_words
from holotrain.planning import Planner
from holotrain.planning.fake_tensors import Unplannable
from holotrain.planning.memory_plan import Limit, largest_batch, least_memory, smallest
from holotrain.planning.planner import Variant
from holotrain.targets import TARGET

LOWER_PRECISION = {"64-true": "32-true", "32-true": "bf16-mixed"}


def proposals(
    config: RunConfig,
    data: pl.LightningDataModule,
    planner: Planner,
    variants: Sequence[Variant],
    budget: int,
    limits: Sequence[Limit] = (),
) -> tuple[list[str], dict[str, int]]:
    """Overrides with which a training fits, by its plan; those that change least come first.

    Args:
        limits: its largest sizes, if its schedules are configured; those of ``backward=auto`` are planned here.

    Returns:
        the overrides; if there are none, overrides with which it needs less, and the bytes that it then needs.
    """
    found, needs = [], {}
    with suppress(Unplannable, OutOfMemory), as_out_of_memory():
        variant, _ = smallest(planner, variants)
        least = planner if variant is None else variant.planner
        if planner.backward is not None:
            found = list(_schedules(config, planner, variants, budget))
            found += [_words(config, limit) for limit in limits if limit.value]
            limits = [largest_batch(least, least_memory(least), budget)] if not found else []
            way = f"backward={least_memory(least)} " + (f"{variant.options} " if variant else "")
        else:
            inexact = replace(config, backward=replace(config.backward, inexact=True))
            if not config.backward.inexact and _need(inexact, data, replace(planner, inexact=True)) <= budget:
                found.append("backward.inexact=true")
            longest = longest_context(config, data, planner, variant, least_memory(least), budget)
            limits, way = [largest_batch(least, least_memory(least), budget), *([longest] if longest else [])], ""
        found += [f"{way}{_words(config, limit)}" for limit in limits if limit.value]
        if not found:
            needs = _needs(config, data, planner)
            found = [words for words, need in needs.items() if need <= budget]
    return found, {} if found else needs


def what_helps(found: list[str], needs: dict[str, int]) -> str:
    """What :func:`proposals` returns, as text."""
    if found:
        return f"it fits with {', or with '.join(found)}"
    if needs:
        return "; ".join(f"with {words} it needs {in_words(need, up=True)}" for words, need in needs.items())
    return "nothing else could be planned"


def _schedules(config: RunConfig, planner: Planner, variants: Sequence[Variant], budget: int) -> Iterator[str]:
    """Other schedules with which it fits."""
    unsupported = {"store": "0", "keep": "[]", "blocks": "[]", "inexact": "false"}  # by other schedules
    resets = "".join(f" backward.{name}={value}" for name, value in unsupported.items() if getattr(config.backward, name))
    for name in planner.schedules:
        if name != planner.backward and planner.footprint(name).bound <= budget:
            yield f"backward={name}{resets}"
    for variant in variants:
        if variant.planner.footprint(variant.row).bound <= budget:
            yield f"backward={variant.row} {variant.options}{resets}"


def _need(config: RunConfig, data: pl.LightningDataModule, planner: Planner) -> int:
    """Bytes that a training needs with its schedules; if ``backward=auto`` chooses them, at least."""
    if planner.backward is not None:
        return planner.footprint(planner.backward).bound
    return smallest(planner, variants_of(config, data, planner, config.backward.inexact))[1]


def _needs(config: RunConfig, data: pl.LightningDataModule, planner: Planner) -> dict[str, int]:
    """Overrides that make numbers, gradients or optimizer states smaller, with the bytes that the training then needs, if
    these are fewer than without."""
    others: dict[str, RunConfig] = {}
    trainer, optimizer, model = config.trainer, config.optimizer, config.model
    if optimizer is not None and not config.steps_in_backward:
        words = "optimizer.in_backward=true"
        words += " trainer.gradient_clip_val=null" if trainer.gradient_clip_val else ""
        words += " trainer.accumulate_grad_batches=1" if trainer.accumulate_grad_batches > 1 else ""
        unclipped = trainer.with_arguments(gradient_clip_val=None, accumulate_grad_batches=1)
        stepping = replace(config, trainer=unclipped, optimizer=optimizer.with_arguments(in_backward=True))
        with suppress(UserError):  # something else is refused beside it
            check_optimizer(stepping)
            others[words] = stepping
    if optimizer is not None and optimizer.target == ADAMW:
        few_bits = replace(optimizer, target=LOW_BIT, arguments={"bits": "8bit"} | optimizer.arguments)
        others["optimizer=adamw_8bit"] = replace(config, optimizer=few_bits)
    if takes(model, "reversible") and model.trained == "all" and not model.adapters:
        lora = {TARGET: "peft.LoraConfig", "r": 8, "target_modules": "all-linear"}
        words = ", ".join(f"{name}: {value}" for name, value in lora.items())
        others[f"'model.adapters={{{words}}}'"] = replace(config, model=model.with_arguments(adapters=lora))
    if lower := LOWER_PRECISION.get(trainer.precision):
        others[f"trainer.precision={lower}"] = replace(config, trainer=trainer.with_arguments(precision=lower))
    usual, needs = _need(config, data, planner), {}
    for words, changed in others.items():
        with suppress(UserError, Unplannable, ValueError):
            need = _need(changed, data, planner_of(changed, data, planner.device))
            if need < usual:
                needs[words] = need
    return needs


def _words(config: RunConfig, limit: Limit) -> str:
    if limit.option != NO_OPTION:
        return f"{limit.option}={limit.value}"
    options = [] if config.data.target == PYTHON_OBJECT else OBJECT_GROUPS["data"].options(config.data.target)
    named = ", ".join(f"data.{name}" for name in options)
    return f"batches of {counted(limit.value, 'sample')} ({f'options: {named}' if named else 'which the data module sets'})"

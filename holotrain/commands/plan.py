"""``holotrain plan``: predicts the memory of a training without allocating it."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from holotrain.commands.memory import PlannedTraining, chosen, described, proposals, smallest_batch, what_helps
from holotrain.commands.planner import budget_of
from holotrain.commands.prepare import shared_data
from holotrain.commands.run import Run
from holotrain.commands.screen import console, plain
from holotrain.config.command_options import PlanConfig
from holotrain.config.signatures import read_fields
from holotrain.errors import UserError
from holotrain.folders import require_no_device, write_whole
from holotrain.numeric import in_words, unit_of
from holotrain.planning.fake_tensors import Unplannable
from holotrain.planning.memory_plan import Plan, make_plan
from holotrain.schedules import planned_as

PLAN = "plan.json"

SHOWN = ("parameters", "gradients", "optimizer", "activations", "head", "temporary")
"""Parts of the peak that have a column. The rest is summed up as "other"."""


def run(config: PlanConfig, run: Run) -> int:
    """Writes plan.json. Returns 0, even if the run does not fit."""
    quiet = config.json == "-"
    if config.json and not quiet:
        require_no_device("json", Path(config.json))
    with redirect_stdout(sys.stderr if quiet else sys.stdout):
        if not quiet:
            console.print("planning ...")
        config, plan, remedies = planned(config)
    figures = json.dumps(plan.as_json() | {"remedies": remedies}, indent=2) + "\n"
    write_whole(run.folder / PLAN, figures)
    if quiet:
        print(figures, end="")
        return 0
    if config.json:
        write_whole(Path(config.json), figures)
    _show(config, run, plan, remedies)
    console.print(f"written to {run.folder / PLAN}")
    return 0


def planned(config: PlanConfig) -> tuple[PlanConfig, Plan, list[str]]:
    """The configuration with its batch size, the plan, and overrides with which the training fits, if it does not. Raises a
    UserError if the training step cannot be planned."""
    device = _device_of(config)
    data = shared_data("fit", smallest_batch(config), Path(config.ckpt_path) if config.ckpt_path else None)
    if config.batch_is_open:
        config, _ = chosen(config, data, device)
    try:
        budget = budget_of(config, device)
    except UserError:
        if config.backward.open:
            raise
        budget = None  # the memory of the device is not known
    remedies = []
    try:
        training = PlannedTraining(config, data, device)
        plan = make_plan(training.planner, budget, training.tiled)
        planner = (training.tiled if plan.options else None) or training.planner
        if budget is not None and (longest := training.longest_context(planner, plan.schedule, budget)):
            plan = replace(plan, limits=[*plan.limits, longest])
        if budget is not None and not plan.fits:
            remedies = proposals(training, budget, plan.limits)
    except Unplannable as error:
        raise UserError(f"plan: {error}") from error
    return config, plan, remedies


def _device_of(config: PlanConfig) -> str:
    """The device of the plan, which this machine need not have."""
    device = config.device
    if device == "auto" and config.trainer.accelerator == "mps":
        raise UserError("plan: Apple GPUs are not supported; use device=cpu or device=cuda")
    if device == "auto":
        device = "cpu" if config.trainer.accelerator == "cpu" else "cuda"
    if device == "cpu" and config.trainer.precision == "16-mixed":
        raise UserError("trainer.precision=16-mixed: not supported on the CPU; use bf16-mixed or device=cuda")
    return device


def row(folder: Path) -> dict[str, Any] | None:
    """A plan in the table of a sweep; None if there is no plan. Raises a UserError if the file cannot be read."""
    path = folder / PLAN
    if not path.is_file():
        return None
    kinds = {"backward": "str", "fits": "bool | None", "peak_bytes": "int", "largest": "dict[str, int]"}
    plan = read_fields(path, kinds, "plan")
    fits = {None: "", True: "yes", False: "no"}[plan["fits"]]
    found = {"status": "planned", "schedule": plan["backward"], "peak_memory_bytes": plan["peak_bytes"], "fits": fits}
    return found | {f"largest {name}": value for name, value in plan["largest"].items()}


def _show(config: PlanConfig, run: Run, plan: Plan, remedies: list[str]) -> None:
    plain(width=max(console.width, 160)).print(_table(config, run, plan))  # one line per row
    say = console.print
    say("*: the backward of this configuration; peak in: the phase of the step in which memory peaks; head: logits and loss")
    if plan.device == "cuda" and config.device == "auto" and not torch.cuda.is_available():
        say("no GPU was found here; to plan for this machine, give device=cpu")
    if plan.configured.scratch:
        need = in_words(plan.configured.bound, up=True)
        say(
            "scratch: what operations and libraries hold within themselves, at most; peak and scratch together, "
            f"{need} under backward={plan.backward}, must fit"
        )
    if planned_as(plan.backward) != plan.backward:
        say(f"backward={plan.backward} is planned as {planned_as(plan.backward)}: compiled blocks need no more than that")
    if plan.choice is not None and plan.budget is not None:
        say(f"backward=auto (by FLOPs; fit measures times): {described(plan.choice, plan.budget, plan.options)}")
    for limit in plan.limits:
        found = f"up to {'' if limit.exact else 'about '}{limit.value}" if limit.value else "none fits"
        say(f"{limit.option}={limit.configured}: {found} under backward={plan.backward}")
    if plan.fits is False:
        say(what_helps(remedies))


def _table(config: PlanConfig, run: Run, plan: Plan) -> Table:
    """A row for each backward."""
    model = run.choices.get("model", (config.model or config.task).name)
    place = "a GPU" if plan.device == "cuda" else "the CPU"
    within = f", {in_words(plan.budget)}" if plan.budget else ""
    unit, size = unit_of(max(footprint.bound for footprint in plan.footprints.values()))
    title = f"holotrain plan: {model}, {config.trainer.precision}, on {place}{within}; figures in {unit}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("backward", no_wrap=True)
    table.add_column("peak in", no_wrap=True)
    for name in ("peak", *SHOWN, "other", "scratch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits" if plan.budget else "", no_wrap=True)
    for name, footprint in plan.footprints.items():
        other = sum(taken for kind, taken in footprint.parts.items() if kind not in SHOWN)
        figures = [footprint.peak, *(footprint.parts[kind] for kind in SHOWN), other, footprint.scratch]
        fits = ("yes" if footprint.bound <= plan.budget else "no") if plan.budget else ""
        style = "bold" if name == plan.backward else ""
        name = f"{name} *" if name == plan.backward else name.replace(" backward.", ", ")
        table.add_row(name, footprint.phase, *(f"{figure / size:.3f}" for figure in figures), fits, style=style)
    return table

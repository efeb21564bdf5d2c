"""``holotrain plan``: predicts the memory of a training without allocating it, and the speed on several devices."""

import json
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.table import Table

from holotrain.callbacks import GPUS, multiprocessors, peak_flops
from holotrain.checks import one_of
from holotrain.commands.advice import remedies
from holotrain.commands.automatic import chosen, described
from holotrain.commands.checkpoint import tokenizer_for
from holotrain.commands.files import write_whole
from holotrain.commands.plain import plain
from holotrain.commands.plan_picture import picture
from holotrain.commands.run import Run
from holotrain.commands.scaling_table import show_scaling
from holotrain.commands.screen import console
from holotrain.config.build import build_data
from holotrain.config.plans import budget_of, planner_of, smallest_batch
from holotrain.config.schema.commands import PlanConfig
from holotrain.errors import UserError
from holotrain.models.division import divide
from holotrain.overlap import LINKS
from holotrain.planning import Gpu, Plan, Planner, Scaling, Unplannable, make_plan, make_scaling
from holotrain.sizes import in_words, unit_of

PLAN = "plan.json"

SHOWN = ("parameters", "gradients", "optimizer", "activations", "temporary")
"""Parts of the peak that have a column. The rest is summed up as "other"."""


def run(config: PlanConfig, run: Run) -> int:
    """Writes plan.json and plan.svg. Returns 0, even if the run does not fit.

    Raises:
        UserError: the training step cannot be planned.
    """
    quiet = config.json == "-"
    status = console.status("planning")

    def begin(what: str) -> None:
        status.update(f"planning {what}")
        status.start()

    try:
        config, plan, scaling = planned(config, plain(stderr=True).print if quiet else console.print, begin)
    finally:
        status.stop()
    needed = [] if plan.fits else remedies(config, plan)
    found = plan.as_json() | {"remedies": needed} | ({"scaling": scaling.as_json()} if scaling else {})
    figures = json.dumps(found, indent=2) + "\n"
    write_whole(run.folder / PLAN, figures)
    write_whole(run.folder / "plan.svg", picture(plan))
    if quiet:
        print(figures, end="")
        return 0
    if config.json:
        write_whole(Path(config.json), figures)
    _show(config, run, plan, needed)
    if scaling:
        show_scaling(scaling)
    console.print(f"written to {run.folder}: {PLAN}, plan.svg")
    return 0


def planned(
    config: PlanConfig, say: Callable[[str], object], begin: Callable[[str], object]
) -> tuple[PlanConfig, Plan, Scaling | None]:
    """The configuration with its batch size, the plan and, with ``devices``, that of several devices.

    Args:
        say: called with each line about the choice of a batch size.
        begin: called with what is planned next.

    Raises:
        UserError: the training step cannot be planned.
    """
    device = _device(config)
    one_of("link", config.link, LINKS)
    if config.gpu is not None:
        one_of("gpu", config.gpu, GPUS)
        one_of("device", device, ["cuda"])
    if device == "cpu" and config.trainer.precision == "16-mixed":
        raise UserError("trainer.precision=16-mixed: not supported on the CPU; use bf16-mixed or device=cuda")
    known = tokenizer_for(config, Path(config.ckpt_path) if config.ckpt_path else None)
    data = build_data(smallest_batch(config) if config.batch_is_open else config, known)
    data.prepare_data()
    data.setup("fit")
    if config.batch_is_open:
        config = chosen(config, data, device, say=say)
    budget = _budget(config, device)
    try:
        planner = planner_of(config, data, device)
        plan = make_plan(planner, budget, begin)
        scaling = None if config.devices is None else _scaling(config, planner, plan, begin)
    except Unplannable as error:
        raise UserError(f"plan: {error}") from error
    return config, plan, scaling


def _device(config: PlanConfig) -> str:
    if config.device != "auto":
        return config.device
    if config.trainer.accelerator == "mps":
        raise UserError("plan: Apple GPUs are not supported; use device=cpu or device=cuda")
    return "cpu" if config.trainer.accelerator == "cpu" else "cuda"


def _budget(config: PlanConfig, device: str) -> int | None:
    """Bytes; None if the memory of the device is not known."""
    try:
        return budget_of(config, device)
    except UserError:
        if config.backward.open:
            raise
        return None


def _scaling(config: PlanConfig, planner: Planner, plan: Plan, begin: Callable[[str], object]) -> Scaling:
    def known(name: str) -> Gpu:
        precision = config.trainer.precision
        return Gpu(name, precision, peak_flops(name, precision), multiprocessors(name))

    unit = "tokens/s" if planner.batch.name == "data.max_tokens" else "samples/s"
    return make_scaling(planner, plan, config.devices, config.link, divide, config.gpu, known, unit, begin)


def _show(config: PlanConfig, run: Run, plan: Plan, needed: list[str]) -> None:
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
        name = f"{name} *" if name == plan.backward else name
        table.add_row(name, footprint.phase, *(f"{figure / size:.3f}" for figure in figures), fits, style=style)
    plain(width=max(console.width, 120)).print(table)  # one line per row
    if plan.configured.scratch:
        console.print(
            f"scratch: what operations and libraries may hold for a moment on this CPU, at most; peak and scratch together, "
            f"{in_words(plan.configured.bound, up=True)} under backward={plan.backward}, must fit"
        )
    if plan.choice is not None:
        console.print(f"backward=auto (by FLOPs; fit measures times): {described(plan.choice, plan.budget)}")
    for limit in plan.limits:
        found = f"up to {'' if limit.exact else 'about '}{limit.value}" if limit.value else "none fits"
        console.print(f"{limit.option}={limit.configured}: {found} under backward={plan.backward}")
    if needed:
        console.print(f"it fits with {', or with '.join(needed)}")

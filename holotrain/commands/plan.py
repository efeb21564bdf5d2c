"""``holotrain plan``: predicts the memory of a training without allocating it, and the speed on several devices."""

import json
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from holotrain.callbacks import GPUS, multiprocessors, peak_flops
from holotrain.commands.checkpoint import tokenizer_for
from holotrain.commands.console import console, plain
from holotrain.commands.memory_limits import chosen, described, remedies, smaller_states
from holotrain.commands.run_folder import Run
from holotrain.commands.writing import write_whole
from holotrain.config.build import build_data
from holotrain.config.command_options import PlanConfig
from holotrain.config.plans import budget_of, longest_context, planner_of, smallest_batch, variants_of
from holotrain.errors import UserError, one_of
from holotrain.models.division import divide
from holotrain.numeric import counted, in_words, unit_of
from holotrain.overlap import LINKS
from holotrain.planning import Band, Gpu, Plan, Planner, Scaling, Unplannable, make_plan, make_scaling

PLAN = "plan.json"

SHOWN = ("parameters", "gradients", "optimizer", "activations", "head", "temporary")
"""Parts of the peak that have a column. The rest is summed up as "other"."""

COLOURS = {
    "parameters": "#3b7dd8",
    "buffers": "#7a8794",
    "gradients": "#0fa3b1",
    "optimizer": "#8a63d2",
    "average": "#d45fa6",
    "hologram": "#b5852a",
    "batch": "#8fa81f",
    "activations": "#e07b22",
    "head": "#c9a66b",
    "temporary": "#d1495b",
    "scratch": "#d9dde2",
}
LEFT, WIDTH, ROW, BAR, TOP = 130, 640, 44, 26, 20


def run(config: PlanConfig, run: Run) -> int:
    """Writes plan.json and plan.svg. Returns 0, even if the run does not fit.

    Raises:
        UserError: the training step cannot be planned.
    """
    quiet = config.json == "-"
    say = plain(stderr=True).print if quiet else console.print
    status = console.status("")

    def begin(what: str) -> None:
        if not quiet:
            status.update(f"planning {what}")
            status.start()  # not before the data are read: a running display captures what they print

    try:
        config, plan, scaling = planned(config, say, begin)
    finally:
        status.stop()
    needed = [] if plan.fits else remedies(config, plan)
    states = plan.configured.lasting + plan.configured.parts["gradients"]
    less = list(smaller_states(config)) if plan.budget and states > plan.budget else []
    found = plan.as_json() | {"remedies": needed}
    if less:
        found["less_for_states"] = less
    if scaling:
        found["scaling"] = scaling.as_json()
    figures = json.dumps(found, indent=2) + "\n"
    write_whole(run.folder / PLAN, figures)
    write_whole(run.folder / "plan.svg", picture(plan))
    if quiet:
        print(figures, end="")
        return 0
    if config.json:
        write_whole(Path(config.json), figures)
    _show(config, run, plan, needed)
    if less:
        console.print(f"weights, gradients and optimizer states take {in_words(states)}; these need less: {'; '.join(less)}")
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
    device = config.device
    if device == "auto" and config.trainer.accelerator == "mps":
        raise UserError("plan: Apple GPUs are not supported; use device=cpu or device=cuda")
    if device == "auto":
        device = "cpu" if config.trainer.accelerator == "cpu" else "cuda"
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
        begin("the batch size")
        config, _ = chosen(config, data, device, say=say)
    try:
        budget = budget_of(config, device)
    except UserError:
        if config.backward.open:
            raise
        budget = None  # the memory of the device is not known
    try:
        planner = planner_of(config, data, device)
        plan = make_plan(planner, budget, begin, variants_of(config, data, planner, inexact=True, begin=begin))
        if budget is not None:
            longest = longest_context(config, data, planner, plan.variant, plan.schedule, budget, begin)
            plan = replace(plan, limits=[*plan.limits, *([] if longest is None else [longest])])
        scaling = None if config.devices is None else _scaling(config, config.devices, planner, plan, begin)
    except Unplannable as error:
        raise UserError(f"plan: {error}") from error
    return config, plan, scaling


def _scaling(config: PlanConfig, devices: int, planner: Planner, plan: Plan, begin: Callable[[str], object]) -> Scaling:
    def known(name: str) -> Gpu:
        precision = config.trainer.precision
        return Gpu(name, precision, peak_flops(name, precision), multiprocessors(name))

    unit = "tokens/s" if planner.batch.name == "data.max_tokens" else "samples/s"
    return make_scaling(planner, plan, devices, config.link, divide, config.gpu, known, unit, begin)


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
        name = f"{name} *" if name == plan.backward else name.replace(" model.reversible=", ", ").replace(" backward.", ", ")
        table.add_row(name, footprint.phase, *(f"{figure / size:.3f}" for figure in figures), fits, style=style)
    plain(width=max(console.width, 160)).print(table)  # one line per row
    console.print(
        "*: the backward of this configuration; peak in: the phase of the step in which memory peaks; head: logits and loss"
    )
    if plan.device == "cuda" and config.device == "auto" and not torch.cuda.is_available():
        console.print("no GPU was found here; to plan for this machine, give device=cpu")
    if plan.configured.scratch:
        console.print(
            f"scratch: what operations and libraries hold within themselves, at most; peak and scratch together, "
            f"{in_words(plan.configured.bound, up=True)} under backward={plan.backward}, must fit"
        )
    if plan.between_blocks is not None:
        console.print(f"between blocks under backward={plan.backward}: {plan.between_blocks}")
    if plan.choice is not None and plan.budget is not None:
        console.print(f"backward=auto (by FLOPs; fit measures times): {described(plan.choice, plan.budget, plan.options)}")
    for limit in plan.limits:
        found = f"up to {'' if limit.exact else 'about '}{limit.value}" if limit.value else "none fits"
        console.print(f"{limit.option}={limit.configured}: {found} under backward={plan.backward}")
    if needed:
        console.print(f"it fits with {', or with '.join(needed)}")


def show_scaling(scaling: Scaling) -> None:
    """Prints the predictions and their assumptions."""
    link = f" over {scaling.link}" if scaling.devices > 1 else ""
    title = f"predicted, not measured: {counted(scaling.devices, 'device')}{link}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for name in ("peak per rank", "ms per step", scaling.unit, "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in scaling.predictions:
        if found.memory is None:
            continue
        table.add_row(
            found.strategy,
            in_words(found.memory),
            _band(found.seconds, lambda seconds: f"{1e3 * seconds:.4g}"),
            _band(found.throughput, lambda rate: f"{rate:.4g}"),
            _band(found.efficiency, lambda share: f"{share:.0%}"),
        )
    plain(width=max(console.width, 120)).print(table)
    reasons: dict[str, list[str]] = {}
    for found in scaling.predictions:
        if found.reason:
            reasons.setdefault(found.reason, []).append(found.strategy)
    for reason, strategies in reasons.items():
        console.print(f"not possible: {'; '.join(strategies)}: {reason}")
    console.print("assumptions:")
    for line in scaling.assumptions:
        console.print(f"- {line}")


def _band(band: Band | None, said: Callable[[float], str]) -> str:
    if band is None:
        return "-"
    low, high = said(band.low), said(band.high)
    return low if low == high else f"{low} - {high}"


def picture(plan: Plan) -> str:
    """The text of an SVG file."""
    rows = plan.footprints
    parts = {name: footprint.parts | {"scratch": footprint.scratch} for name, footprint in rows.items()}
    most = max([footprint.bound for footprint in rows.values()] + [plan.budget or 0])
    scale = WIDTH / most
    bottom = TOP + ROW * len(rows)
    pieces = []
    for place, (name, footprint) in enumerate(rows.items()):
        y, x = TOP + ROW * place, float(LEFT)
        weight = "bold" if name == plan.backward else "normal"
        pieces.append(_text(LEFT - 10, y + BAR / 2 + 4, name, anchor="end", weight=weight))
        for kind, size in parts[name].items():
            pieces.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" fill="{COLOURS[kind]}">'
                f"<title>{escape(kind)}: {in_words(size)}</title></rect>"
            )
            x += size * scale
        pieces.append(_text(x + 6, y + BAR / 2 + 4, in_words(footprint.bound, up=True)))
    if plan.budget:
        x = LEFT + plan.budget * scale
        pieces.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#555" stroke-dasharray="4 3"/>')
        pieces.append(_text(x, bottom + 14, f"memory: {in_words(plan.budget)}", anchor="middle"))
    used = [kind for kind in COLOURS if any(sizes[kind] * scale >= 0.5 for sizes in parts.values())]
    for place, kind in enumerate(used):
        x = LEFT + 110 * (place % 6)
        y = bottom + 34 + 20 * (place // 6)
        pieces.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>' + _text(x + 17, y, kind))
    height = bottom + 44 + 20 * ((len(used) - 1) // 6)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 110}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'

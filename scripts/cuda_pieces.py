"""The pieces of cuda_session.py, the most valuable first: one command of a script each, with its time limit and toy size.

QUARTER fits into a quarter of an hour, with the start of the machine. REST is for what is left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """
    Args:
        name: also of its JSON file.
        command: what follows ``python``, without ``--json``.
        toy: arguments that come after the others in a dry run, and make it small.
        seconds: it is ended after these.
        needs: modules without which it is skipped.
    """

    name: str
    command: tuple[str, ...]
    toy: tuple[str, ...] = ()
    seconds: float = 100
    needs: tuple[str, ...] = ()


SIZES = {
    "vit_small": "--batch 128",
    "gpt_medium": "--batch 8 --tokens 1024",
    "vit_base": "--batch 64",
    "swin_tiny": "--batch 64",
    "roberta_base": "--batch 32 --tokens 512",
    "swin_base": "--batch 32",
}
"""The models, the most valuable first, and the batch of the comparison at equal batch."""

TOYS = {
    "vit": "--model vit_tiny --depth 2",
    "swin": "--model swin_nano --depth 1",
    "roberta": "--model roberta_tiny --depth 2",
    "gpt": "--model gpt_tiny --depth 2",
    "llama": "--model llama_tiny",
}
SMALL = "--pixels 32 --tokens 16 --vocab 64 --rounds 1"
ENGINES = ("checkpoint", "selective checkpoint", "pareprop", "minREV-like", "revlib")


def toy_of(model: str) -> tuple[str, ...]:
    return words(f"{TOYS[model.partition('_')[0]]} {SMALL}")


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def script(name: str, arguments: str) -> tuple[str, ...]:
    return (f"scripts/{name}.py", *words(arguments))


def equal_batch(model: str) -> Piece:
    toy_engines = ENGINES + ("compile",) * (model == "vit_small")
    return Piece(
        f"equal_batch_{model}",
        (*script("bench_frontier", f"--model {model} {SIZES[model]} --amp --shares 0.6 --engines"), *ENGINES, "compile"),
        (*toy_of(model), "--batch", "2", "--engines", *toy_engines),
    )


COMPILED = ("compiled", "both", "reduce-overhead")


def launches(model: str, seconds: int, *kinds: str) -> Piece:
    """Schedules by how their steps are launched, all or some; the process ends itself 20 s before its limit."""
    shape = SIZES.get(model, "--batch 1 --tokens 8192")
    toy = ["both" if model == "vit_small" else "eager"]  # compiling takes a CPU the most time
    return Piece(
        f"{'compiled_' * bool(kinds)}launches_{model}",
        (*script("bench_frontier", f"--model {model} {shape} --amp --rounds 5 --seconds {seconds} --launches"), *kinds),
        (*toy_of(model), *words("--batch 2 --repeats 1 --seconds 30 --launches"), *(toy if kinds else ("eager", "graphed"))),
        seconds + 20,
    )


def largest_batch(model: str, *gib: int) -> Piece:
    tokens = "".join(SIZES[model].partition("--tokens")[1:])
    budgets = " ".join(map(str, gib))
    return Piece(
        f"largest_batch_{'_'.join(map(str, gib))}_gib_{model}",
        script("bench_budget", f"--model {model} {tokens} --amp --memory {budgets} --rounds 5 --engines checkpoint pareprop"),
        (*toy_of(model), *words("--memory 0.1 --most 2 --engines pareprop")),
        seconds=240,
    )


BACKWARD_TOY = words("--dim 32 --heads 2 --depth 3 --batch 2 --tokens 8 --rounds 1 --no-peaks")
GENERATION_TOY = words("--size tiny --tokens 4 --compared 8 --rounds 1")

STEPS_TOY = (*words("--dim 64 --tokens 16 --batch 1 --cases ReversibleSequence"), "GPT-2 in tiles", "ViT", "StepGraphs")
LONGEST = ("checkpoint", "checkpoint in tiles", "offload in tiles", "checkpoint8 in tiles")
FOREIGN = ("transformers", "timm")


def longest_sequence(shape: str, gib: int, seconds: float) -> Piece:
    plan = "--planned scripts/results/whole_step_cpu.json"
    return Piece(
        f"longest_sequence_{shape}",
        (*script("bench_whole_step", f"--shapes {shape} {plan} --trains {gib} --amp --tokens 1000000 --methods"), *LONGEST),
        ("--toy", "--tokens", "1", "--methods", *LONGEST[-1:]),
        seconds,
        FOREIGN,
    )


WHOLE_STEPS = script("bench_whole_step", "--shapes gpt2 --tokens 2048 --time 2 --amp")
WHOLE_STEPS += (
    "--planned",
    "scripts/results/whole_step_planned_cuda.json",
    "--methods",
    "checkpoint in tiles",
    "checkpoint8 in tiles",
)
PLANNED = "--backwards pareprop --models swin_tiny vit_small gpt_small --batch 8"
PLANNED_TOY = words("--batch 1 --tokens 16 --models swin_nano gpt_tiny --precisions bf16 --backwards pareprop")

LAUNCHED = ("vit_small", "gpt_medium", "llama_1b")
QUARTER = (
    *(launches(model, 42) for model in LAUNCHED),
    Piece("command_line", script("bench_fit", ""), (), 110, ("hydra", "lightning")),
    longest_sequence("gpt2", 4, 40),
    longest_sequence("qwen3", 12, 50),
    Piece("first_steps", script("bench_first_steps", ""), STEPS_TOY, 90, FOREIGN),
    *(launches(model, 70, *COMPILED) for model in LAUNCHED),
    Piece("planned_and_reserved", script("bench_plan", PLANNED), PLANNED_TOY, 40),
    Piece("tests_of_the_engine", script("cuda_tests", "reversible models"), (), 100, ("pytest",)),
    Piece("kernel_of_the_loss", script("bench_counted", "--time"), (), 30),
    Piece("whole_steps_in_tiles", WHOLE_STEPS, ("--toy", "--tokens", "16"), 20, FOREIGN),
)
REST = (
    Piece("tests_of_the_other_parts", script("cuda_tests", "synthesis error_diffusion overlap callbacks"), needs=("pytest",)),
    Piece(
        "gradients_in_float64",
        (*script("bench_backward", "--double --rounds 2 --engines reversible pareprop checkpoint exact"),
         *("selective checkpoint", "store half", "keep attention", "keep matmul", "minREV-like")),
        BACKWARD_TOY,
    ),
    equal_batch("vit_small"),
    equal_batch("gpt_medium"),
    Piece(
        "synthesis",
        script("bench_synthesis", "--shortest 17 --longest 17 --models base --rounds 15"),
        words("--models tiny --batch 1 --rounds 1"),
    ),
    Piece(
        "overlap_trace",
        script("bench_backward", "--trace --amp --batch 64 --rounds 3 --engines reversible pareprop minREV-like"),
        BACKWARD_TOY,
    ),
    largest_batch("vit_small", 24),
    largest_batch("gpt_medium", 24),
    *(equal_batch(model) for model in list(SIZES)[2:]),
    Piece(
        "planned_peaks",
        script("bench_plan", "--batch 16 --precisions bf16 --backwards autograd checkpoint pareprop --models") + tuple(SIZES),
        words("--batch 1 --tokens 16 --models vit_tiny swin_nano roberta_tiny gpt_tiny --backwards autograd pareprop"),
        180,
    ),
    Piece("signal_kernel", script("bench_overlap", "--parts cuda"), words("--cubes 64 --groups 1 2 --rounds 1")),
    Piece(
        "error_diffusion",
        script("bench_error_diffusion", "--depths 512 1024 2048 4096"),
        words("--depths 4 8 --deep 4 --rounds 1"),
    ),
    Piece("generation", script("bench_generation", "--size medium --batch 8 --tokens 256"), GENERATION_TOY),
    Piece("generation_bits", script("bench_generation", "--size medium --bits 8 4"), GENERATION_TOY, needs=("torchao",)),
    *(largest_batch(model, 24) for model in list(SIZES)[2:]),
    *(largest_batch(model, 16, 40) for model in SIZES),
)  # fmt: skip
PIECES = QUARTER + REST

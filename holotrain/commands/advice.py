"""What would make a training need less memory."""

from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import AUTO, PLAIN, reversible


def batch_option(config: RunConfig) -> tuple[str, int]:
    """The option that says how large a batch is, and its value."""
    tokens = getattr(config.data, "max_tokens", None)
    if tokens is None or config.task.kind == "causal_lm":
        return "data.batch_size", config.data.batch_size
    return "data.max_tokens", tokens


def advice(config: RunConfig) -> list[str]:
    """Overrides that lessen the memory of a step, each with its reason, the one that costs a training least first.

    Rules, not predictions: each lessens the memory, and none is known to be enough.
    """
    return [*_backward(config), *_precision(config), *_batch(config)]


def _backward(config: RunConfig) -> list[str]:
    backward = config.backward
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
    option, size = batch_option(config)
    smallest = config.data.context if option == "data.max_tokens" else 1
    if size // 2 < smallest:
        return []
    halved = f"{option}={size // 2}"
    if config.backward.cuda_graph:  # which cannot accumulate
        return [f"{halved} (half a batch a step)"]
    twice = 2 * config.trainer.accumulate_grad_batches
    return [f"{halved} trainer.accumulate_grad_batches={twice} (the same batch in two parts)"]

"""The peak of one step in TRL's SFTTrainer, counted in tensors, beside its plan: SmolLM2-135M's shape in fp32, AdamW.

    python scripts/bench_trl.py --tokens 512 --json scripts/results/trl_512_cpu.json
    python scripts/bench_trl.py --tokens 2048 --most 8 --json scripts/results/trl_2048_cpu.json
    python scripts/bench_trl.py --tokens 512 2048 8192 --most 0 --json scripts/results/trl_planned_cpu.json

Random weights, one row of text, clipping to a norm of 1. A plan above --most GiB is printed without a step. Methods: nothing,
transformers' own checkpointing, and ``recompute`` with its options; with TRL's loss, also in smaller chunks, or with that of
the model.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from bench_common import arguments, begin, save, verdict
from foreign_models import write_tokenizer
from torch import nn
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from holotrain.planning import Planner, Size, TrainingStep
from holotrain.planning.tracker import AllocationTracker
from holotrain.reversible import recompute

SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SHAPE |= {"num_key_value_heads": 3, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
TILE = 512


@dataclass(frozen=True)
class Method:
    """How a model is trained.

    Args:
        options: of ``recompute``; None: it is not called.
        checkpointing: transformers' own.
        own: the loss is the model's, not TRL's.
        head: tokens that TRL's head takes at a time.
    """

    options: dict[str, Any] | None = None
    checkpointing: bool = False
    own: bool = False
    head: int = 4096


EIGHT = {"backward": "checkpoint8", "tile": TILE}
METHODS = {
    "plain": Method(),
    "gradient_checkpointing": Method(checkpointing=True),
    "recompute": Method({}),
    "tile": Method({"tile": TILE}),
    "tile, TRL's head by 256 tokens": Method({"tile": TILE}, head=256),
    "checkpoint8, tile": Method(EIGHT),
    "tile, the model's loss": Method({"tile": TILE}, own=True),
    "checkpoint8, tile, the model's loss": Method(EIGHT, own=True),
    "chunk, the model's loss": Method({"chunk": TILE}, own=True),
}


def made(shape: dict[str, Any], method: Method, tokens: int) -> Any:
    config = transformers.LlamaConfig(**shape | {"max_position_embeddings": tokens})
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.train() if method.options is None else recompute(model.train(), **method.options)


def planned(shape: dict[str, Any], method: Method, tokens: int) -> int:
    """The bytes of a step in the plan."""

    def step_of(model: Any, batch: int) -> TrainingStep:
        if method.checkpointing:
            model.gradient_checkpointing_enable()
        if not method.own:
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        x = torch.ones(batch, tokens, dtype=torch.long)
        given = {"input_ids": x, "attention_mask": x, "labels": x, "use_cache": False, "num_items_in_batch": tokens}
        loss = partial(model, **given) if method.own else partial(model, **given, fused_lm_head=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # the Trainer's default
        return TrainingStep(model, lambda: loss().loss, optimizer, clip=1.0, zero_first=True, held={"batch": [x]})

    chunked_logprob.TOKEN_CHUNK_SIZE = method.head
    planner = Planner(lambda *_: made(shape, method, tokens), step_of, "cpu", Size("batch", 1))
    return planner.footprint("autograd").peak


class InTheMiddle(transformers.TrainerCallback):
    """Makes the optimizer's state before the first step, which is then as any other, and tells a tracker that it begins."""

    def __init__(self, tracker: AllocationTracker) -> None:
        self._tracker = tracker

    def on_train_begin(self, args, state, control, model: nn.Module, optimizer: Any, **rest: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self._tracker.enter("step")


def tracked(folder: Path, shape: dict[str, Any], method: Method, tokens: int) -> int:
    """The bytes of tensors at the peak of a step of SFTTrainer, with the tokenizer of a folder."""
    model, tracker = made(shape, method, tokens), AllocationTracker()
    tracker.label("parameters", [*model.parameters(), *model.buffers()])
    options = {"max_length": tokens, "max_steps": 1, "per_device_train_batch_size": 1, "use_cpu": True, "bf16": False}
    options |= {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    config = trl.SFTConfig(str(folder / "out"), **options, gradient_checkpointing=method.checkpointing)
    rows = datasets.Dataset.from_dict({"input_ids": [[number % 200 + 2 for number in range(tokens)]] * 2})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    own = {"compute_loss": transformers.Trainer.compute_loss} if method.own else {}
    kind = type("SFT", (trl.SFTTrainer,), own)
    chunked_logprob.TOKEN_CHUNK_SIZE = method.head
    trainer = kind(model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[InTheMiddle(tracker)])
    with tracker.tracking():
        trainer.train()
    return tracker.peak("step")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--most", type=float, default=6, metavar="GIB")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    options = parser.parse_args()
    results = begin(options)
    results["versions"] = versions = {each.__name__: each.__version__ for each in (transformers, trl)}
    print(versions)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    shape = SHAPE | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        for tokens in options.tokens:
            results[str(tokens)] = found = {}
            for name in options.methods:
                found[name] = row = {"planned": planned(shape, METHODS[name], tokens)}
                print(f"{tokens} tokens, {name}: planned {row['planned'] / 2**20:.0f} MiB", flush=True)
                if row["planned"] < options.most * 2**30:
                    gc.collect()
                    row["tracked"] = peak = tracked(Path(folder), shape, METHODS[name], tokens)
                    print(f"  tracked {peak / 2**20:.0f} MiB", flush=True)
                    verdict(results, f"{tokens}, {name}: error of the plan", abs(row["planned"] / peak - 1), 0.02)
                save(results, options.json)


if __name__ == "__main__":
    main()

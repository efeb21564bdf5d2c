"""``holotrain generate``: continues texts with a causal language model."""

import json
import time
from itertools import takewhile
from pathlib import Path
from typing import cast

import torch

from holotrain.commands import screen
from holotrain.commands.checkpoint import described_model, in_int8
from holotrain.commands.console import plain
from holotrain.commands.run_folder import Run
from holotrain.commands.summary import write_summary
from holotrain.commands.writing import write_whole
from holotrain.config.build_trainer import autocast_of, check_device, device_kind
from holotrain.config.command_options import GenerateConfig
from holotrain.data.tokenizers import Tokenizer, tokenizer_from_json
from holotrain.errors import UserError, as_user_error
from holotrain.files import from_json, read_text
from holotrain.models import generate
from holotrain.models.generation import Sampling
from holotrain.numeric import counted

GENERATIONS = "generations.jsonl"


def run(config: GenerateConfig, run: Run) -> int:
    """Prints the texts and writes one object per prompt, with ``prompt`` and ``text``, to generations.jsonl."""
    path = config.checkpoint
    check_device(config.trainer)
    device = torch.device(device_kind(config.trainer.accelerator))
    model, kept = described_model(path)
    tokenizer = tokenizer_from_json(kept["tokenizer"])
    in_int8(model, config.int8)
    model = model.to(device).eval()
    texts = prompts(config)
    context = cast(int, model.context)
    starts = [encoded(text, tokenizer, context, len(texts) > 1) for text in texts]

    generator = torch.Generator(device).manual_seed(config.seed)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    shown = Shown(tokenizer, texts[0]) if config.stream and len(texts) == 1 else None
    tokens: list[torch.Tensor] = []
    began = time.monotonic()
    with autocast_of(config.trainer), as_user_error("generate"):
        compiled = bool(config.compile)
        for token in generate(model, starts, config.max_tokens, sampling, tokenizer.end_id, generator, compiled=compiled):
            tokens.append(token.cpu())
            if shown is not None:
                shown.add(int(token[0]))
    seconds = time.monotonic() - began
    drawn = torch.stack(tokens, dim=1)
    answers = [tokenizer.decode(list(takewhile(lambda token: token != tokenizer.end_id, row.tolist()))) for row in drawn]
    lines = ""
    for text, answer in zip(texts, answers, strict=True):
        lines += json.dumps({"prompt": text, "text": answer}, ensure_ascii=False) + "\n"
        if shown is None:
            print(f"{text}{answer}\n")
    if shown is not None:
        shown.add()
    write_whole(run.folder / GENERATIONS, lines)

    metrics, speed = {"texts": len(texts), "tokens": int((drawn != tokenizer.end_id).sum())}, drawn.numel() / seconds
    longest = max(len(ids) for ids in starts)
    full = context if longest + config.max_tokens > context == longest + len(tokens) else None
    summary = write_summary(run, config, model, checkpoint=str(path), metrics=metrics, tokens_per_second=speed)
    rows = {
        "tokens": f"{metrics['tokens']} in {counted(len(texts), 'text')}, {speed:.1f} tokens/s",
        "ended": full and f"because the model's context of {full} tokens was full",
        "written to": run.folder / GENERATIONS,
    }
    plain(stderr=True).print(screen.table(summary.status, rows))  # stdout has only the texts
    return 0


class Shown:
    """Prints a text while it is generated; a character appears once all of its bytes are known."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""
        print(prompt, end="", flush=True)

    def add(self, *tokens: int) -> None:
        """Without tokens the text ends."""
        self.ids += tokens
        text = self.tokenizer.decode(self.ids)
        if not tokens or not text.endswith("\ufffd"):  # an incomplete character
            print(text[len(self.shown) :], end="" if tokens else "\n", flush=True)
            self.shown = text


def prompts(config: GenerateConfig) -> list[str]:
    """The prompts. Raises a UserError if the file of prompts cannot be read, or has none."""
    if config.prompts is None:
        return [config.prompt or ""]
    path = Path(config.prompts)
    try:
        lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"prompts: {path} is not valid UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"prompts: cannot read {path} ({getattr(error, 'strerror', None) or error})") from error
    if not lines:
        raise UserError(f"prompts: {path} has no prompts")
    if path.suffix.lower() == ".jsonl":
        for index, (number, line) in enumerate(lines):
            try:
                lines[index] = number, from_json(line)["prompt"]
                lines[index][1].encode()  # fails for what is no text
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"prompts: {path}:{number} is not a JSON object with a text field named prompt") from error
    return [line for _, line in lines]


def encoded(text: str, tokenizer: Tokenizer, context: int, several: bool) -> torch.Tensor:
    """The tokens of a prompt; an end token for an empty prompt. Raises a UserError if the prompt fills the model's context."""
    ids = torch.from_numpy(tokenizer.encode(text).astype("int64"))
    if len(ids) >= context:
        which = f"prompts: {text[:20]!r}... is" if several else "prompt: it is"
        raise UserError(f"{which} {counted(len(ids), 'token')} long; it must be shorter than the model's context of {context}")
    return ids if len(ids) else torch.tensor([tokenizer.end_id])

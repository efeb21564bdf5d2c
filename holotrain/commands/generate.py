"""``holotrain generate``: continues texts with a causal language model."""

import json
import time
from dataclasses import dataclass
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
from holotrain.data.text.answers import Message, chat_to_answer, messages_in
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
    asked = prompts(config)
    context = cast(int, model.context)
    started = [encoded(each, tokenizer, context, len(asked) > 1) for each in asked]
    starts = [ids for ids, _ in started]
    ends = list(dict.fromkeys([*(end for _, end in started), tokenizer.end_id]))

    generator = torch.Generator(device).manual_seed(config.seed)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    shown = Shown(tokenizer, asked[0].shown) if config.stream and len(asked) == 1 else None
    tokens: list[torch.Tensor] = []
    began = time.monotonic()
    with autocast_of(config.trainer), as_user_error("generate"):
        compiled = bool(config.compile)
        for token in generate(model, starts, config.max_tokens, sampling, ends, generator, compiled=compiled):
            tokens.append(token.cpu())
            if shown is not None:
                shown.add(int(token[0]))
    seconds = time.monotonic() - began
    drawn = torch.stack(tokens, dim=1)
    answers = [tokenizer.decode(list(takewhile(lambda token: token not in ends, row.tolist()))) for row in drawn]
    lines = ""
    for each, answer in zip(asked, answers, strict=True):
        lines += json.dumps({each.field: each.value, "text": answer}, ensure_ascii=False) + "\n"
        if shown is None:
            print(f"{each.shown}{answer}\n")
    if shown is not None:
        shown.add()
    write_whole(run.folder / GENERATIONS, lines)

    count = int((~torch.isin(drawn, torch.tensor(ends))).sum())
    metrics, speed = {"texts": len(asked), "tokens": count}, drawn.numel() / seconds
    longest = max(len(ids) for ids in starts)
    full = context if longest + config.max_tokens > context == longest + len(tokens) else None
    summary = write_summary(run, config, model, checkpoint=str(path), metrics=metrics, tokens_per_second=speed)
    rows = {
        "tokens": f"{count} in {counted(len(asked), 'text')}, {speed:.1f} tokens/s",
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


@dataclass
class Prompt:
    """What the model is asked: a text to continue, or a chat to answer, and its ``field`` in a file of prompts."""

    field: str
    value: str | list[Message]
    messages: list[Message] | None = None

    @property
    def shown(self) -> str:
        """The text that is printed before the answer."""
        return str(self.value) if self.messages is None else f"{self.messages[-1]['content']}\n"


def prompts(config: GenerateConfig) -> list[Prompt]:
    """The prompts. Raises a UserError if the file of prompts cannot be read, or has none."""
    is_chat = config.chat if config.chat is not None else getattr(config.data, "messages", None) is not None
    if config.prompts is None:
        return [_prompt(config.prompt or "", is_chat)]
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
        return [_of_row(line, is_chat, f"{path}:{number}") for number, line in lines]
    return [_prompt(line, is_chat) for _, line in lines]


def _prompt(text: str, is_chat: bool) -> Prompt:
    return Prompt("prompt", text, [{"role": "user", "content": text}] if is_chat else None)


def _of_row(line: str, is_chat: bool, where: str) -> Prompt:
    try:
        row = from_json(line)
        if "messages" in row:
            messages = messages_in(row["messages"], "messages")
            return Prompt("messages", row["messages"], messages)
        row["prompt"].encode()  # fails for what is no text
        return _prompt(row["prompt"], is_chat)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"prompts: {where} is not a JSON object with a text named prompt, or a chat named messages") from error


def encoded(prompt: Prompt, tokenizer: Tokenizer, context: int, several: bool) -> tuple[torch.Tensor, int]:
    """The tokens of a prompt (an end token for an empty one), and the token that ends an answer. Raises a UserError if the
    prompt fills the model's context."""
    if prompt.messages is None:
        ids, end = tokenizer.encode(str(prompt.value)), tokenizer.end_id
    else:
        ids, end = chat_to_answer(prompt.messages, tokenizer)
    if len(ids) >= context:
        which = f"prompts: {prompt.shown[:20]!r}... is" if several else "prompt: it is"
        raise UserError(f"{which} {counted(len(ids), 'token')} long; it must be shorter than the model's context of {context}")
    return torch.from_numpy(ids.astype("int64")) if len(ids) else torch.tensor([tokenizer.end_id]), end

"""``holotrain generate``: continues texts with a causal language model."""

import json
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch

from holotrain.commands.prepare import as_exported, described_model
from holotrain.commands.run import Run, write_summary
from holotrain.commands.screen import show
from holotrain.config.build import autocast_of, check_device, device_kind
from holotrain.config.command_options import GenerateConfig
from holotrain.data.text.chat_forms import Message, messages_in
from holotrain.data.text.learned import chat_to_answer, chat_writer
from holotrain.data.tokenizers import Tokenizer, tokenizer_from_json
from holotrain.errors import UserError, as_user_error, readable
from holotrain.files import from_json, read_text
from holotrain.folders import write_whole
from holotrain.models import generate
from holotrain.models.generation import Sampling
from holotrain.numeric import counted

GENERATIONS = "generations.jsonl"


def run(config: GenerateConfig, run: Run) -> int:
    """Prints the texts and writes one object per prompt, with ``prompt`` or ``messages`` and ``text``, to generations.jsonl."""
    path = config.checkpoint
    check_device(config.trainer)
    model, kept = described_model(path)
    tokenizer = tokenizer_from_json(kept["tokenizer"])
    if config.quantised:
        as_exported(model, config.quantised)
    model = model.to(device_kind(config.trainer.accelerator)).eval()
    asked, context = prompts(config, bool(kept["facts"].get("chats"))), cast(int, model.context)
    starts, ends = encoded(asked, tokenizer, context)

    shown = Shown(tokenizer, asked[0].shown) if config.stream and len(asked) == 1 else None
    generator = torch.Generator(next(model.parameters()).device).manual_seed(config.seed)
    tokens, began, options = [], time.monotonic(), ("max_tokens", "temperature", "top_k", "top_p")
    with autocast_of(config.trainer), as_user_error("generate", elsewhere={name: name for name in options}):
        sampling = Sampling(config.temperature, config.top_k, config.top_p)
        for token in generate(model, starts, config.max_tokens, sampling, ends, generator, compiled=bool(config.compile)):
            tokens.append(token.cpu())
            if shown is not None:
                shown.add(int(token[0]))
    drawn, seconds = torch.stack(tokens, dim=1), time.monotonic() - began
    answers = [tokenizer.decode(list(takewhile(lambda token: token not in ends, row.tolist()))) for row in drawn]
    if shown is not None:
        shown.add()
    else:
        print(readable("".join(f"{each.shown}{answer}\n\n" for each, answer in zip(asked, answers, strict=True))), end="")
    rows = [each.row | {"text": answer} for each, answer in zip(asked, answers, strict=True)]
    write_whole(run.folder / GENERATIONS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    count, longest = int((~torch.isin(drawn, torch.tensor(ends))).sum()), max(len(ids) for ids in starts)
    metrics, speed = {"texts": len(asked), "tokens": count}, drawn.numel() / seconds
    summary = write_summary(run, config, model, checkpoint=str(path), metrics=metrics, tokens_per_second=speed)
    lines: dict[str, object] = metrics | {"tokens_per_second": speed}
    if longest + config.max_tokens > context == longest + drawn.shape[1]:
        lines["ended"] = f"because the model's context of {context} tokens was full"
    show(summary.status, lines | {"written to": run.folder / GENERATIONS}, stderr=True)  # stdout has only the texts
    return 0


class Shown:
    """Prints a text while it is generated; a character appears once all of its bytes are known."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""
        print(readable(prompt), end="", flush=True)

    def add(self, *tokens: int) -> None:
        """Without tokens the text ends."""
        self.ids += tokens
        text = self.tokenizer.decode(self.ids)
        if not tokens or not text.endswith(("\ufffd", "\r")):  # a part of a character or of the end of a line
            print(readable(text[len(self.shown) :]), end="" if tokens else "\n", flush=True)
            self.shown = text


@dataclass
class Prompt:
    """A text to continue, or a chat to answer.

    Attributes:
        row: what it is in a file of prompts: ``{"prompt": ...}`` or ``{"messages": ...}``.
        shown: the text that is printed before the answer.
        messages: the chat; None: a text.
    """

    row: dict[str, Any]
    shown: str
    messages: list[Message] | None = None


def prompts(config: GenerateConfig, learned_chats: bool) -> list[Prompt]:
    """The prompts. Raises a UserError if the file of prompts cannot be read, or has none."""
    learned_chats = learned_chats or getattr(config.data, "messages", None) is not None  # before facts had it
    is_chat = learned_chats if config.chat is None else config.chat
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
    text.encode()  # fails for what is no text
    if not is_chat:
        return Prompt({"prompt": text}, text)
    return Prompt({"prompt": text}, f"{text}\n", [{"role": "user", "content": text}])


def _of_row(line: str, is_chat: bool, where: str) -> Prompt:
    try:
        row = from_json(line)
        if "messages" not in row:
            return _prompt(row["prompt"], is_chat)
        messages = messages_in(row["messages"], "messages")
        return Prompt({"messages": messages}, f"{messages[-1]['content']}\n", messages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "a JSON object with a text named prompt, or a chat named messages"
        said = f" ({error})" if isinstance(error, ValueError) else ""
        raise UserError(f"prompts: {where} is not {expected}{said}") from error


def encoded(prompts: list[Prompt], tokenizer: Tokenizer, context: int) -> tuple[list[torch.Tensor], list[int]]:
    """The tokens (T,) of each prompt (an end token for an empty one), and the tokens that end an answer.

    Raises:
        UserError: a prompt fills the model's context, or a chat template refuses one.
    """
    starts, ends = [], {tokenizer.end_id: None}
    writer = chat_writer(tokenizer) if any(prompt.messages for prompt in prompts) else None
    for prompt in prompts:
        if prompt.messages is None:
            ids = tokenizer.encode(prompt.shown)
        else:
            ids, end = chat_to_answer(prompt.messages, tokenizer, writer)
            ends[end] = None
        if len(ids) >= context:
            which = f"prompts: {prompt.shown[:20]!r}... is" if len(prompts) > 1 else "prompt: it is"
            size = counted(len(ids), "token")
            raise UserError(f"{which} {size} long; it must be shorter than the model's context of {context}")
        starts.append(torch.from_numpy(ids.astype("int64")) if len(ids) else torch.tensor([tokenizer.end_id]))
    return starts, [*ends]

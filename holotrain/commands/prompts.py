"""Reads and encodes the prompts of ``generate``."""

from pathlib import Path

import torch

from holotrain.config.commands import GenerateConfig
from holotrain.data import Tokenizer
from holotrain.errors import UserError
from holotrain.outside import from_json


def prompts(config: GenerateConfig) -> list[str]:
    """The prompts.

    Raises:
        UserError: the file of prompts cannot be read, or has none.
    """
    if config.prompts is None:
        return [config.prompt]
    path = Path(config.prompts)
    try:
        lines = [(number, line) for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"prompts: {path} is not valid UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"prompts: cannot read {path} ({error.strerror or error})") from error
    if not lines:
        raise UserError(f"prompts: {path} has no prompts")
    if path.suffix == ".jsonl":
        return [_prompt_of(line, f"{path}:{number}") for number, line in lines]
    return [line for _, line in lines]


def _prompt_of(line: str, where: str) -> str:
    try:
        prompt = from_json(line)["prompt"]
        prompt.encode()  # fails for what is no text
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"prompts: {where} is not a JSON object with a text field named prompt") from error
    return prompt


def encoded(text: str, tokenizer: Tokenizer, context: int, several: bool) -> torch.Tensor:
    """The tokens of a prompt; an end token for an empty prompt.

    Raises:
        UserError: the prompt fills the model's context.
    """
    ids = torch.from_numpy(tokenizer.encode(text).astype("int64"))
    if len(ids) >= context:
        which = f"prompts: {text[:20]!r}... is" if several else "prompt: it is"
        raise UserError(f"{which} {len(ids)} tokens long; it must be shorter than the model's context of {context}")
    return ids if len(ids) else torch.tensor([tokenizer.end_id])

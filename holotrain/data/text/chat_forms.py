"""The forms in which chats come, as one: messages of ``{role, content, tool_calls}``, and which of them are learned.

OpenAI's ``messages``, ShareGPT's ``conversations``, Alpaca's ``instruction`` and ``output``, and prompts with completions.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holotrain.files import from_json

ASSISTANT = "assistant"
"""The role whose messages are answers."""

Message = dict[str, Any]
"""``role`` and ``content``, both texts, perhaps ``tool_calls``, ``learned`` where the data say it, and what else they have."""

FORMS = {
    ("messages",): "messages",
    ("conversations",): "ShareGPT: conversations",
    ("conversation",): "ShareGPT: conversation",
    ("instruction", "output"): "Alpaca: instruction, input, output",
    ("prompt", "completion"): "prompt, completion",
}
"""The columns of a form, and what it is called; the first of which all are there is taken."""

OPTIONAL = ("tools", "system", "input")
"""Columns that are read where they are there: tools that may be called, a first message of the role system, Alpaca's input."""

ROLES = dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model", "function_call"), ASSISTANT)
ROLES |= {"human": "user", "observation": "tool", "function_response": "tool", "tool_response": "tool"}
"""Names that ShareGPT files have for roles."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What a message may call its reasoning; transformers tells a template all of them."""

NOT_WRITTEN = {"role", "content", "tool_calls", "tool_call_id", "id", "learned"}
"""Keys of a message that need not stand in a template."""


@dataclass(frozen=True)
class Chat:
    """A chat as templates take it.

    Attributes:
        messages: see ``Message``, without ``learned``.
        learned: numbers of the messages that are learned.
        tools: what may be called, for the template; None: nothing.
        empty: how many answers say and call nothing; they are not learned.
    """

    messages: list[Message]
    learned: Collection[int]
    tools: list[Any] | None = None
    empty: int = 0


def form_in(columns: Collection[str]) -> tuple[str, ...] | None:
    """The columns of the form that rows with these columns have; None: they are no chats."""
    return next((form for form in FORMS if set(form) <= set(columns)), None)


def chat_in(row: Mapping[str, Any], form: tuple[str, ...], last: bool = False) -> Chat:
    """The chat in a row.

    Args:
        form: columns of one of ``FORMS``, or one column of messages.
        last: the last answer alone is learned, and others that the data say are.

    Raises:
        ValueError: there is none in it, or no answer; the message says what is wrong.
    """
    if len(form) == 1:
        messages = messages_in(row[form[0]], form[0])
    elif form == ("instruction", "output"):
        messages = _alpaca(row)
    else:
        before = [{"learned": False} | each for each in messages_in(row[form[0]], form[0])]
        messages = [*before, *messages_in(row[form[1]], form[1])]
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    tools = _parsed(row.get("tools"))
    if not isinstance(tools, list | None):
        raise ValueError("has no list of tools in 'tools'")
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise ValueError(f"has no message of the role assistant in {form[-1]!r}")
    says = [number for number in answers if any(messages[number].get(key) for key in ("content", "tool_calls", *THOUGHTS))]
    chosen = answers[-1:] if last else answers
    learned = [number for number in says if messages[number].get("learned", number in chosen)]
    plain = [{key: part for key, part in message.items() if key != "learned"} for message in messages]
    return Chat(plain, learned, tools or None, len(answers) - len(says))


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    asked = "\n\n".join(row[name] for name in ("instruction", "input") if row.get(name))
    if not asked:
        raise ValueError("has nothing in 'instruction'")
    return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": row["output"] or ""}]


def messages_in(value: Any, name: str) -> list[Message]:
    """The messages in a field, which may be JSON, as in a CSV file. Raises a ValueError if it holds none."""
    found = _parsed(value)
    if not (isinstance(found, list) and found and all(isinstance(each, dict) for each in found)):
        raise ValueError(f"has no list of messages in {name!r}")
    return [_message(each, f"in message {number} of {name!r}") for number, each in enumerate(found, 1)]


def _message(given: Mapping[str, Any], where: str) -> Message:
    message = {key: part for key, part in given.items() if part is not None}
    for theirs, ours in (("from", "role"), ("value", "content")):  # of ShareGPT
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    role, calls = message.get("role"), message.pop("function_call", None)  # as OpenAI had it
    if role == "function_call":
        calls, message["content"] = _parsed(message.get("content")), ""
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": each} for each in (calls if isinstance(calls, list) else [calls])
        ]
    if not isinstance(role, str):
        raise ValueError(f"has no text as role or content {where}")
    message["role"] = ROLES.get(role, role)
    message["content"] = _text(message.get("content", "" if message["role"] == ASSISTANT else None), where)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], where)
    marks = [message.pop(key) for key in ("weight", "train") if key in message]
    if any(mark not in (0, 1) for mark in marks):
        raise ValueError(f"has a weight or train that is neither 0 nor 1 {where}")
    return message | ({"learned": all(marks)} if marks else {})


def _text(content: Any, where: str) -> str:
    """A text that may come in parts."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"has no text as role or content {where}")
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[Any]:
    """Tool calls with their arguments as objects, which OpenAI writes as texts of JSON."""
    found = []
    for call in calls if isinstance(calls, list) and all(isinstance(each, dict) for each in calls) else [{}]:
        function = call.get("function", call)
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise ValueError(f"has a tool call without a name {where}")
        function = function | {"arguments": _parsed(function.get("arguments", {}))}
        found.append(call | {"function": function} if "function" in call else function)
    return found


def with_texts_as_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages with the arguments of tool calls as JSON, which some templates want."""

    def spelled(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return call | {"function": spelled(call["function"])}
        arguments = call["arguments"]
        return call | {"arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}

    return [
        message | {"tool_calls": [spelled(call) for call in message["tool_calls"]]} if "tool_calls" in message else message
        for message in messages
    ]


def _parsed(value: Any) -> Any:
    """What a text of JSON holds; any other value as it is."""
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def without_padding(value: Any, kind: Any) -> Any:
    """A field without the None that Arrow puts where a row lacks what others have; ``kind``: its type in the data set."""
    if isinstance(kind, dict) and isinstance(value, dict):
        return {key: without_padding(part, kind[key]) for key, part in value.items() if part is not None}
    if isinstance(value, list) and hasattr(kind, "feature"):
        return [without_padding(each, kind.feature) for each in value]
    return value

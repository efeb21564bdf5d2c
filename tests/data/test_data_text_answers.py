"""Chats and prompts with completions: what a row becomes, of which tokens the loss is, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from small_trainings import quiet_trainer
from tokenizers import Tokenizer as Encoder
from torch.nn import functional as F

from holotrain.data import TextFiles
from holotrain.data.text.tokenise import held_out_document
from holotrain.data.tokenizers import ByteTokenizer, SubwordTokenizer, tokenizer_from_json, tokenizer_named
from holotrain.errors import UserError
from holotrain.models import RevGPT
from holotrain.tasks import CausalLM

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<|im_start|>{{ m.content }}\n{% endif %}{% endfor %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ raise_exception('no such role') }}{% endif %}"
    "{% endfor %}"
)

CHAT = [
    {"role": "user", "content": "what is a?"},
    {"role": "assistant", "content": " n "},
    {"role": "user", "content": "and é, an n?"},
    {"role": "assistant", "content": "née n"},
]
LEARNED = {
    CHATML: ["n<|im_end|>", "née n<|im_end|>"],
    MARKED: [" n <|im_end|>", "née n<|im_end|>"],
    INSTRUCT: ["  n  <|im_end|>", " née n <|im_end|>"],
}
"""What is learned of that chat, by hand, with each template."""


TURN = (
    "{{ '<|im_start|>' + m.role }}\n{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% set parts = m.content.split('</think>') %}{% set late = loop.index0 > ns.last and loop.last %}"
    "{% if late %}{{ ('' if parts | length > 1 else '<think>') + parts[:-1] | join + '</think>' }}{% endif %}"
    "{{ parts[-1] | trim }}"
    "{% for call in m.tool_calls or [] %}{{ '\n\n' if m.content }}<tool_call>ARGUMENTS</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n"
)
THINKING = (
    "{% if messages[0].role == 'none' %}{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ tools | tojson if tools else '' }}"
    f"{{% for m in messages %}}{TURN}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
"""As those of Qwen: earlier reasoning is dropped, the last answer has some, and there must be a message."""
CALLED = "{{ call.function.name + ': ' + call.function.arguments | tojson }}"
AS_OBJECT, AS_TEXT = THINKING.replace("ARGUMENTS", CALLED), THINKING.replace("ARGUMENTS", CALLED.replace(" | tojson", ""))
PARTS = CHATML.replace("m.content | trim", "m.content[0] | length }}{{ m.content | map(attribute='text') | join")
ASKS_TO_THINK = AS_OBJECT.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")


def said(content, **others):
    return {"role": "assistant", "content": content, **others}


def call(arguments):
    return [{"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}]


TOOLS = [
    CHAT[0],
    said(None, tool_calls=call({"n": None, "é": 1})),
    {"role": "tool", "content": "n"},
    said("<think>n?</think>née"),
    CHAT[0],
    said("it", tool_calls=call('{"n": 2}')),
]
OF_TOOLS = [
    '<tool_call>a: {"n": null, "é": 1}</tool_call><|im_end|>',
    "née<|im_end|>",
    '<tool_call>a: {"n": 2}</tool_call><|im_end|>',
]
OF_TOOLS[2] = f"<think></think>it\n\n{OF_TOOLS[2]}"
TURNS = {
    "tools": (AS_OBJECT, TOOLS, OF_TOOLS),
    "arguments as text": (AS_TEXT, TOOLS, OF_TOOLS),
    "asked to think": (ASKS_TO_THINK, TOOLS, [*OF_TOOLS[:2], OF_TOOLS[2].removeprefix("<think>")]),
    "an answer first": (AS_OBJECT, [said("it"), CHAT[0], said("n")], ["it<|im_end|>", "<think></think>n<|im_end|>"]),
    "two answers": (AS_OBJECT, [CHAT[0], said("it"), said("n")], ["it<|im_end|>", "n<|im_end|>"]),
    "parts": (PARTS, [CHAT[0], said("née")], ["2née<|im_end|>"]),
    "not the first": (
        AS_OBJECT,
        [CHAT[0], said("it", weight=0), CHAT[0], said("n", train=True)],
        ["<think></think>n<|im_end|>"],
    ),
    "not the last": (MARKED, [CHAT[0], said("it", weight=1), CHAT[0], said("n", train=False)], ["it<|im_end|>"]),
    "nothing said": (CHATML, [CHAT[0], said(""), CHAT[0], said("n")], ["n<|im_end|>"]),
}
"""A template, a chat, and what is learned of it, by hand."""
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | default('') }}\n{% endfor %}"
    "{{ '' if add_generation_prompt else '<|im_end|>' }}"
)
"""Says after the last message alone that it ends."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with special tokens of a chat, as transformers save it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    encoder = Encoder.from_str(SubwordTokenizer.trained(["a user and an assistant say née: what is it?"], 300).to_json())
    encoder.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    encoder.save(str(folder / "tokenizer.json"))
    return folder


def with_template(folder, template):
    settings = {"chat_template": template, "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder / "tokenizer.json")


def written(tmp_path, rows, name="chat.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


def module(tmp_path, files, **options) -> TextFiles:
    """The same rows in all three parts."""
    path = Path(files)
    held = {f"{part}_files": str(shutil.copy(path, path.with_stem(f"{part}_{path.stem}"))) for part in ("val", "test")}
    data = TextFiles(files, **{"batch_size": 4, "cache_dir": str(tmp_path / "cache")} | held | options)
    data.setup()
    return data


def row_and_answers(data) -> tuple[list[int], list[bool]]:
    batch = next(iter(data.val_dataloader()))
    length = batch["lengths"][0]
    return batch["tokens"][0, :length].tolist(), batch["answers"][0, :length].tolist()


def runs(ids, answers) -> list[list[int]]:
    """The tokens of each answer."""
    found, before = [], False
    for token, answer in zip(ids, answers, strict=True):
        if answer and not before:
            found.append([])
        if answer:
            found[-1].append(token)
        before = answer
    return found


@pytest.mark.parametrize("template", LEARNED)
def test_a_chat_is_written_by_the_template_and_its_answers_alone_are_learned(tmp_path, folder, template):
    import transformers

    path = with_template(folder, template)
    data = module(tmp_path, written(tmp_path, [{"messages": CHAT}]), messages="messages", tokenizer=path)
    ids, answers = row_and_answers(data)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=path, chat_template=template, eos_token="<|im_end|>")
    assert ids == theirs.apply_chat_template(CHAT)["input_ids"]
    assert [theirs.decode(each) for each in runs(ids, answers)] == LEARNED[template]
    kept = tokenizer_from_json(data.tokenizer.to_json())  # as a checkpoint has it
    assert kept.chat == data.tokenizer.chat and kept.vocab_size == len(theirs)


@pytest.mark.parametrize("name", TURNS)
def test_whole_turns_of_answers_are_learned(tmp_path, folder, name):
    template, chat, learned = TURNS[name]
    files, path = written(tmp_path, [{"messages": chat, "tools": [{"name": "a"}]}]), with_template(folder, template)
    data = module(tmp_path, files, tokenizer=path)
    ids, answers = row_and_answers(data)
    assert [data.tokenizer.spelled(each) for each in runs(ids, answers)] == learned
    assert ('[{"name": "a"}]' in data.tokenizer.spelled(ids)) == ("tools" in template)


FORMS = {
    "ShareGPT: conversations": {"conversations": [{"from": "human", "value": "is é?"}, {"from": "gpt", "value": "n"}]},
    "Alpaca: instruction, input, output": {"instruction": "is", "input": "é?", "output": "n"},
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "is é?"}]}, said("n")]},
    "prompt, completion": {"prompt": [{"role": "user", "content": "is é?"}], "completion": [said("n")]},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_chats_are_found_by_their_columns(tmp_path, form):
    data = module(tmp_path, written(tmp_path, [FORMS[form] | {"system": "short"}]), show=1)
    asked = "is\n\né?" if "Alpaca" in form else "is é?"
    assert data.shown("[[", "]]") == [f"system: short\nuser: {asked}\nassistant:[[ n</s>]]"] and data.chats == form


def test_what_is_not_learned_is_said(tmp_path):
    chat = [CHAT[0], said("a", weight=1), CHAT[0] | {"mood": "good"}, said("b"), CHAT[0], said("c"), CHAT[0], said("")]
    rows = [{"messages": chat}, {"messages": [CHAT[0], said("n", weight=0)]}, {"messages": chat[:-2]}]
    with pytest.warns() as caught:
        data = module(tmp_path, written(tmp_path, rows), train_on="last", show=3)
    assert [str(each.message) for each in caught] == [
        "data: 3 answers without content or tool calls are not learned",
        "data: 3 of 9 rows left out, since no answer in them is learned",
        "data: rows have messages with 'mood', which is not used",
    ]
    learned = [[part.split("]]")[0] for part in row.split("[[")[1:]] for row in data.shown("[[", "]]")]
    assert learned == [[" a</s>"], [], [" a</s>", " c</s>"]]
    (tmp_path / "a.txt").write_text("n")
    mixed = [written(tmp_path, rows), str(tmp_path / "a.txt")]
    with pytest.raises(UserError, match=r"chat\.jsonl holds chats, and .*a\.txt text"):
        TextFiles(mixed, cache_dir=str(tmp_path / "cache")).setup()
    with pytest.raises(UserError, match=r"data\.messages=auto: the rows of .*a\.txt have text; chats have messages, "):
        TextFiles(mixed[1], messages="auto", cache_dir=str(tmp_path / "cache")).setup()


def test_without_a_template_a_chat_is_plain_text(tmp_path):
    rows = [{"messages": [{"role": "system", "content": "short"}, *CHAT, CHAT[0]]}]
    data = module(tmp_path, written(tmp_path, rows), messages="messages")
    ids, answers = row_and_answers(data)
    text = "system: short\nuser: what is a?\nassistant:  n \0user: and é, an n?\nassistant: née n\0"
    assert ids == [data.tokenizer.end_id if byte == 0 else byte for byte in text.encode()]
    assert [data.tokenizer.decode(each) for each in runs(ids, answers)] == ["  n ", " née n"]
    assert all(each[-1] == data.tokenizer.end_id for each in runs(ids, answers))


def test_the_loss_of_a_completion_is_that_of_its_tokens(tmp_path):
    """Against a loop over rows, with padding; a chat in CSV is JSON."""
    import pandas

    frame, path = pandas.DataFrame({"prompt": ["ab", "a" * 9, "x"], "completion": ["cdef", "é", "y"]}), tmp_path / "a.csv"
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": after}] for after in frame["completion"]]
    frame.assign(chat=[*map(json.dumps, chats)]).to_csv(path, index=False)
    data = module(tmp_path, str(path), completion="completion", batch_size=2)
    chats = module(tmp_path, str(path), messages="chat", batch_size=2)
    torch.manual_seed(0)
    model, tokenizer = RevGPT(vocab=260, context=32, dim=16, depth=2, heads=2).eval(), ByteTokenizer()
    task = CausalLM(model, token_bytes=torch.from_numpy(tokenizer.byte_lengths))
    (found,) = quiet_trainer().validate(task, data.val_dataloader(), verbose=False)
    nats = tokens = size = 0.0
    for prompt, completion in zip(frame["prompt"], frame["completion"], strict=True):
        before, after = [*prompt.encode()], [*completion.encode()]
        ids = torch.tensor([*before, *after, tokenizer.end_id])
        with torch.no_grad():
            nats += F.cross_entropy(model(ids[None, :-1])[0, len(before) - 1 :], ids[len(before) :], reduction="sum").item()
        tokens, size = tokens + len(after) + 1, size + len(after)
    assert found["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["val/bits_per_byte"] == pytest.approx(nats / size / 0.693147, rel=1e-5)
    assert sum(batch["answers"].sum().item() for batch in chats.val_dataloader()) == tokens + 3  # a space before each


@pytest.mark.parametrize(("count", "options"), [(50, {"val_fraction": 0.05}), (12, {})])
def test_of_few_chats_some_are_held_out_all_the_same(tmp_path, count, options):
    texts = [text for text in map(str, range(999)) if held_out_document(f"p{text}", 0.05, 0.02) == "train"]
    rows = [{"prompt": "p", "completion": text} for text in texts[:count]]
    options |= {"val_files": (), "test_files": (), "completion": "completion"}
    with pytest.warns(
        UserWarning, match=rf"data: {count} documents are few for val_fraction .* and test_fraction 0.02; taking 0"
    ) as caught:
        data = module(tmp_path, written(tmp_path, rows), **options)
        data.prepare_data()  # as Lightning does, before a training and a test
    assert len(caught) == 1
    held = [data.counts[part]["documents"] for part in ("train", "val", "test")]
    assert sum(held) == count and min(held) >= 1 and held[0] >= count // 2
    with pytest.raises(UserError, match=r"no text is left for (val|test) \(documents: 2\); raise data.(val|test)_fraction$"):
        module(tmp_path, written(tmp_path, rows[:2], "two.jsonl"), **options)


def test_long_rows_are_cut_with_one_warning(tmp_path):
    rows = [{"prompt": "p" * n, "completion": "c" * 9} for n in (1, 5, 20, 30)]
    with pytest.warns(UserWarning, match="data.context: 9 of 12 rows cut at 12 tokens; 6 left out, since no answer") as caught:
        data = module(tmp_path, written(tmp_path, rows), completion="completion", context=12)
    assert len([each for each in caught if "cut at" in str(each.message)]) == 1
    assert sorted(length for batch in data.train_dataloader() for length in batch["lengths"].tolist()) == [11, 12]
    with pytest.raises(UserError, match=r"data\.context: no answer of the train part begins within 12 tokens"):
        module(tmp_path, written(tmp_path, rows[2:], "long.jsonl"), completion="completion", context=12)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"messages": None}, {"messages": "messages"}, "has no list of messages in 'messages'"),
        ({"messages": CHAT[:1]}, {"messages": "messages"}, "has no message of the role assistant"),
        ({"messages": [{"role": "user"}]}, {"messages": "messages"}, "has no text as role or content in message 1"),
        ({"prompt": "a", "completion": ""}, {"completion": "completion"}, "has nothing in 'completion'"),
        ({"completion": "a"}, {"completion": "completion"}, "has nothing in 'prompt'"),
    ],
)
def test_a_row_without_an_answer_is_refused_by_file_and_row_or_left_out(tmp_path, row, options, message):
    good = {"messages": CHAT, "prompt": "a", "completion": "b"}
    files = written(tmp_path, [good, row, good])
    with pytest.raises(UserError, match=rf"^data: row 2 of \S*chat\.jsonl {message}.*; data\.on_error=skip .*$"):
        module(tmp_path, files, **options)
    with pytest.warns(UserWarning, match=r"left out 1 row of \S*chat\.jsonl"):
        data = module(tmp_path, files, **options, on_error="skip")
    assert data.counts["train"]["documents"] == 2


def test_what_a_template_refuses_is_named(tmp_path, folder):
    path = with_template(folder, INSTRUCT)
    files = written(tmp_path, [{"messages": CHAT}, {"messages": [{"role": "system", "content": "short"}, *CHAT]}])
    with pytest.raises(UserError, match=r"row 2 of \S*chat\.jsonl cannot be written with the .* chat template: no such"):
        module(tmp_path, files, messages="messages", tokenizer=path)
    for template, said_so in ((CHATML, "does not write the tool_calls of message 2"), (ENDLESS, "2 is not found in one piece")):
        path, files = with_template(folder, template), written(tmp_path, [{"messages": TOOLS}], "tools.jsonl")
        with pytest.raises(UserError, match=rf"row 1 of \S*tools\.jsonl .*{said_so}"):
            module(tmp_path, files, tokenizer=path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the chat template in"):
        tokenizer_named(path)

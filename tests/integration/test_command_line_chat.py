"""Chats on the command line: fine-tuned with a model's template, or plainly with one of holotrain's, killed and resumed."""

import json
from pathlib import Path

import pytest
import torch
from left_by_runs import assert_same_weights, summary
from small_run import fit_and_kill

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [
    *("task=causal_lm", "data=text_files", "data.files=chat.jsonl", "data.messages=messages", "data.context=64"),
    *("data.val_fraction=0.1", "data.test_fraction=0.1", "data.cache_dir=tokens", "data.batch_size=16"),
    *("trainer.accelerator=cpu", "trainer.max_steps=-1", "trainer.max_epochs=2", "trainer.val_check_interval=null"),
    *("optimizer=adamw", "optimizer.lr=1e-2", "callbacks.checkpoint.every_n_train_steps=2"),
    *("test=false", "logger=none", "callbacks.progress=null", "model=huggingface", "model.name=tiny"),
]


def write_chats(folder: Path) -> None:
    """Two hundred chats of one question, and a tiny model with a chat template, as transformers save it."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    asked = [f"what is {n % 10} + {n // 20}?" for n in range(200)]
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": f"it is {n % 10 + n // 20}"}]
        for n, text in enumerate(asked)
    ]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    encoder = ByteLevelBPETokenizer()
    encoder.train_from_iterator(asked, 280, min_frequency=0, show_progress=False, special_tokens=["<|im_start|>", "<|im_end|>"])
    options = {"tokenizer_object": encoder._tokenizer, "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    tokenizer = transformers.PreTrainedTokenizerFast(**options)
    tokenizer.save_pretrained(folder / "tiny")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "tiny")


@pytest.mark.slow
def test_chats_are_learned_and_a_killed_training_continues_bit_for_bit(holotrain, tmp_path):
    import transformers

    write_chats(tmp_path)
    assert holotrain("fit", *CHATS, "hydra.run.dir=run")[0] == 0
    assert summary(Path("run"))["metrics"]["val/perplexity"] < 20  # of 280 before
    fit_and_kill(tmp_path, *CHATS, "hydra.run.dir=killed")
    holotrain("fit", "resume=true", "hydra.run.dir=killed")
    assert_same_weights(Path("killed/checkpoints/last.ckpt"), Path("run/checkpoints/last.ckpt"))
    holotrain.done("export", "ckpt_path=run/checkpoints/last.ckpt", "to=exported")
    asked = {"messages": [{"role": "user", "content": "what is 3 + 2?"}]}
    Path("asked.jsonl").write_text(json.dumps(asked) + '\n{"prompt": "what is 3 + 2?"}\n')
    words = ["ckpt_path=run/checkpoints/last.ckpt", "temperature=0", "max_tokens=20"]
    holotrain("generate", *words, "prompts=asked.jsonl", "hydra.run.dir=of_generate")
    chat, prompt = (json.loads(line) for line in Path("of_generate/generations.jsonl").read_text().splitlines())
    assert chat["text"] == prompt["text"] and chat["messages"] == asked["messages"]
    assert chat["text"].strip().startswith("it is ")
    holotrain("generate", *words, "chat=false", "prompt=what is 3", "hydra.run.dir=of_text")
    plain = json.loads(Path("of_text/generations.jsonl").read_text())
    assert plain["prompt"] == "what is 3" and plain["text"] != prompt["text"]
    exported = transformers.AutoTokenizer.from_pretrained("exported")
    assert exported.chat_template == TEMPLATE and exported.eos_token == exported.pad_token == "<|im_end|>"
    ids = exported.apply_chat_template(asked["messages"], add_generation_prompt=True, return_tensors="pt")
    answered = transformers.AutoModelForCausalLM.from_pretrained("exported").generate(**ids, do_sample=False)
    assert exported.decode(answered[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == chat["text"]


def test_a_form_that_is_found_is_shown_and_generate_answers_in_it(holotrain, tmp_path):
    rows = [{"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "yes"}]} for n in range(20)]
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [word for word in CHATS if not word.startswith(("data.messages", "model", "trainer.max"))]
    small = ["model.dim=16", "model.depth=2", "model.heads=2", "trainer.max_steps=1", "data.show=1", "data.tokenizer=byte"]
    shown = holotrain("fit", *words, *small, "hydra.run.dir=run")[1]
    assert "ShareGPT: conversations" in shown and "?\nassistant:[[ yes</s>]]\n" in shown
    said = holotrain("generate", "ckpt_path=run", "prompt=3?", "max_tokens=2", "hydra.run.dir=of_generate")[1]
    assert said.startswith("3?\n")  # a message, and not a text to continue

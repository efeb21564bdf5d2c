"""Small models of timm and transformers, and finished trainings of them."""

import json
from pathlib import Path

import torch
from covering import slow
from made_once import made_once
from small_run import fit_in

SHORT = [
    *("trainer.accelerator=cpu", "trainer.max_steps=3", "trainer.max_epochs=-1", "trainer.val_check_interval=null"),
    *("trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "logger=none", "callbacks.progress=null"),
    *("optimizer=adamw", "trainer.log_every_n_steps=1"),
]
TEXT = ["data=text_files", "data.files=texts/**/*.txt", "data.context=16", "data.batch_size=4", "data.cache_dir=tokens"]
DOCUMENTS = [*TEXT, "data.max_tokens=64"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
NETWORKS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 260, "n_positions": 32, "eos_token_id": 258},
    "llama": {**SMALL, "vocab_size": 264, "max_position_embeddings": 32, "num_key_value_heads": 1},
    "bert": {**SMALL, "vocab_size": 260, "max_position_embeddings": 32},
    "vit": {**SMALL, "image_size": 32, "patch_size": 4},
}
TINY = [
    *("model=timm", "model.name=vit_tiny_patch16_224"),
    "model.arguments={depth: 2, embed_dim: 32, num_heads: 2, patch_size: 4}",
]


KINDS = [
    ("gpt2", "causal_lm"),
    slow("bert", "masked_lm"),
    slow("llama", "sequence_classification"),
    slow("timm", "image_classification"),
]
"""A model for each task."""


def write_network(folder: Path, kind: str, **changed) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **NETWORKS[kind], **changed}))


def write_tokenizer(folder: Path) -> None:
    """One of bytes, with 258 tokens, for chats too, as AutoTokenizer reads it."""
    import tokenizers
    import transformers

    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *split.alphabet()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, tokenizers.decoders.ByteLevel()
    chat = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": chat}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_texts(folder: Path) -> None:
    for label, word in (("fruit", "apple"), ("metal", "iron")):
        (folder / "texts" / label).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            (folder / "texts" / label / f"{number}.txt").write_text(f"{word} {number}\n\n{word} {word} {number}\n")


def words_of(kind: str, task: str) -> list[str]:
    if kind == "timm":
        return TINY
    of_data = {"causal_lm": TEXT, "masked_lm": DOCUMENTS, "image_classification": []}
    labels = [*DOCUMENTS, "data.label=folder", "data.unit=paragraph"]
    return [f"task={task}", "model=huggingface", "model.name=network", *of_data.get(task, labels)]


def trained_once(tmp_path_factory, kind: str, task: str) -> Path:
    """The folder of a finished training. The folder of the network that it began with is gone."""

    def train(folder: Path) -> None:
        write_texts(folder)
        if kind != "timm":
            write_network(folder / "network", kind)
        fit_in(folder, *SHORT, *words_of(kind, task), "hydra.run.dir=run")
        if kind != "timm":
            (folder / "network").rename(folder / "gone")

    return made_once(tmp_path_factory, f"foreign_{kind}_{task}", train) / "run"


def example(task: str) -> torch.Tensor:
    if task == "image_classification":
        return torch.randn(2, 1, 8, 8)
    return torch.arange(20).view(2, 10) + 97

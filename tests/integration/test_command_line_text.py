"""Language on the command line: train, generate, export, predict, resume, fine-tune, and every mistake in a line."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from covering import slow
from left_by_runs import only, rows, scalars, summary
from made_once import made_once
from shown_runs import Logged
from small_run import fit_in

import holotrain as package
from holotrain.data.tokenizers import tokenizer_from_json
from holotrain.errors import readable
from holotrain.models.quantised import bits_of

TEXTS = [
    *("data=text_files", "data.files=texts/**/*.txt", "data.context=24", "data.batch_size=4", "data.cache_dir=tokens"),
    *("model.dim=16", "model.depth=2", "model.heads=2", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1"),
]
SHORT = [*TEXTS, "trainer.max_steps=4", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
QUICK = [*SHORT, "test=false", "logger=none", "callbacks.progress=null"]
TASKS = {
    "causal_lm": [],
    "masked_lm": ["data.max_tokens=120"],
    "sequence_classification": ["data.label=folder", "data.unit=paragraph", "data.max_tokens=120"],
}


TRAINED = {
    "causal_lm": ["task=causal_lm"],
    "causal_lm, bpe": ["task=causal_lm", "data.tokenizer=bpe", "data.vocab_size=280", "data.context=64"],

    "sequence_classification": [
        "task=sequence_classification", *TASKS["sequence_classification"], "trainer.max_steps=150", "optimizer.lr=1e-2",
        "model.dropout=0",
    ],
}  # fmt: skip


def write_texts(folder: Path) -> None:
    """Forty small files in two folders, each of its own vocabulary."""
    draw = random.Random(0)
    named = {"fruit": ["apple", "pear", "plum", "fig", "lime"], "metal": ["iron", "zinc", "tin", "lead", "gold"]}
    for label, words in named.items():
        (folder / "texts" / label).mkdir(parents=True)
        for number in range(20):
            lines = [" ".join(draw.choices(words, k=draw.randint(1, 5))) for _ in range(6)]
            (folder / "texts" / label / f"{number}.txt").write_text("\n\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def texts(tmp_path):
    write_texts(tmp_path)


@pytest.fixture
def trained(tmp_path_factory):
    """The last checkpoint of one of TRAINED, which every test reads and none changes."""

    def run(name: str) -> Path:
        def train(folder: Path) -> None:
            write_texts(folder)
            fit_in(folder, *QUICK, *TRAINED[name], "hydra.run.dir=run")

        return made_once(tmp_path_factory, name.replace(", ", "_"), train) / "run/checkpoints/last.ckpt"

    return run


@pytest.mark.parametrize(
    ("task", "scalars_expected"),
    [
        ("causal_lm", {"val/bits_per_byte", "val/perplexity", "test/bits_per_byte"}),
        slow("masked_lm", {"val/loss", "val/perplexity"}),
        slow("sequence_classification", {"val/accuracy"}),
    ],
)
def test_each_task_runs_and_leaves_what_it_should(holotrain, task, scalars_expected):
    out = holotrain.done("fit", f"task={task}", *SHORT, *TASKS[task])
    folder = only(Path("runs/fit"))
    left, seen = summary(folder), scalars(folder)
    assert left["steps"] == 4 and left["tokens_per_second"] > 0 and "tokens_per_second" in out and task in out
    assert scalars_expected | {"throughput/tokens_per_second", "train/loss"} <= set(seen)
    assert Path(left["checkpoint"]).name.startswith("best-")
    assert "auto (muon), lr" in out
    assert ("val/confusion_matrix" in Logged(folder).tags["images"]) == (task == "sequence_classification")


def generations(folder: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "generations.jsonl").read_text().splitlines()]


def test_generation_continues_a_prompt_as_it_is_the_same_way_for_a_seed(holotrain, trained):
    prompt, texts = "caf\u00e9 ${HOME} \\${x} 'q' \"r\" [1, 2] {3}; #!", []
    common = [f"ckpt_path={trained('causal_lm, bpe')}", f"prompt={prompt}", "max_tokens=12"]
    for number, extra in enumerate((["seed=1"], ["seed=1", "stream=false"], ["seed=2"])):
        status, out, err = holotrain("generate", *common, *extra, f"hydra.run.dir=out{number}")
        assert status == 0, err
        (made,) = generations(f"out{number}")
        assert made["prompt"] == prompt and out.startswith(readable(prompt + made["text"]))
        left = summary(Path(f"out{number}"))
        assert left["metrics"]["tokens"] <= 12 and left["tokens_per_second"] > 0
        texts.append(made["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("quantised", "bits"), [slow("null", None), ("4bit", 4)])
def test_an_export_is_all_that_is_needed(holotrain, trained, quantised, bits):
    """A trained tokenizer travels along; data and checkpoint are gone."""
    checkpoint = Path(shutil.copy(trained("causal_lm, bpe"), "gone.ckpt"))
    ask = ["prompt=fig lime", "max_tokens=8", "temperature=0"]
    holotrain("generate", f"ckpt_path={checkpoint}", *ask, f"quantised={quantised}", "hydra.run.dir=before")
    status, out, _ = holotrain("export", f"ckpt_path={checkpoint}", "to=exported", f"quantised={quantised}")
    assert status == 0 and ("of the fp32 size" in out) == (bits is not None)
    checkpoint.unlink(), shutil.rmtree("texts"), shutil.rmtree("tokens", ignore_errors=True)
    assert holotrain("generate", "ckpt_path=exported", *ask, "hydra.run.dir=after")[0] == 0
    assert generations("before") == generations("after")
    model = package.load("exported")
    assert bits_of(model) == bits and type(model).__name__ == "RevGPT"
    assert tokenizer_from_json(Path("exported/tokenizer.json").read_text()).vocab_size == 280


@pytest.mark.slow
def test_texts_are_scored_and_classified(holotrain, trained):
    checkpoint = trained("causal_lm")
    Path("texts/metal").rename("metal")  # predictions need no data
    for quantised, tolerance in (("null", 1e-4), ("8bit", 2e-2)):
        words = ["texts=texts/fruit", f"quantised={quantised}", f"hydra.run.dir=scores_{quantised}"]
        status, _, err = holotrain("predict", f"ckpt_path={checkpoint}", *words)
        assert status == 0, err
        found = rows(Path(f"scores_{quantised}/predictions.csv"))
        assert [row["text"] for row in found] == sorted(f"texts/fruit/{number}.txt" for number in range(20))
        assert all(int(row["bytes"]) == Path(row["text"]).stat().st_size for row in found)
        expected = bits_per_byte(checkpoint, Path(found[0]["text"]))
        assert float(found[0]["bits_per_byte"]) == pytest.approx(expected, rel=tolerance)
    Path("metal").rename("texts/metal")
    checkpoint = trained("sequence_classification")
    for name, words in (("classes", ["texts=texts"]), ("test_part", [])):
        status, _, err = holotrain("predict", f"ckpt_path={checkpoint}", *words, f"hydra.run.dir={name}")
        assert status == 0, err
    found = rows(Path("classes/predictions.csv"))  # by paragraphs, as it learned
    assert found[0]["text"] == "texts/fruit/0.txt:1" and len(found) == 240
    assert sum(row["class"] == Path(row["text"]).parent.name for row in found) >= 216
    assert len(rows(Path("test_part/predictions.csv"))) >= 2


def bits_per_byte(checkpoint, path):
    """Of a text read in blocks of the model's context, each without what came before it, an end token first."""
    from holotrain.commands.prepare import described_model

    model, described = described_model(checkpoint)
    tokenizer = tokenizer_from_json(described["tokenizer"])
    ids = torch.tensor([tokenizer.end_id, *tokenizer.encode(path.read_text()).tolist(), tokenizer.end_id])
    nats = 0.0
    for start in range(0, len(ids) - 1, 24):
        block = ids[start : start + 25]
        with torch.no_grad():
            logits = model.eval()(block[None, :-1])[0]
        nats += torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum").item()
    return nats / math.log(2) / path.stat().st_size


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["generate"], 'prompt="..." or prompts=FILE'),
        (["generate", "prompts=number.jsonl"], "number.jsonl:1 is not a JSON object with a text named prompt"),
        slow(["generate", "prompt=" + "a" * 24], "it is 24 tokens long; it must be shorter than the model's context of 24"),
        slow(["fit", "data.tokenizer=bpe"], "tokenizer"),
    ],
)
def test_mistakes_about_a_checkpoint_are_answered_in_a_line(holotrain, trained, words, expected):
    Path("number.jsonl").write_text('{"prompt": 5}\n')
    assert expected in holotrain.refused(words[0], f"ckpt_path={trained('causal_lm')}", *words[1:])

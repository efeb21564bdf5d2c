"""Samples: what is continued, and that the training stays the same."""

import pytest
import torch
from memo import Memo
from shown_runs import Logged, adamw, assert_trains_as_without, fit

from holotrain.callbacks import Samples
from holotrain.callbacks.drawing import markdown
from holotrain.data import TextFiles
from holotrain.models import GPT, generate
from holotrain.models.generation import Sampling
from holotrain.tasks import CausalLM


@pytest.fixture
def text(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"Document {index} says that {index} and {index} are {2 * index}.\n" * 3)
    sizes = {"context": 32, "batch_size": 8, "val_fraction": 0.2, "test_fraction": 0.1}
    return TextFiles(str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache"), **sizes)


def gpt(data, dropout=0.3):
    torch.manual_seed(0)
    data.prepare_data()
    model = GPT(vocab=data.vocab_size, context=32, dim=16, depth=1, heads=2, dropout=dropout)
    return CausalLM(model, torch.from_numpy(data.tokenizer.byte_lengths), optimizer=adamw)


def test_prompts_are_beginnings_of_documents_and_texts_what_the_model_writes(text, tmp_path):
    task = gpt(text)
    fit(task, text, [Samples(count=3, tokens=16, seed=5)], tmp_path)
    logged = Logged(tmp_path).texts("val/samples")
    assert [step for step, _ in logged] == [4, 8]  # not at the sanity check
    corpus, tokenizer = text.part("val"), text.tokenizer
    documents = [corpus.tokens[first : last - 1] for first, last in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]
    chosen = [documents[place * len(documents) // 3] for place in range(3)]
    starts = [torch.from_numpy(document[:8].astype("int64")) for document in chosen]  # half of tokens, a quarter of context
    generator = torch.Generator().manual_seed(5)
    rows = torch.stack([*generate(task.model.eval(), starts, 16, Sampling(), tokenizer.end_id, generator)], 1).tolist()
    ended = [row[: row.index(tokenizer.end_id)] if tokenizer.end_id in row else row for row in rows]
    pairs = [(tokenizer.decode(start.tolist()), tokenizer.decode(row)) for start, row in zip(starts, ended, strict=True)]
    assert pairs[0][0] == "Document" and logged[-1][1] == markdown(["prompt", "continuation"], pairs)


def test_a_training_is_the_same_with_and_without(text, tmp_path):
    assert_trains_as_without([Samples(tokens=8)], tmp_path, lambda: (gpt(text), text), precision="bf16-mixed")


class Tables(Memo):
    """A logger with Lightning's ``log_text``, as WandbLogger."""

    def log_text(self, key, columns=None, data=None, dataframe=None, step=None):
        self.rows.append((step, {key: (columns, data)}))


def test_a_diverged_model_does_not_end_the_training(text):
    task, logger = gpt(text), Tables()
    with torch.no_grad():
        task.model.norm.weight.fill_(float("nan"))
    fit(task, text, [Samples(tokens=4)], logger=logger)
    (_, (_, rows)), _ = logger.of("val/samples")
    assert "diverged" in rows[0][1]


def test_mistakes_are_told_before_the_training(text):
    for options in ({"prompts": "one text"}, {"prompts": []}, {"count": 0}, {"tokens": 0}, {"temperature": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Samples(**options)
    with pytest.raises(ValueError, match="fills the model's context of 32 tokens"):
        fit(gpt(text), text, [Samples(["x" * 32])])

"""Documents in batches of about one length: each once an epoch, little padding, the same wherever it is resumed."""

import json

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from small_trainings import quiet_trainer
from torch.utils.data import DataLoader

from holotrain.data import BucketBatchSampler, TextFiles, padded_batch
from holotrain.data.text.sources import text_files
from holotrain.data.tokenizers import ByteTokenizer
from holotrain.errors import UserError

LENGTHS = np.random.default_rng(0).geometric(0.01, 3001).clip(3, 512)
BUDGETS = [{"batch_size": 16}, {"max_tokens": 2048}, {"max_tokens": 512}, {"batch_size": 16, "bucketing": False}]


def sampler(epoch=0, lengths=LENGTHS, **options) -> BucketBatchSampler:
    made = BucketBatchSampler(lengths, **options)
    made.set_epoch(epoch)
    return made


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_document_comes_once_and_ranks_have_as_many_batches(budget, ranks):
    counts = set()
    for epoch in (0, 1):
        shares = [sampler(epoch, **budget, shard=(rank, ranks)) for rank in range(ranks)]
        batches = [list(share) for share in shares]
        counts |= {len(share) for share in shares} | {len(drawn) for drawn in batches}
        drawn = [index for share in batches for batch in share for index in batch]
        assert sorted(drawn) == list(range(len(LENGTHS)))  # so ranks are disjoint
        for batch in (batch for share in batches for batch in share):
            assert len(batch) <= budget.get("batch_size", 10**9)
            assert LENGTHS[batch].max() * len(batch) <= budget.get("max_tokens", 10**9)
    assert len(counts) == 1  # equal on ranks, and from epoch to epoch


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {(seed, epoch): list(sampler(epoch, seed=seed, batch_size=16)) for seed in (0, 1) for epoch in (0, 1)}
    assert len({str(order) for order in orders.values()}) == 4
    torch.manual_seed(5)
    assert orders[1, 1] == list(sampler(1, seed=1, batch_size=16))
    together = [{frozenset(batch) for batch in order} for order in orders.values()]
    assert len(together[0] & together[1]) < 0.1 * len(together[0])  # other company, not another order of the same batches
    widths = [LENGTHS[batch].max() for batch in orders[0, 0]]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.2


def test_batches_of_similar_length_hold_little_padding_and_processes_take_neighbours():
    shares = []
    for bucketing in (True, False):
        held = sum(LENGTHS[batch].max() * len(batch) for batch in sampler(max_tokens=2048, bucketing=bucketing))
        shares.append(1 - LENGTHS.sum() / held)
    assert shares[0] < 0.08 < 2 * shares[0] < shares[1]
    of_two = [list(sampler(max_tokens=2048, shard=(rank, 2))) for rank in (0, 1)]
    widths = np.array([[LENGTHS[batch].max() for batch in share] for share in of_two])
    assert np.abs(widths[0] - widths[1]).mean() < 0.1 * widths.mean() < np.abs(widths[0] - np.roll(widths[1], 1)).mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sixty lines of three classes, of 1 to 60 letters; the class is the letter."""
    folder = tmp_path_factory.mktemp("documents")
    rows = [json.dumps({"text": "xyz"[n % 3] * n, "kind": "xyz"[n % 3]}) for n in range(1, 61)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    (folder / "h.jsonl").write_text("\n".join(rows[::5]))
    return folder


def documents(folder, **options) -> TextFiles:
    held = {"val_files": str(folder / "h.jsonl"), "test_fraction": 0.2, "max_tokens": None}
    chosen = {"layout": "documents", "context": 32, "batch_size": 4, "cache_dir": str(folder / "cache")} | held | options
    data = TextFiles(str(folder / "a.jsonl"), **chosen)
    data.setup()
    return data


def rows_of(loader) -> list[list[int]]:
    return [row[:length].tolist() for b in loader for row, length in zip(b["tokens"], b["lengths"], strict=True)]


def test_long_documents_are_cut_into_pieces_that_hold_all_of_them(folder):
    data = documents(folder)
    t, text = data.tokenizer, data.part("train")
    rows = rows_of(data.train_dataloader())
    assert all(row[0] == t.start_id and row[-1] == t.end_id and len(row) <= 32 for row in rows)
    held = sorted(letter for row in rows for letter in row[1:-1])
    assert held == sorted([token for token in text.tokens[:].tolist() if token < 256])
    lengths = np.diff(text.offsets) - 1
    assert len(rows) == sum(-(-length // 30) for length in lengths)
    assert not any("labels" in batch for batch in data.train_dataloader())


def test_classified_documents_are_cut_short_and_labelled(folder):
    data = documents(folder, label="kind")
    assert data.class_names == ["x", "y", "z"]
    loader = data.train_dataloader()
    seen = 0
    for batch in loader:
        assert batch["tokens"].shape[1] == batch["lengths"].max() and batch["labels"].dtype == torch.int64
        for row, length, label in zip(batch["tokens"], batch["lengths"], batch["labels"], strict=True):
            letters = data.tokenizer.decode(row)
            assert len(letters) == length - 2 and set(letters) == {"xyz"[label]}
            assert torch.all(row[length:] == data.tokenizer.pad_id)
            seen += 1
    assert seen == data.counts["train"]["documents"]
    val = torch.cat([batch["lengths"] for batch in data.val_dataloader()])
    assert sorted(val.tolist()) == sorted(min(n, 30) + 2 for n in range(1, 61, 5))
    place = torch.cat([batch["index"] for batch in data.predict_dataloader()])
    assert sorted(place.tolist()) == list(range(data.counts["test"]["documents"]))


class Reads(pl.LightningModule):
    def predict_step(self, batch, _):
        return batch

    def validation_step(self, batch, _):
        self.log("size", float(len(batch["tokens"])))


def test_loose_files_keep_order_and_name_under_lightning(tmp_path):
    rows = "\n".join(json.dumps({"text": text}) for text in ("z", " ", None, "zz"))
    for name, text in (("b.txt", "y" * 50), ("a.txt", "x"), ("c.jsonl", rows)):
        (tmp_path / name).write_text(text)
    with pytest.warns(UserWarning, match=r"left out 2 rows without text: \S*c\.jsonl:2, \S*c\.jsonl:3"):
        loader = text_files(tmp_path, ByteTokenizer(), 32, packed=False, batch_size=2)
    batches = quiet_trainer().predict(Reads(), loader)
    names = [name for batch in batches for name in batch["names"]]
    assert names == [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl:1", "c.jsonl:4")]
    assert [len(row) - 2 for row in rows_of(batches)] == [1, 30, 1, 2]
    with pytest.warns(UserWarning, match="left out 2 rows"):
        alone = text_files(tmp_path / "c.jsonl", ByteTokenizer(), 32, packed=False, batch_size=4)
    assert next(iter(alone))["names"] == names[2:] and len([*tmp_path.rglob("*")]) == 3  # nothing is written beside them


def test_token_lists_of_ones_own_in_a_plain_loader():
    samples = [{"input_ids": [token + 1] * length, "labels": [token] * length} for token, length in enumerate(LENGTHS[:200])]
    made = BucketBatchSampler(LENGTHS[:200].tolist(), max_tokens=2048)
    found = list(DataLoader(samples, batch_sampler=made, collate_fn=padded_batch))
    assert len(found) == len(made)
    drawn = []
    for batch in found:
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        assert tokens.shape == mask.shape == (len(tokens), batch["lengths"].max()) and tokens.numel() <= 2048
        assert torch.equal(mask.sum(1), batch["lengths"]) and torch.equal(mask, (tokens > 0).long())
        assert torch.equal(batch["labels"], torch.where(mask > 0, tokens - 1, -100))
        drawn += (tokens[:, 0] - 1).tolist()
    assert sorted(drawn) == list(range(200))
    rows = [{"input_ids": np.array([5, 6, 7]), "labels": 1}, {"input_ids": torch.tensor([8]), "labels": 0}]
    batch = padded_batch(rows, pad_id=9, multiple=4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]] and batch["labels"].tolist() == [1, 0]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: BucketBatchSampler([3, 4], batch_size=0), "batch_size must be at least 1, not 0"),
        (lambda: sampler(max_tokens=9), f"max_tokens: 9 is out of range; the longest document has {LENGTHS.max()}"),
        (lambda: BucketBatchSampler([3, -4]), "lengths must be a list of whole numbers of at least 0"),
        (lambda: BucketBatchSampler([3, 4.5]), "lengths must be a list of whole numbers of at least 0"),
        (lambda: padded_batch([{"input_ids": [1, 2], "labels": [1]}]), "labels: there must be one for each token"),
        (lambda: padded_batch([{"input_ids": [1], "labels": 1}, {"input_ids": [1], "labels": [1]}]), "there must be one"),
        (lambda: padded_batch([{"input_ids": [1], "labels": [[1]]}]), "labels: there must be one"),
    ],
)
def test_what_cannot_be_batched_is_named(made, message):
    with pytest.raises((ValueError, UserError), match=message):
        made()

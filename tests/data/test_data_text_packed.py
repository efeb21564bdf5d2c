"""Packed blocks: all of the text, cut elsewhere every epoch, taken up exactly where it was left."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from holotrain.data import TextFiles
from holotrain.errors import UserError

CONTEXT = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text whose every line says which it is."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "a.txt").write_text("".join(f"{number:05d}\n" for number in range(1000)))
    return folder


def packed(folder, **options) -> TextFiles:
    chosen = {"unit": "line", "context": CONTEXT, "batch_size": 8, "val_fraction": 0.1, "test_fraction": 0.1} | options
    data = TextFiles(str(folder / "*.txt"), cache_dir=str(folder / "cache"), **chosen)
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("context", [1, 16, 31, 700])
def test_evaluation_goes_through_every_token_once(folder, context):
    data = packed(folder, context=context, batch_size=3)
    for part, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader()), ("test", data.predict_dataloader())):
        batches = [batch["tokens"] for batch in loader]
        assert len(batches) == len(loader)
        tokens = data.part(part).tokens[:].astype(np.int64)
        assert torch.cat([tokens[:, 1:].flatten() for tokens in batches]).tolist() == tokens[1:].tolist()
        assert torch.cat([tokens[:, :-1].flatten() for tokens in batches]).tolist() == tokens[:-1].tolist()
        assert all(batch.dtype == torch.int64 and batch.shape[1] == context + 1 for batch in batches[:-1])
        assert len(batches[-1]) == 1 or batches[-1].shape[1] == context + 1


def test_training_covers_the_text_in_blocks_that_overlap_by_one(folder):
    data = packed(folder, batch_size=1)
    tokens = data.part("train").tokens[:].astype(np.int64)
    loader = data.train_dataloader()
    windows = np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)
    places = {window.tobytes(): start for start, window in enumerate(windows)}  # no two lines are equal
    offsets = set()
    for epoch in range(60):
        loader.batch_sampler.set_epoch(epoch)
        blocks = [batch["tokens"][0].numpy() for batch in loader]
        starts = sorted(places[block.tobytes()] for block in blocks)
        assert all(after - before == CONTEXT for before, after in pairwise(starts))
        rest = len(tokens) - 1 - (starts[-1] + CONTEXT)
        assert starts[0] + rest < 2 * CONTEXT
        offsets.add((starts[0], rest))
    assert len(offsets) > 5 and min(offsets)[0] == 0 and min(rest for _, rest in offsets) == 0  # no end always waits


def test_a_part_that_is_shorter_than_a_block_is_refused(folder):
    size = packed(folder).counts["train"]["tokens"]
    whole = packed(folder, context=size - 1)
    assert [batch["tokens"].shape for batch in whole.train_dataloader()] == [(1, size)]
    with pytest.raises(UserError, match=f"data.context: {size} is out of range; the train part has {size} tokens: {size - 1}"):
        packed(folder, context=size).train_dataloader()

"""Tasks of language: what is masked, what is counted, what is reported."""

import math

import pytest
import torch
from small_trainings import Memo, quiet_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from holotrain.models import RevGPT, RevRoBERTa
from holotrain.tasks import CausalLM, MaskedLM
from holotrain.tasks.language import masked

SMALL = {"vocab": 20, "context": 8, "dim": 16, "depth": 2, "heads": 2}
BYTES = torch.tensor([1] * 10 + [2] * 6 + [0] * 4)
"""Of tokens 0 to 19: ten of one byte, six of two, four special."""


def trainer(**options):
    return quiet_trainer(logger=Memo(), devices=1, **options)


def loader(batches):
    return DataLoader(batches, batch_size=None)


def test_eight_of_ten_chosen_words_are_masked_one_is_random_one_stays():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (400, 500), generator=generator)
    candidates = torch.rand(400, 500, generator=generator) < 0.9
    shown, targets = masked(tokens, candidates, 2000, torch.arange(1000), 0.15, generator)
    chosen = targets != -100
    torch.testing.assert_close(targets[chosen], tokens[chosen])
    torch.testing.assert_close(shown[~chosen], tokens[~chosen])
    assert not (chosen & ~candidates).any()
    assert chosen.sum().item() == pytest.approx(0.15 * candidates.sum().item(), rel=0.02)
    ways = shown[chosen]
    assert (ways == 2000).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (ways == targets[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.01)
    random = ways[(ways != 2000) & (ways != targets[chosen])]
    assert random.min() < 10 and random.max() > 990 and len(random.unique()) > 900


def test_neither_padding_nor_special_tokens_are_masked():
    with pytest.raises(ValueError, match=r"mask_probability must be in \[0.001, 1\), not 0.0"):
        MaskedLM(RevRoBERTa(**SMALL), token_bytes=BYTES, mask_id=19, mask_probability=0.0)
    task = MaskedLM(RevRoBERTa(**SMALL), token_bytes=BYTES, mask_id=19, mask_probability=0.999)
    tokens = torch.tensor([[16, 3, 4, 17, 18, 18], [16, 5, 6, 7, 8, 17]])
    shown, real, targets = task.inputs({"tokens": tokens, "lengths": torch.tensor([4, 6])})
    assert real.tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert (targets != -100).tolist() == [[False, True, True, False, False, False], [False, True, True, True, True, False]]
    assert shown[targets == -100].tolist() == tokens[targets == -100].tolist()


def test_bits_per_byte_count_bytes_and_perplexity_counts_tokens():
    """Against a loop over blocks of unlike lengths, the last one shorter, one of them padded."""
    torch.manual_seed(0)
    model = RevGPT(**SMALL)
    task = CausalLM(model, token_bytes=BYTES)
    batches = [
        {"tokens": torch.randint(20, (3, 9))},
        {"tokens": torch.randint(20, (1, 4))},
        {"tokens": torch.tensor([[3, 17]])},  # no byte to foretell
        {"tokens": torch.randint(20, (2, 9)), "lengths": torch.tensor([9, 3])},
    ]
    nats = tokens = size = 0.0
    for batch in batches:
        for row, length in zip(batch["tokens"], batch.get("lengths", [batch["tokens"].shape[1]] * 3), strict=False):
            targets = row[1:length]
            with torch.no_grad():
                nats += F.cross_entropy(model.eval()(row[None, : length - 1])[0], targets, reduction="sum").item()
            tokens += len(targets)
            size += BYTES[targets].sum().item()
    (found,) = trainer().validate(task, loader(batches), verbose=False)
    assert found["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    (unknown,) = trainer().validate(CausalLM(model), loader(batches), verbose=False)  # data of others tell no bytes
    assert unknown == {name: value for name, value in found.items() if name != "val/bits_per_byte"}
    (again,) = trainer().test(task, loader(batches), verbose=False)  # sums start anew
    assert again["test/bits_per_byte"] == pytest.approx(found["val/bits_per_byte"])
    scores = [task.predict_step(batch, 0) for batch in batches]
    assert sum(score["bits"].sum().item() for score in scores) == pytest.approx(nats / math.log(2), rel=1e-5)
    assert sum(score["bytes"].sum().item() for score in scores) == size


def test_masked_loss_is_a_mean_over_masked_words():
    torch.manual_seed(0)
    task = MaskedLM(RevRoBERTa(**SMALL), token_bytes=BYTES, mask_id=19, mask_probability=0.5)
    batches = [{"tokens": torch.randint(16, (size, 8)), "lengths": torch.full((size,), 8)} for size in (1, 6)]
    (found,) = trainer().validate(task, loader(batches), verbose=False)
    nats = count = 0.0
    for index, batch in enumerate(batches):
        shown, real, targets = task.inputs(batch, torch.Generator().manual_seed(index))
        with torch.no_grad():
            logits = task.model.eval()(shown, real)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += (targets != -100).sum().item()
    assert found["val/loss"] == pytest.approx(nats / count, rel=1e-5)

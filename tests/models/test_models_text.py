"""GPT and RoBERTa: losses, padding, positions and caches."""

import pytest
import torch
from small_models import TEXT, text_batch
from torch.nn import functional as F

from holotrain.models import GPT, RevGPT, RevRoBERTa, RoBERTa, roberta
from holotrain.models.layers import packing

SMALL = TEXT | {"vocab": 50, "depth": 3}


@pytest.mark.parametrize(("model_class", "inputs"), [(GPT, 1), (RoBERTa, 2), (RevGPT, 1), (RevRoBERTa, 2)])
def test_the_loss_is_that_of_the_logits(model_class, inputs):
    tokens, mask, targets = text_batch()
    model = model_class(**SMALL).eval()
    given = (tokens, mask)[:inputs]
    logits = model(*given)
    loss = model(*given, targets=targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_padding_changes_nothing():
    model = RevRoBERTa(**SMALL).eval()
    tokens, mask, _ = text_batch()
    padded = model(tokens, mask)
    for row, length in enumerate(mask.sum(1)):
        torch.testing.assert_close(padded[row : row + 1, :length], model(tokens[row : row + 1, :length]))
    other = model(tokens.where(mask, 7), mask)
    torch.testing.assert_close(other[mask], padded[mask])
    assert not torch.allclose(model(tokens)[mask], padded[mask])  # the mask does something


def spied(monkeypatch):
    """The keyword arguments of attention, as batches with a mask get them."""
    contexts, make = [], packing.padding_context
    monkeypatch.setattr(roberta, "padding_context", lambda *given: contexts.append(make(*given)) or contexts[-1])
    return contexts


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (RoBERTa, {}),
        (RoBERTa, {"backward": "checkpoint"}),
        (RevRoBERTa, {"classes": 5}),
        (RevRoBERTa, {"keep": "attention"}),
        (RevRoBERTa, {"exact": True, "store": 1}),
    ],
)
def test_packed_sequences_are_the_masked_ones(model_class, options, monkeypatch):
    """In float64: equal lengths, a row of padding and, but for classes, padding between tokens."""
    tokens, mask, targets = text_batch()
    tokens, mask, targets = (torch.cat([part, part.roll(1, 0)]) for part in (tokens, mask, targets))
    if "classes" in options:
        targets = torch.arange(8) % 5
    else:
        mask[:, 4], mask[0] = False, False
        targets[~mask] = -100
    found, contexts = [], spied(monkeypatch)
    for least, kind in ((0, "packing"), (2, "mask")):
        monkeypatch.setattr(packing, "LEAST_PADDING", least)
        torch.manual_seed(0)
        model = model_class(**SMALL, **options, dropout=0.0, attention_dropout=0.0).double()
        model(tokens, mask, targets).backward()
        logits = model(tokens, mask)
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([(logits if "classes" in options else logits[mask]).detach().flatten(), *grads]))
        assert [list(context) for context in contexts[-2:]] == [[kind]] * 2
    torch.testing.assert_close(*found, rtol=0, atol=1e-12 if "exact" not in options else 1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_packs_in_16_bits_without_waiting(monkeypatch):
    tokens, mask, _ = text_batch()
    found, contexts = [], spied(monkeypatch)
    model = RevRoBERTa(**SMALL).cuda().eval()
    tokens = tokens.cuda()
    for given, kind in ((mask, "packing"), (mask.cuda(), "mask")):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(logits[mask.cuda()])
        assert list(contexts[-1]) == [kind]
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_gpt_is_causal_and_knows_positions(positions):
    model = RevGPT(**SMALL, positions=positions).eval()
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (tokens[0, 8] + 1) % 50
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :8], other[:, :8])
    assert not torch.allclose(one[:, 8:], other[:, 8:])
    repeated = model(torch.full((1, 12), 3))[0]
    if positions == "learned":  # equal tokens tell rotary attention nothing of where it is
        assert not torch.allclose(repeated[0], repeated[5], atol=1e-4)
    swapped = tokens.clone()
    swapped[0, [2, 5]] = tokens[0, [5, 2]]
    assert not torch.allclose(model(swapped)[0, -1], one[0, -1])
    kept: list[torch.Size] = []
    model.blocks.backward = "autograd"
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        model(tokens)
    assert kept and (12, 12) not in [shape[-2:] for shape in kept]  # attention's weights are never all there


def test_what_a_model_cannot_read_is_refused():
    tokens, mask, _ = text_batch()
    with pytest.raises(ValueError, match=r"mask is of torch.int64, not torch.bool; give mask.bool\(\)"):
        RoBERTa(**SMALL)(tokens, mask.long())
    for model_class in (RevGPT, RevRoBERTa):
        with pytest.raises(ValueError, match="up to 12 tokens at once, not 13"):
            model_class(**SMALL)(torch.zeros(1, 13, dtype=torch.long))
    model = RevGPT(**SMALL)
    with pytest.raises(ValueError, match="room for 4 tokens, not for 5"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=model.cache(1, 4), positions=torch.tensor([[4]]), end=5)

"""Generation with a cache against reading everything anew, and what is drawn."""

import pytest
import torch
from compared import assert_equal
from torch.nn import functional as F

from holotrain.models import GPT, RevGPT
from holotrain.models.generation import Sampling, generate

SMALL = {"vocab": 50, "context": 100, "dim": 32, "depth": 3, "heads": 2}
GREEDY = Sampling(temperature=0)


def model_of(model_class=RevGPT, **options):
    torch.manual_seed(1)
    model = model_class(**SMALL | options).eval()
    with torch.no_grad():  # a fresh model repeats what it was given, since the head is tied, and hardly attends to places
        model.norm.weight.normal_()
        for block in model.blocks.blocks:
            block.f.attention.query_key_value.weight.mul_(20)
    return model


def continued(model, prompts, count, sampling=GREEDY, **options):
    return torch.stack(list(generate(model, prompts, count, sampling, **options)), dim=1)


def uncached(model, prompt, count):
    tokens = prompt[None]
    with torch.inference_mode():
        for _ in range(count):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens[0, len(prompt) :]


@pytest.mark.parametrize(
    ("model_class", "positions", "lengths"),
    [(GPT, "rotary", (1, 7, 30)), (RevGPT, "rotary", (7,)), (RevGPT, "learned", (7, 7, 7)), (RevGPT, "learned", (1, 7, 30))],
)
def test_cached_generation_is_the_uncached_one(model_class, positions, lengths, monkeypatch):
    """24 greedy tokens in float64, several prompts at once. Those of one length need no mask."""
    model = model_of(model_class, positions=positions).double()
    prompts = [torch.randint(50, (length,)) for length in lengths]
    masks, buffers, attention = [], set(), F.scaled_dot_product_attention

    def noted(*given, **options):
        masks.append(options["attn_mask"])
        buffers.add(given[1].untyped_storage().data_ptr())
        return attention(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", noted)
        together = continued(model, prompts, 24)
    assert together.shape == (len(lengths), 24) and len(together.unique()) >= 4
    assert len(buffers) == 1  # the keys of all layers and tokens, allocated once
    assert len(masks) == 3 * 24 and any(mask is not None for mask in masks) == (len({*lengths}) > 1)
    for row, prompt in zip(together, prompts, strict=True):
        assert_equal(row, uncached(model, prompt, 24))


def test_compiled_generation_is_the_same(compiler):
    model, prompts = model_of(depth=1).double(), [torch.tensor([3, 4]), torch.tensor([5])]
    assert_equal(continued(model, prompts, 8, compiled=True), continued(model, prompts, 8))


def test_an_ended_text_stays_ended_and_all_ended_end_it():
    model = model_of()
    prompts = [torch.tensor([3]), torch.tensor([9, 8])]
    free = continued(model, prompts, 60)
    ends = [next(token for token in row.tolist()[5:] if token != row[0]) for row in free]  # that come after some others
    for end in ends:
        stopped = continued(model, prompts, 60, end_id=end)
        lengths = [row.tolist().index(end) + 1 if end in row else 60 for row in free]
        assert stopped.shape[1] == max(lengths)
        for row, unstopped, length in zip(stopped, free, lengths, strict=True):
            assert_equal(row[:length], unstopped[:length])
            assert (row[length:] == end).all()
    assert min(lengths) < 60


@pytest.mark.parametrize(("prompt", "words"), [([], "at least one token"), ([1] * 100, "leaves no room in a context of 100")])
def test_impossible_prompts_are_refused(prompt, words):
    with pytest.raises(ValueError, match=words):
        generate(model_of(), [torch.tensor(prompt, dtype=torch.long)], 3)  # at the call


LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0]])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        *(({"top_p": top_p}, kept) for top_p, kept in ((0.1, [0]), (0.63, [0]), (0.65, [0, 2]), (0.9, [0, 1, 2]))),
        ({"temperature": 0.5}, [0, 1, 2, 3]),
    ],
)
def test_the_likeliest_keep_their_shares(options, kept):
    """The probabilities are 0.644, 0.087, 0.237, 0.032."""
    full = (LOGITS / options.get("temperature", 1)).softmax(-1)[0]
    left = Sampling(**options).probabilities(LOGITS)[0]
    assert left.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(left[kept], full[kept] / full[kept].sum())


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0}, {"top_p": 2}]
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must"):
        Sampling(**options)


def test_a_tiny_temperature_is_greedy_and_a_diverged_model_is_named():
    assert all(Sampling(temperature).draw(LOGITS).tolist() == [0] for temperature in (1e-40, 1e-320))
    with pytest.raises(ValueError, match="its training has diverged"):
        Sampling().draw(torch.full((1, 4), float("nan")))

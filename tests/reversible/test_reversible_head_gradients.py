"""The gradient of a language model's head where its loss is in tiles: to whom it goes, and how many copies of it live."""

import pytest
import torch
from tracked_memory import TrackedMemory

from holotrain.reversible.tiled_loss import tile_loss

transformers = pytest.importorskip("transformers")

WORDS, WIDTH = 4000, 64
TOKENS = torch.randint(WORDS, (1, 3), generator=torch.Generator().manual_seed(0))


def made(tiled: bool, tied: bool = True, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=WORDS, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).to(dtype).train()
    return tile_loss(model) and model if tiled else model


def loss(model):
    return model(TOKENS, labels=TOKENS).loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_one_copy_at_most_lives_beside_the_gradient(tied, kept):
    """``kept``: gradients that are there already are added to."""
    model = made(tiled=True, tied=tied)
    loss(model).backward()
    if not kept:
        model.zero_grad()
    with TrackedMemory(model) as memory:
        loss(model).backward()
    own = 0 if kept else 1 if tied else 2
    assert memory.peak < (own + 1.4 if kept or tied else own + 0.4) * WORDS * WIDTH * 4


def accumulated(model, weight):
    for _ in range(2):
        loss(model).backward()
    return weight.grad


def seen_by_a_hook(model, weight):
    """Which changes what becomes the gradient."""
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    loss(model).backward()
    return torch.stack([*seen, weight.grad])


def seen_after_accumulation(model, weight):
    seen = []
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    loss(model).backward()
    return torch.stack(seen)


def returned(model, weight):
    (gradient,) = torch.autograd.grad(loss(model), [weight])
    assert weight.grad is None
    return gradient


def of_others(model, weight):
    other = model.model.norm.weight
    loss(model).backward(inputs=[other])
    assert weight.grad is None
    return other.grad


@pytest.mark.parametrize("use", [accumulated, seen_by_a_hook, seen_after_accumulation, returned, of_others])
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_it_is_that_of_the_whole_loss(use, tied, dtype):
    found, expected = ((use(model, model.lm_head.weight)) for model in (made(True, tied, dtype), made(False, tied, dtype)))
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, expected, rtol=1e-4 if dtype == torch.float32 else 0.05, atol=1e-3 * float(expected.std())
    )

"""MLPs of other libraries' models in tiles, under every way to keep what runs between the blocks."""

import gc

import pytest
import torch
from torch import nn
from tracked_memory import TrackedMemory

from holotrain.models.block_schedules import set_tile
from holotrain.reversible import recompute, undo
from holotrain.reversible.tiled_loss import TiledLoss
from holotrain.reversible.tiles import Tiled, tile_modules

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

WORDS, T, TILE = 97, 40, 16
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 600, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": WORDS, "n_positions": 600, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "gpt2": GPT2 | {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")},
    "llama": GROUPED,
}
NAMES = ["gpt2", "vit", "llama"]


pytestmark = pytest.mark.usefixtures("float64_stays")


def made(name: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    if name == "vit":
        sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 56, "patch_size": 8, "num_classes": 10}
        return timm.create_model("vit_tiny_patch16_224", **sizes).double().train()
    config = transformers.AutoConfig.for_model(name, **MODELS[name] | changes)
    return transformers.AutoModelForCausalLM.from_config(config).double().train()


def step(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    if name == "vit":
        model(torch.randn(2, 3, 56, 56, dtype=torch.float64)).square().mean().backward()
    else:
        tokens = torch.randint(3, WORDS, (2, T))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= most * max(gradient.abs().max().item(), 1e-6), name


def tiled(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if Tiled.of(part) is not None]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_recomputed_blocks_are_those_of_the_whole(name):
    expected, model = step(name, made(name)), made(name)
    recompute(model, tile=TILE)
    assert_equal(step(name, model), expected)
    assert tiled(model) and (TiledLoss.of(model) is not None) == (name != "vit")
    undo(model)
    assert not tiled(model) and "forward" not in vars(model)
    assert_equal(step(name, model), expected, 0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_first_step_takes_hardly_more_memory_than_the_second(name):
    """The look at operators makes no tensors with data, and two tiles that are compared are smaller than a step. The first
    recomputation of a block runs to its end, and so has its output."""
    model, tokens, peaks = recompute(made(name), tile=TILE), torch.randint(3, WORDS, (2, 400)), []
    for _ in range(2):
        gc.collect()
        with TrackedMemory(model) as memory:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        peaks.append(memory.peak)
        model.zero_grad()
    assert peaks[0] <= 1.03 * peaks[1] + tokens.numel() * 32 * 8


def test_dropout_is_drawn_again():
    """Tiles draw what they drew in the forward: with a recomputed block as without."""
    rates = {name: 0.3 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    stored, model = made("gpt2", **rates), made("gpt2", **rates)
    recompute(stored, backward="autograd", tile=TILE)
    recompute(model, backward="checkpoint", tile=TILE)
    assert_equal(step("gpt2", model), step("gpt2", stored), 1e-12)


class Mixing(nn.Module):
    """Looks like an MLP, and mixes tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).cumsum(1))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def test_what_mixes_tokens_is_taken_whole():
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(Mixing()) for _ in range(2))).double()
    x = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    assert tile_modules(model, TILE)
    for found, gradient in zip(torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()]), expected, strict=True):
        assert torch.equal(found, gradient)


def test_a_forward_that_others_have_set_is_kept():
    expected, model, plain = made("gpt2"), made("gpt2"), made("gpt2")
    for each in (expected, model):
        mlp = each.transformer.h[0].mlp
        mlp.forward = lambda x, own=mlp.forward: 2 * own(x)
    recompute(model, tile=TILE)
    assert_equal(step("gpt2", model), step("gpt2", expected))
    undo(model)
    assert_equal(step("gpt2", model), step("gpt2", expected), 0)
    assert not torch.equal(step("gpt2", plain)["transformer.wte.weight"], step("gpt2", model)["transformer.wte.weight"])


def test_tiles_are_set_for_any_model():
    model = made("gpt2")
    set_tile(model, TILE)
    assert len(tiled(model)) >= 3
    set_tile(model, None)
    assert not tiled(model)
    with pytest.raises(ValueError, match="Linear has no blocks with MLPs that work token by token"):
        set_tile(nn.Linear(2, 2), TILE)

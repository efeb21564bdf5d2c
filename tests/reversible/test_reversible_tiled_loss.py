"""The loss of language models in tiles, against the whole one in float64."""

import copy
import inspect
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from covering import slow
from gloo_pair import found_by_processes
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from holotrain.reversible.tiled_loss import tile_loss, tiled_cross_entropy, untile_loss

transformers = pytest.importorskip("transformers")

WORDS, T = 97, 40
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": WORDS, "n_positions": T, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
OPT = SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1}
MODELS = {
    "tied": ("gpt2", GPT2),
    "its own head": ("llama", GROUPED),
    "tied, of another kind": ("qwen3", GROUPED | {"tie_word_embeddings": True}),
    "soft-capped": ("gemma2", GROUPED | {"final_logit_softcapping": 0.5}),
    "scaled": ("cohere", GROUPED | {"logit_scale": 0.3}),
    "divided": ("granite", GROUPED | {"logits_scaling": 3.0}),
    "with a bias": ("phi", SIZES | {"resid_pdrop": 0.1}),
    "parallel branches": ("gpt_neox", SIZES | {"hidden_dropout": 0.1}),
    "a base within the base": ("opt", OPT),
    "masked": ("bert", SIZES),
    "masked, with another head": ("roberta", SIZES),
    "masked, of another kind": ("modernbert", SIZES | {"cls_token_id": 1, "sep_token_id": 2}),
}
KINDS = [name if name in ("tied", "soft-capped", "with a bias", "masked") else slow(name) for name in MODELS]


pytestmark = pytest.mark.usefixtures("float64_stays")


def made(name: str) -> nn.Module:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = transformers.AutoModelForMaskedLM if name.startswith("masked") else transformers.AutoModelForCausalLM
    return auto.from_config(config).double().train()


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, WORDS, (2, T), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 5:9], labels[1, 27:] = -100, -100  # some tiles of 4 tokens have no label in a row, or none at all
    labels[:, 12:17] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model: nn.Module, **given):
    """The loss and gradients of the second step, with the same dropout."""
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(2)
        result = model(**{**batch(), **given})
        result.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return result, {name: each for name, each in gradients.items() if each is not None}


def assert_same(model: nn.Module, tokens: int, change=lambda model: None, **given) -> None:
    change(model)
    whole, expected = step(model, **given)
    tile_loss(model, logits=tokens * 2 * WORDS)
    tiled, found = step(model, **given)
    assert tiled.logits is None and whole.logits is not None
    assert tiled.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-10 * max(gradient.abs().max().item(), 1e-6), name


@pytest.mark.parametrize("tokens", [4, slow(1), slow(7), slow(100)])
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_are_those_of_the_whole(name, tokens):
    """With dropout, labels of -100, and tiles that do not divide the length."""
    assert_same(made(name), tokens)


def frozen_head(model):
    model.get_output_embeddings().requires_grad_(False)


def frozen_base(model):
    model.base_model.requires_grad_(False)


def with_lora(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        nn.init.normal_(parameter, std=0.1) if "lora_B" in name else None
    model.double()


def with_lora_on_the_head(model):
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * 1.5)


@pytest.mark.parametrize("change", [frozen_head, frozen_base, with_lora, with_lora_on_the_head])
def test_what_is_frozen_or_changed_stays_so(change):
    assert_same(made("its own head"), 4, change)


def test_a_sum_over_the_items_of_a_larger_batch():
    assert_same(made("its own head"), 4, num_items_in_batch=torch.tensor(77))


def test_a_model_within_another_and_accumulated_gradients():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = made("tied")

        def forward(self, **given):
            return self.inner(**given)

    model = Outer()
    _, once = step(model)
    tile_loss(model, logits=8 * WORDS)
    model.zero_grad()
    for _ in range(2):
        torch.manual_seed(2)
        (3 * model(**batch()).loss).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, 6 * once[name], rtol=1e-9, atol=1e-14), name


def test_evaluation_and_calls_without_labels_are_as_before():
    model = made("tied")
    tile_loss(model)
    with torch.no_grad():
        assert model(**batch()).logits.shape == (2, T, WORDS)
    assert model(input_ids=batch()["input_ids"]).logits.requires_grad
    untile_loss(model)
    assert model(**batch()).logits is not None and "forward" not in vars(model)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made with a number for each word."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.shape[-1:] == (WORDS,):
                self.size = max(self.size, each.numel())
        return result


@pytest.mark.parametrize("name", ["tied", "masked"])
def test_the_logits_are_never_whole(name):
    model = made(name)
    with Largest() as whole:
        step(model)
    tile_loss(model, logits=4 * 2 * WORDS)
    step(model)
    with Largest() as tiled:
        step(model)
    assert whole.size >= 2 * (T - 1) * WORDS and tiled.size <= 32 * WORDS  # the weight


@pytest.mark.parametrize("name", ["tied", "masked"])
def test_the_mean_of_a_models_logits_against_targets(name):
    """As holotrain's tasks call it; in evaluation without gradients."""
    model, tokens, targets = made(name).eval(), batch()["input_ids"], batch()["labels"]
    expected = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    found = tiled_cross_entropy(model, targets, input_ids=tokens)
    (2 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert torch.allclose(parameter.grad, 2 * gradient, rtol=1e-10, atol=1e-14)
    with torch.no_grad():
        assert tiled_cross_entropy(model, targets, input_ids=tokens) == found


@pytest.mark.parametrize("name", ["tied", "soft-capped"])
def test_half_precision_is_as_near_as_without_tiles(name):
    exact = step(made(name).eval().requires_grad_())[1]

    def error(tiles: bool) -> float:
        model = made(name).to(torch.float32).eval()
        if tiles:
            tile_loss(model, logits=4 * 2 * WORDS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = [model(**batch()).loss for _ in range(2)][1]
        loss.backward()
        return max(((p.grad - exact[n]).norm() / exact[n].norm()).item() for n, p in model.named_parameters())

    assert error(True) <= 1.2 * error(False)


def test_a_second_backward_is_refused():
    model = tile_loss(made("tied"))
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward needs a second forward"):
        loss.backward()


def test_a_loss_that_is_no_mean_is_taken_whole():
    model = made("tied")
    expected = step(model)
    model.loss_function = lambda logits, labels, **rest: logits.square().mean() + logits.sum() * 0.01
    whole = step(model)
    tile_loss(model, logits=8 * WORDS)
    with pytest.warns(UserWarning, match="is no mean over tokens, so it is taken whole"):
        tiled = step(model)
    assert tiled[0].loss == whole[0].loss != expected[0].loss and tiled[0].logits is not None


def test_what_has_no_such_loss_is_refused():
    with pytest.raises(ValueError, match="Linear is no language model of transformers"):
        tile_loss(nn.Linear(2, 2))
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": WORDS}
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**small))
    with pytest.raises(ValueError, match="BartForConditionalGeneration is no language model"):
        tile_loss(bart)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_find_what_one_does(tmp_path):
    """DDP, and FSDP2 with the head in the root's group and in one of its own."""
    found = found_by_processes(Path(__file__).with_name("tiled_in_two_processes.py"), tmp_path)
    assert found.keys() == {"ddp", "fsdp2", "fsdp2, the head apart"}
    for case, error in found.items():
        assert error < 1e-10, (case, error)


def test_the_signature_and_tuples_are_the_models_own():
    model = made("tied")
    names = [*inspect.signature(model.forward).parameters]
    tile_loss(model)
    assert [*inspect.signature(model.forward).parameters] == names and "labels" in names
    loss, logits = model(**batch(), return_dict=False, use_cache=False)[:2]
    assert loss.requires_grad and logits.shape == (2, T, WORDS)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_short_texts_are_taken_whole(tokens):
    model, whole = made("tied").eval(), made("tied").eval()
    tile_loss(model, logits=2 * WORDS)
    cut = {name: each[:, :tokens] for name, each in batch().items()}
    assert torch.equal(model(**cut).loss, whole(**cut).loss) or tokens == 1
    step(model)
    assert model(**batch()).logits is None


def test_a_batch_without_labels_is_as_before():
    model, whole = made("tied"), made("tied")
    tile_loss(model)
    none = {"labels": torch.full((2, T), -100)}
    assert step(model, **none)[0].loss.isnan() and step(whole, **none)[0].loss.isnan()


def test_a_copy_is_in_tiles_of_its_own():
    model = tile_loss(made("tied"))
    step(model)
    copied = copy.deepcopy(model)
    _, expected = step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, found = step(copied)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_the_loss_of_experts_is_part_of_the_mean():
    """The mean over tiles of what all of them add is what one adds."""
    sizes = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model, whole = (transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).train() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    result, expected = step(whole)
    tile_loss(model, logits=8 * WORDS)
    tiled, found = step(model)
    assert tiled.loss.item() == pytest.approx(result.loss.item(), rel=1e-5) and result.aux_loss > 0
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def test_a_warning_is_no_part_of_a_sound_step():
    model = tile_loss(made("tied"))
    with warnings.catch_warnings(action="error"):
        step(model)

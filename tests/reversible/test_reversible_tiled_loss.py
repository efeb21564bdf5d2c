"""The loss of language models in tiles, against the whole one in float64; and MLPs of other libraries' models in tiles."""

import gc
import inspect
import warnings

import pytest
import torch
from covering import slow
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from tracked_memory import TrackedMemory

from holotrain.models.block_schedules import set_tile
from holotrain.reversible import recompute, undo
from holotrain.reversible.tiled_loss import TiledLoss, linear_cross_entropy, pending_logits, tile_loss, untile_loss
from holotrain.reversible.tiles import Tiled

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

WORDS, T = 97, 40
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {
    "vocab_size": WORDS,
    "n_positions": 400,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1}
MODELS = {
    "tied": ("gpt2", GPT2),
    "its own head": ("llama", GROUPED),
    "soft-capped": ("gemma2", GROUPED | {"final_logit_softcapping": 0.5}),
    "scaled": ("cohere", GROUPED | {"logit_scale": 0.3}),
    "divided": ("granite", GROUPED | {"logits_scaling": 3.0}),
    "with a bias": ("phi", SIZES | {"resid_pdrop": 0.1}),
    "a base within the base": ("opt", OPT),
    "masked": ("bert", SIZES),
}
KINDS = [name if name in ("tied", "soft-capped", "with a bias", "masked") else slow(name) for name in MODELS]


pytestmark = pytest.mark.usefixtures("float64_stays")


def made(name: str, dropout: bool = True) -> nn.Module:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    rates = {} if dropout or kind != "gpt2" else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.AutoConfig.for_model(kind, **sizes | rates)
    auto = transformers.AutoModelForMaskedLM if name.startswith("masked") else transformers.AutoModelForCausalLM
    return auto.from_config(config).double().train()


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, WORDS, (2, T), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 5:9], labels[1, 27:] = -100, -100  # some tiles of 4 tokens have no label in a row, or none at all
    labels[:, 12:17] = -100
    return {"input_ids": tokens, "labels": labels}


def first_step(model: nn.Module, **given):
    """The result of a step and its gradients."""
    torch.manual_seed(2)
    result = model(**{**batch(), **given})
    result.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return result, {name: each.clone() for name, each in gradients.items()}


def step(model: nn.Module, **given):
    """Those of the second step, with the same dropout."""
    first_step(model, **given)
    model.zero_grad()
    return first_step(model, **given)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float = 1e-10) -> None:
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= most * max(gradient.abs().max().item(), 1e-6), name


def assert_same(model: nn.Module, tokens: int, change=lambda model: None, **given) -> None:
    change(model)
    whole, expected = step(model, **given)
    tile_loss(model, most_logits=tokens * 2 * WORDS)
    tiled, found = step(model, **given)
    assert tiled.logits is None and whole.logits is not None
    assert tiled.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert_near(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_are_those_of_the_whole(name):
    """With dropout, labels of -100, and tiles that do not divide the length."""
    assert_same(made(name), 7)


CHANGES = {
    "frozen head": lambda model: model.get_output_embeddings().requires_grad_(False),
    "frozen base": lambda model: model.base_model.requires_grad_(False),
    "a hook": lambda model: model.get_output_embeddings().register_forward_hook(lambda module, given, output: output * 1.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_frozen_or_changed_stays_so(change):
    assert_same(made("its own head"), 4, change)


def test_a_sum_over_the_items_of_a_larger_batch():
    assert_same(made("its own head"), 4, num_items_in_batch=torch.tensor(77))


def test_evaluation_and_calls_without_labels_are_as_before():
    model = made("tied")
    tile_loss(model)
    with torch.no_grad():
        assert model(**batch()).logits.shape == (2, T, WORDS)
    assert model(input_ids=batch()["input_ids"]).logits.requires_grad
    assert model.eval()(**batch()).logits.requires_grad
    untile_loss(model)
    assert model(**batch()).logits is not None and "forward" not in vars(model)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made with a number for each word, or with so many in its last dimension."""

    def __init__(self, width=WORDS):
        super().__init__()
        self.size, self.width = 0, width

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.shape[-1:] == (self.width,):
                self.size = max(self.size, each.numel())
        return result


@pytest.mark.parametrize("name", ["tied", "masked"])
def test_the_logits_are_never_whole(name):
    model = made(name)
    with Largest() as whole:
        step(model)
    tile_loss(model, most_logits=4 * 2 * WORDS)
    step(model)
    with Largest() as tiled:
        step(model)
    assert whole.size >= 2 * (T - 1) * WORDS and tiled.size <= 32 * WORDS  # the weight


def mean_of_pending(model, **inputs):
    """As holotrain's tasks call it."""
    targets = batch()["labels"]
    with pending_logits(model, most_logits=8 * WORDS):
        return F.cross_entropy(model(**inputs).logits.flatten(0, 1).float(), targets.flatten())


@pytest.mark.parametrize("name", ["tied", "masked"])
def test_the_mean_of_a_models_logits_against_targets(name):
    """In evaluation without gradients, too."""
    model, tokens, targets = made(name).eval(), batch()["input_ids"], batch()["labels"]
    expected = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    found = mean_of_pending(model, input_ids=tokens)
    (2 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert torch.allclose(parameter.grad, 2 * gradient, rtol=1e-10, atol=1e-14)
    with torch.no_grad():
        assert mean_of_pending(model, input_ids=tokens) == found


def test_a_second_backward_is_refused():
    model = tile_loss(made("tied"))
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward needs a second forward"):
        loss.backward()


def changed_in_place(logits, labels, **rest):
    logits[..., 3] = -1e4
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Twice(torch.autograd.Function):
    """Reads the numbers without torch's functions, as a kernel does."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def mean_of_each_text(logits, labels, **rest):
    return torch.stack([F.cross_entropy(logits[row], labels[row]) for row in range(2)]).mean()


def next_but_one(logits, labels, **rest):
    """Two predictions of one head, as of several tokens (MTP)."""
    return cross_entropy(logits[:, :-1], labels[:, 1:]) + 0.3 * cross_entropy(logits[:, :-2], labels[:, 2:])


def with_a_penalty(logits, labels, **rest):
    """The z-loss of PaLM beside the usual one."""
    return cross_entropy(logits[:, :-1], labels[:, 1:]) + 1e-2 * logits.logsumexp(-1).square().mean()


def smoothed(logits, labels, **rest):
    return cross_entropy(logits, labels, label_smoothing=0.1)


def masked(logits, labels, **rest):
    """Reads all tokens, as losses that are masked with the attention mask."""
    return (cross_entropy(logits, labels, reduction="none") * torch.ones(2 * T)).mean()


def soft_labels(logits, labels, **rest):
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(labels.clamp_min(0), WORDS).double().flatten(0, 1))


@pytest.mark.parametrize("loss", [mean_of_each_text, smoothed, next_but_one])
def test_other_losses_that_are_means_over_tokens_are_in_tiles(loss):
    assert_same(made("tied"), 4, lambda model: setattr(model, "loss_function", loss))


WHOLE = {
    "a mean of changed logits": lambda logits, labels, **rest: mean_of_each_text(logits.exp(), labels),
    "a penalty": with_a_penalty,
    "weights": lambda logits, labels, **rest: cross_entropy(logits, labels, weight=torch.arange(1.0, WORDS + 1).double()),
    "changed in place": changed_in_place,
    "a kernel": lambda logits, labels, **rest: cross_entropy(Twice.apply(logits), labels),
    "masked": masked,
    "soft labels": soft_labels,
}


@pytest.mark.parametrize("loss", WHOLE.values(), ids=WHOLE)
def test_other_losses_are_those_of_the_whole(loss):
    """Also where the model had its own loss in the first step; with one warning."""
    whole, model = made("tied", dropout=False), made("tied", dropout=False)
    tile_loss(model, most_logits=8 * WORDS)
    assert first_step(model)[0].logits is None
    model.zero_grad()
    whole.loss_function = model.loss_function = loss
    result, expected = first_step(whole)
    with pytest.warns(UserWarning, match="whole") as said:
        tiled, found = first_step(model)
    assert len(said) == 1 and tiled.loss.item() == pytest.approx(result.loss.item(), rel=1e-12)
    assert_near(found, expected)
    with warnings.catch_warnings(action="error"):
        first_step(model)


def test_many_tiles_in_bfloat16_sum_in_float32():
    exact = first_step(made("masked").eval())[1]

    def error(most: int | None) -> float:
        model = made("masked").eval().bfloat16()
        for part in model.modules():
            part.training, part.p = True, 0.0  # without dropout
        if most is not None:
            tile_loss(model, most_logits=most)
        found = first_step(model)[1]
        name = "cls.predictions.transform.dense.weight"
        return ((found[name].double() - exact[name]).norm() / exact[name].norm()).item()

    assert error(2 * WORDS) <= 1.5 * error(None)


def test_another_label_to_ignore():
    labels = torch.where(batch()["labels"] == -100, 5, batch()["labels"])
    assert_same(made("its own head"), 4, ignore_index=5, labels=labels)


def test_labels_by_position_are_taken_whole():
    model, tokens = made("tied", dropout=False), batch()["input_ids"]
    names = [*inspect.signature(model.forward).parameters]
    given = [tokens, *[None] * (names.index("labels") - 1), tokens]
    expected = model(*given).loss
    tile_loss(model, most_logits=8 * WORDS)
    assert model(*given).loss == expected


def test_a_failure_of_the_base_is_no_reason_to_take_it_whole():
    model = tile_loss(made("tied"), most_logits=8 * WORDS)
    own = model.transformer.h[1].forward
    model.transformer.h[1].forward = lambda *given, **named: (_ for _ in ()).throw(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        step(model)
    model.transformer.h[1].forward = own
    assert step(model)[0].logits is None


def test_the_signature_and_tuples_are_the_models_own():
    model = made("tied")
    names = [*inspect.signature(model.forward).parameters]
    tile_loss(model)
    assert [*inspect.signature(model.forward).parameters] == names and "labels" in names
    loss, logits = model(**batch(), return_dict=False, use_cache=False)[:2]
    assert loss.requires_grad and logits.shape == (2, T, WORDS)


def experts() -> nn.Module:
    torch.manual_seed(0)
    sizes = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).train()


@pytest.mark.parametrize("tokens", [T, 4])
@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": torch.tensor(60)}])
def test_the_loss_of_experts_is_added_once(items, tokens):
    """Also with as many tokens as experts, where router logits look like those of words."""
    cut = {name: each[:, :tokens] for name, each in batch().items()}
    result, expected = first_step(experts(), **cut, **items)
    model = tile_loss(experts(), most_logits=8 * WORDS)
    tiled, found = first_step(model, **cut, **items)
    assert tiled.logits is None and tiled.loss.item() == pytest.approx(result.loss.item(), rel=1e-5) and result.aux_loss > 0
    assert_near(found, expected, 1e-3)


@pytest.mark.parametrize("options", [{}, {"task_type": "CAUSAL_LM"}, {"modules_to_save": ["lm_head"]}])
def test_models_of_peft(options):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(3)
        targets = {"target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.0, "init_lora_weights": False}
        return peft.get_peft_model(made("its own head"), peft.LoraConfig(r=2, **targets, **options)).double()

    _, expected = first_step(adapted())
    tile_loss(model := adapted(), most_logits=8 * WORDS)
    tiled, found = first_step(model)
    assert tiled.logits is None
    assert_near(found, expected)


def test_hidden_states_are_whole_and_have_their_graph():
    found = []
    for each in (made("tied", dropout=False), tile_loss(made("tied", dropout=False), most_logits=8 * WORDS)):
        result = each(**batch(), output_hidden_states=True)
        assert [state.shape[:2] for state in result.hidden_states] == [(2, T)] * 3
        (result.loss + result.hidden_states[1].square().mean()).backward()
        found.append({name: parameter.grad for name, parameter in each.named_parameters()})
    assert_near(*found)


def test_encoders_with_decoders_and_models_without_a_head():
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": WORDS, "decoder_ffn_dim": 16}

    def bart():
        torch.manual_seed(0)
        return transformers.BartForConditionalGeneration(transformers.BartConfig(**small, dropout=0.0)).double().train()

    result, expected = first_step(bart())
    tiled, found = first_step(tile_loss(bart(), most_logits=8 * WORDS))
    assert tiled.logits is None and tiled.loss.item() == pytest.approx(result.loss.item(), rel=1e-12)
    assert_near(found, expected)
    with pytest.raises(ValueError, match="BertModel is no language model"):
        tile_loss(made("masked").bert)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_short_texts(tokens):
    model, whole = tile_loss(made("tied", dropout=False), most_logits=2 * WORDS), made("tied", dropout=False)
    cut = {name: each[:, :tokens] for name, each in batch().items()}
    assert torch.allclose(model(**cut).loss, whole(**cut).loss, rtol=1e-12) or tokens == 1


def test_a_batch_without_labels_has_gradients_of_zero():
    model = tile_loss(made("tied", dropout=False), most_logits=2 * WORDS)
    result, found = first_step(model, labels=torch.full((2, T), -100))
    assert result.loss.isnan() and found and not any(each.any() for each in found.values())


class Biased(transformers.LlamaForCausalLM):
    """Its head reads tensors from outside, and its weight is read a second time."""

    def forward(self, input_ids, labels=None, bias=None, prompt=None):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = (self.lm_head(hidden) + bias) * prompt.sum().tanh()
        loss = self.loss_function(logits, labels, WORDS) + 0.01 * self.lm_head.weight.square().sum()
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def test_tensors_from_outside_and_a_weight_that_is_read_twice():
    found = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = Biased(transformers.LlamaConfig(**GROUPED)).double().train()
        bias = torch.linspace(-1, 1, WORDS, dtype=torch.float64, requires_grad=True)
        prompt = torch.linspace(0.1, 1, 5, dtype=torch.float64, requires_grad=True)
        if tiled:
            tile_loss(model, most_logits=8 * WORDS)
        result, gradients = first_step(model, bias=bias, prompt=prompt.square())
        assert (result.logits is None) == tiled
        found.append(gradients | {"bias": bias.grad, "prompt": prompt.grad, "loss": result.loss.detach()})
    assert_near(*found)


def test_a_head_that_reads_what_is_no_parameter_of_it_is_taken_whole():
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    model = made("its own head")
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) * scale
    tile_loss(model, most_logits=8 * WORDS)
    with pytest.warns(UserWarning, match="its head reads a tensor that is none of its parameters"):
        result, _ = first_step(model)
    assert result.logits is not None and scale.grad.abs() > 0


def tiled_modules(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if Tiled.of(part) is not None]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    if isinstance(model, transformers.PreTrainedModel):
        return first_step(model, use_cache=False)[1]
    torch.manual_seed(2)
    model(torch.randn(2, 3, 56, 56, dtype=torch.float64)).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gpt2() -> nn.Module:
    return made("tied", dropout=False)


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 56, "patch_size": 8, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", **sizes).double().train()


@pytest.mark.parametrize("make", [gpt2, vit])
def test_gradients_of_recomputed_blocks_in_tiles_are_those_of_the_whole(make):
    expected, model = gradients(make()), recompute(make(), tile=16)
    assert_near(gradients(model), expected)
    with Largest(width=4 * 32) as hidden:
        gradients(model)
    assert hidden.size <= 2 * (2 * 16) * 4 * 32  # of an MLP: two tiles, which are compared, and not all 40 or 50 tokens
    assert tiled_modules(model) and (TiledLoss.of(model) is not None) == (make is gpt2)
    undo(model)
    assert not tiled_modules(model) and "forward" not in vars(model)
    assert_near(gradients(model), expected, 0)


def test_the_first_step_takes_hardly_more_memory_than_the_second():
    """The look at operators makes no tensors with data, and two tiles that are compared are smaller than a step. The first
    recomputation of a block runs to its end, and so has its output."""
    model, tokens, peaks = recompute(gpt2(), tile=16), torch.randint(3, WORDS, (2, 10 * T)), []
    for _ in range(2):
        gc.collect()
        with TrackedMemory(model) as memory:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        peaks.append(memory.peak)
        model.zero_grad()
    assert peaks[0] <= 1.03 * peaks[1] + tokens.numel() * 32 * 8


def test_dropout_of_tiles_is_drawn_again():
    """Tiles draw what they drew in the forward: with a recomputed block as without."""
    stored, model = (recompute(made("tied"), backward=backward, tile=16) for backward in ("autograd", "checkpoint"))
    assert_near(gradients(model), gradients(stored), 1e-12)


def test_a_forward_that_others_have_set_is_kept():
    expected, model = gpt2(), gpt2()
    for each in (expected, model):
        mlp = each.transformer.h[0].mlp
        mlp.forward = lambda x, own=mlp.forward: 2 * own(x)
    assert_near(gradients(recompute(model, tile=16)), gradients(expected))
    assert_near(gradients(undo(model)), gradients(expected), 0)
    assert not torch.equal(gradients(gpt2())["transformer.wte.weight"], gradients(model)["transformer.wte.weight"])


def test_tiles_are_set_for_any_model():
    model = gpt2()
    set_tile(model, 16)
    assert len(tiled_modules(model)) >= 2
    set_tile(model, None)
    assert not tiled_modules(model)
    with pytest.raises(ValueError, match="Linear has no blocks with MLPs that work token by token"):
        set_tile(nn.Linear(2, 2), 16)


# The loss of our own models, of a head's input and weight.


def chunked_example(dtype, bias=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 8, dtype=dtype), torch.randn(31, 8, dtype=dtype)
    targets = torch.randint(31, (23,))
    targets[[0, 5, 22]] = -100
    leaves = [hidden, weight] + ([torch.randn(31, dtype=dtype)] if bias else [])
    return [leaf.requires_grad_() for leaf in leaves], targets


@pytest.mark.parametrize("piece", [1, 31 * 4, 31 * 23, 10**6])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(piece, bias):
    (hidden, weight, *rest), targets = chunked_example(torch.float64, bias)
    loss = linear_cross_entropy(hidden, weight, targets, *rest, most_logits=piece)
    whole = F.cross_entropy(F.linear(hidden, weight, *rest), targets)
    torch.testing.assert_close(loss, whole, rtol=1e-13, atol=0)
    mine, theirs = (torch.autograd.grad(3 * each, (hidden, weight, *rest)) for each in (loss, whole))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_only_what_is_asked_for_is_differentiated():
    (hidden, weight, bias), targets = chunked_example(torch.float64)
    weight.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets, bias)
    loss.backward()
    assert weight.grad is None and hidden.grad is not None and bias.grad is not None
    assert linear_cross_entropy(hidden, weight, torch.full((23,), -100), bias).isnan()  # nothing counted, as in torch
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, FlopCounterMode(display=False) as counter:
            torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, bias), loss.detach())
        assert counter.get_total_flops() == 2 * 23 * 31 * 8  # of the logits alone


def test_under_autocast_products_are_half_and_sums_are_not():
    (hidden, weight, bias), targets = chunked_example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, bias, most_logits=31)
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    exact = F.cross_entropy(F.linear(hidden, weight, bias), targets)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    reference = torch.autograd.grad(exact, (hidden, weight))
    for mine, theirs in zip((hidden.grad, weight.grad), reference, strict=True):
        assert F.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.999


def test_small_gradients_survive_half_precision():
    """Divided by the number of tokens before the products, they would be zero in fp16."""
    hidden = torch.randn(4096, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(2000, 4, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long))
    scale = 2.0**16  # as a GradScaler has it
    (grad,) = torch.autograd.grad(loss * scale, weight)
    assert (grad[1:] != 0).float().mean() > 0.99


def test_logits_never_stand_whole():
    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(WORDS, 4, requires_grad=True)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.long), most_logits=8 * WORDS).backward()
    assert largest.size == 8 * WORDS

"""Attention in groups of heads, against plain autograd in float64 with all heads at once."""

from collections import Counter

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tracked_memory import check_plan

from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.training_step import TrainingStep, simulate_step
from holotrain.reversible import head_groups, recompute, undo
from holotrain.reversible.head_groups import HeadGroups

TOKENS, WORDS = 24, 61
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
GROUPED = SIZES | {"num_key_value_heads": 4}
MODELS = {
    "Llama": ("LlamaConfig", GROUPED | {"attention_bias": True}),
    "Qwen3": ("Qwen3Config", GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralConfig", GROUPED | {"sliding_window": 8}),
    "Phi": ("PhiConfig", GROUPED),
    "GPT-2": (
        "GPT2Config",
        {
            "vocab_size": WORDS,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "OPT": ("OPTConfig", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}


@pytest.fixture
def said(monkeypatch):
    """What is logged."""
    found = []
    monkeypatch.setattr(head_groups._LOGGER, "info", found.append)
    return found


def language_model(name="Llama", **options):
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, kind)(**{**sizes, **ids, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    for weight in model.parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, 0.5, 0.2)
    return model


def gradients(model, steps=2):
    """The loss, and all gradients of the last step."""
    tokens = torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    return torch.cat(
        [loss.detach().view(1), *(weight.grad.flatten() for weight in model.parameters() if weight.grad is not None)]
    )


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counted[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def groups_of(model):
    return [*filter(None, map(HeadGroups.of, model.modules()))]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("backward", ["autograd", "checkpoint", "checkpoint8"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_all_heads_at_once(name, backward, heads, said):
    """Also with three of four heads in a group, and one in the last."""
    model = recompute(language_model(name), backward=backward, tile=4)
    true = gradients(model)
    assert undo(recompute(model, backward=backward, heads=heads)) is model and not groups_of(model)
    assert all("forward" not in vars(part) for part in model.modules())
    recompute(model, backward=backward, tile=4, heads=heads)
    assert torch.allclose(gradients(model), true, rtol=1e-9, atol=1e-13) and not said


@pytest.mark.parametrize(("backward", "runs"), [("autograd", 1), ("checkpoint8", 2)])
def test_attention_is_computed_no_more_often(backward, runs):
    """Projections are, once more."""
    counted = []
    for heads in (None, 1):
        model = recompute(language_model(), backward=backward, heads=heads)
        gradients(model, 2)
        with Calls() as calls:
            gradients(model, 1)
        counted.append(calls.counted)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert [each[attention] for each in counted] == [2 * runs, 4 * 2 * runs]
    assert [each[attention + "_backward"] for each in counted] == [2, 8]
    whole, groups = [each["mm"] + each["addmm"] for each in counted]
    assert groups - whole == 2 * (3 * 4 * (runs + 1 + 2) + 4 * (runs + 2) - 4 * (runs + 2))


def test_dropout_is_drawn_again_alike():
    """In float64, the gradient along a direction is that of finite differences."""
    model = recompute(language_model("GPT-2", attn_pdrop=0.3), heads=1)
    weight, tokens = model.transformer.h[0].attn.c_attn.weight, torch.randint(WORDS, (2, TOKENS))

    def loss():
        torch.manual_seed(7)
        return model(input_ids=tokens, use_cache=False).logits.square().mean()

    loss().backward()
    direction, losses = torch.randn_like(weight), []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            weight += step * direction
            with torch.enable_grad():
                losses.append(loss().item())
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((weight.grad * direction).sum().item(), rel=1e-5)


def hooked(model):
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)


def with_a_subclass(model):
    model.model.layers[0].self_attn.k_proj.__class__ = type("Other", (nn.Linear,), {})


def with_a_parameter(model):
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(8))


def reading_all_heads(model):
    attention = model.model.layers[0].self_attn

    class Scaled(type(attention)):
        def forward(self, hidden_states, **keywords):
            output, weights = super().forward(hidden_states, **keywords)
            return output * self.o_proj(self.q_proj(hidden_states)).square().mean(), weights

    attention.__class__ = Scaled


REFUSED = {
    "hooks": (hooked, {}),
    "no plain linear layers": (with_a_subclass, {}),
    "parameters besides its layers": (with_a_parameter, {}),
    "attention weights": (lambda model: None, {"attn_implementation": "eager"}),
    "no more heads": (lambda model: None, {"num_key_value_heads": 1}),
    "other results": (reading_all_heads, {}),
}


@pytest.mark.filterwarnings("ignore:Scaled is taken whole")
@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_known_to_be_right_is_taken_whole(reason, said):
    change, options = REFUSED[reason]
    model = language_model(**options)
    change(model)
    true = gradients(recompute(model))
    assert torch.allclose(gradients(recompute(model, heads=1)), true, rtol=1e-9, atol=1e-13)
    assert [reason in each for each in said] == [True]


def test_norms_of_all_heads_caches_and_dropout_of_the_output(said):
    MODELS["OLMo 2"] = ("Olmo2Config", GROUPED)
    tokens = torch.randint(WORDS, (2, TOKENS))
    model = recompute(language_model("OLMo 2"), heads=1)
    model(input_ids=tokens, use_cache=False)
    recompute(language_model(), backward="autograd", heads=1)(input_ids=tokens, use_cache=True)
    recompute(language_model("GPT-2", resid_pdrop=0.1), heads=1)(input_ids=tokens, use_cache=False)
    reasons = ["does not run on a part", "cache of keys", "drops numbers"]
    assert [reason in each for reason, each in zip(reasons, said, strict=True)] == [True] * 3


def test_half_precision_is_added_up_in_fp32():
    """Under autocast the gradients are as near to those in float64 as with all heads at once."""
    found = []
    for heads in (None, 1):
        model = recompute(language_model().float(), heads=heads)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(model))
    true = gradients(language_model())
    errors = [((each - true).norm() / true.norm()).item() for each in found]
    assert errors[1] <= 1.2 * errors[0] < 0.05


@pytest.mark.parametrize("heads", [0, 1.5, True])
def test_wrong_numbers(heads):
    with pytest.raises(ValueError, match="heads"):
        recompute(language_model(), heads=heads)


def step_of(model):
    tokens = torch.zeros(1, 512, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return TrainingStep(
        model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss, optimizer, held={"x": [tokens]}
    )


def test_the_plan_is_that_of_a_step():
    """And groups need less."""
    peaks = []
    for heads in (None, 1):
        model = recompute(language_model(hidden_size=128).float(), backward="checkpoint8", tile=64, heads=heads)
        with fake_tensors():
            planned = simulate_step(step_of(fake_parameters(model, torch.device("cpu"))))
        peaks.append(planned.peak)
        if heads:
            check_plan(
                planned, step_of(recompute(language_model(hidden_size=128).float(), backward="checkpoint8", tile=64, heads=1))
            )
    assert peaks[1] < 0.95 * peaks[0]


def test_one_layer_for_queries_keys_and_values():
    """That of timm's attention."""
    found, x = [], torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for heads in (None, 1):
        torch.manual_seed(0)
        model = recompute(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).double(), heads=heads)
        model(x).square().mean().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert len(groups_of(model)) == 2 and torch.allclose(*found, rtol=1e-9, atol=1e-13)

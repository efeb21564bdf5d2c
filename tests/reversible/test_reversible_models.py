"""Models of Hugging Face, as their authors wrote them, with reversible blocks: what more they do with their blocks."""

import warnings

import pytest
import torch
from compared import assert_equal
from small_stacks import gradients

from holotrain.reversible import make_reversible
from holotrain.reversible.stack import stacks_in

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
TEXT = SIZES | {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
MARKS = {"image_token_id": 40, "vision_start_token_id": 41, "vision_end_token_id": 42, "video_token_id": 43}
SEEING = MARKS | {"text_config": GROUPED | {"rope_parameters": ROPE}, "vision_config": VISION}
MODELS = {  # the model, its configuration, its lists of blocks
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", TEXT | {"n_embd": 32, "n_layer": 4, "n_head": 2}, None),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, None),
    "mllama": ("MllamaForCausalLM", "MllamaTextConfig", GROUPED | {"cross_attention_layers": [1, 3]}, None),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", SEEING, "model.language_model.layers"),
}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(name, **options):
    """A model in training."""
    torch.manual_seed(0)
    cls, config, sizes, blocks = MODELS[name]
    config = getattr(transformers, config, None) or getattr(transformers.models.mllama, config)
    return make_reversible(getattr(transformers, cls)(config(**sizes)).double(), blocks, **options).train()


def run(net, **more):
    tokens = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(2))
    if net.config.model_type == "qwen3_vl":
        tokens = torch.tensor([[3, 41, 40, 40, 40, 40, 42, 5, 6]])
        more = {
            "pixel_values": draw(16, 48),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (tokens == 40).int(),
        }
    return net(input_ids=tokens, use_cache=False, **more).logits


@pytest.mark.parametrize(("name", "amp"), [("gpt2", True), ("llama", True), ("mllama", False), ("qwen3_vl", False)])
def test_gradients_equal_those_of_stored_blocks(name, amp):
    """Also where cross-attention is skipped without an image, and where features are added between blocks."""
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", message="the model changes the stream")
        for backward in ("autograd", "reversible"):
            net = made(name, backward=backward).to(torch.float32 if amp else torch.float64)
            found.append(gradients(net, steps=3, amp=amp, run=lambda x, net=net: run(net)))
    assert_equal(*found)
    assert len(found[0]) > 40 and sum(len(stack.blocks) for stack in stacks_in(net)) >= 4
    changes = [str(each.message) for each in said if "changes the stream" in str(each.message)]
    if name == "qwen3_vl":
        assert "between block 0 and block 1, block 1 and block 2; there it is stored" in changes[0]
        assert any("visual" in name for name in found[0])
    else:
        assert not changes


def test_gradient_checkpointing_beside_it_is_warned_of():
    net = made("gpt2")
    net.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match=r"turn it off with model.gradient_checkpointing_disable\(\)"):
        run(net)
    net.gradient_checkpointing_disable()
    with warnings.catch_warnings(action="error"):
        run(net)


def test_hidden_states_carry_gradients():
    """Each is a stream, of which a loss may be taken."""
    found, tokens = [], torch.arange(24).view(2, 12)
    for backward in ("autograd", "reversible"):
        net = made("llama", backward=backward)
        states = lambda x, net=net: net(tokens, output_hidden_states=True, use_cache=False).hidden_states  # noqa: E731
        found.append(gradients(net, run=lambda x, states=states: torch.stack(states(x))))
    assert_equal(*found)


def test_a_static_cache_is_refused():
    net = made("llama")
    with pytest.raises(ValueError, match="a block got a StaticCache in training, .* use_cache=False"):
        net(torch.arange(24).view(2, 12), past_key_values=transformers.StaticCache(config=net.config, max_cache_len=16))

"""Models of timm and Hugging Face, as their authors wrote them, with reversible blocks: what more they do with their blocks."""

import subprocess
import sys
import warnings

import pytest
import torch
from compared import assert_equal
from small_stacks import gradients

from holotrain.reversible import make_reversible
from holotrain.reversible.stack import stacks_in

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

IMAGE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}
IMAGE |= {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}
SIZES = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
TEXT = SIZES | {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
CODED = {"d_model": 32, "vocab_size": 50, "pad_token_id": 0, "decoder_start_token_id": 1} | {
    f"{part}_{size}": number
    for part in ("encoder", "decoder")
    for size, number in {"layers": 4, "attention_heads": 4, "ffn_dim": 64, "layerdrop": 0.3}.items()
}
SPOKEN = SIZES | {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
SPOKEN |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.3, "mask_time_prob": 0.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
MARKS = {"image_token_id": 40, "vision_start_token_id": 41, "vision_end_token_id": 42, "video_token_id": 43}
SEEING = MARKS | {"text_config": GROUPED | {"rope_parameters": ROPE}, "vision_config": VISION}
MODELS = {  # the model, its configuration, its lists of blocks
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", TEXT | {"n_embd": 32, "n_layer": 4, "n_head": 2}, None),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, None),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, None),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", CODED, ["model.encoder.layers", "model.decoder.layers"]),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPOKEN, None),
    "wavlm": ("WavLMForCTC", "WavLMConfig", SPOKEN, None),
    "mllama": ("MllamaForCausalLM", "MllamaTextConfig", GROUPED | {"cross_attention_layers": [1, 3]}, None),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", SEEING, "model.language_model.layers"),
}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(name, **options):
    """A model in training."""
    torch.manual_seed(0)
    if name == "vit":
        return make_reversible(timm.create_model("vit_tiny_patch16_224", **IMAGE).double(), **options).train()
    cls, config, sizes, blocks = MODELS[name]
    config = getattr(transformers, config, None) or getattr(transformers.models.mllama, config)
    return make_reversible(getattr(transformers, cls)(config(**sizes)).double(), blocks, **options).train()


def run(net, **more):
    if not hasattr(net, "config"):
        return net(draw(3, 3, 32, 32).to(next(net.parameters()).dtype))
    if net.main_input_name == "input_values":
        return net(draw(2, 400)).logits
    tokens = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0  # padding
    if net.config.model_type == "qwen3_vl":
        tokens = torch.tensor([[3, 41, 40, 40, 40, 40, 42, 5, 6]])
        more = {
            "pixel_values": draw(16, 48),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (tokens == 40).int(),
        }
    elif net.config.is_encoder_decoder:
        more = {"decoder_input_ids": tokens.flip(1), "attention_mask": mask}
    cache = {} if net.config.model_type == "bert" else {"use_cache": False}  # it stores keys in another layout
    return net(input_ids=tokens, **cache, **more).logits


@pytest.mark.parametrize("name", ["vit", *MODELS])
@pytest.mark.parametrize("amp", [False, True])
def test_gradients_equal_those_of_stored_blocks(name, amp):
    """Also of layers that are dropped at random, cross-attention that is skipped without an image, features added between."""
    if amp and name not in ("vit", "gpt2", "llama", "bert"):
        pytest.skip("as without")
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


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_text_is_generated_as_before(name):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    net, tokens = made(name).eval(), torch.arange(5, 17)[None]
    text = net.generate(tokens, **options)
    for length in range(12, 20):
        assert net(text[:, :length]).logits[0, -1].argmax() == text[0, length]


LOADING = """
import sys, torch, transformers
sys.modules["holotrain"] = None
folder, cls = sys.argv[1:]
net = getattr(transformers, cls).from_pretrained(folder).eval()
assert torch.equal(net(torch.arange(24).view(2, 12)).logits, torch.load(f"{folder}/logits.pt"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_trained_model_is_saved_and_loaded_without_holotrain(name, tmp_path):
    net = made(name).float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run(net).sum().backward()
    optimizer.step()
    net.eval().save_pretrained(tmp_path)
    torch.save(net(torch.arange(24).view(2, 12)).logits.detach(), tmp_path / "logits.pt")
    command = [sys.executable, "-c", LOADING, tmp_path, MODELS[name][0]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]

"""Models that do more than run their blocks one after another: they leave out some, return more than the stream, add to it
between two blocks, or change its shape in some."""

import warnings

import pytest
import torch
from compared import assert_equal
from covering import slow
from small_stacks import gradients

from holotrain.reversible import make_reversible, stacks_in

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIR = {"d_model": 32, "vocab_size": 50, "pad_token_id": 0, "decoder_start_token_id": 1}
T5 = PAIR | {"d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
CODED = PAIR | {
    f"{part}_{size}": number
    for part in ("encoder", "decoder")
    for size, number in {"layers": 4, "attention_heads": 4, "ffn_dim": 64, "layerdrop": 0.3}.items()
}
SPOKEN = SIZES | {
    "vocab_size": 20,
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
}
SPOKEN |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.3, "mask_time_prob": 0.0}
JAMBA = TEXT | {"num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 4}
ZAMBA = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
ZAMBA |= {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"], "n_mamba_heads": 4, "mamba_d_state": 8}
ZAMBA |= {"mamba_headdim": 16, "intermediate_size": 64, "num_mem_blocks": 1, "use_mem_rope": False, "adapter_rank": 4}

MODELS = {  # the model, its configuration, the list of blocks
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 50, "hidden_size": 32, "n_layer": 4, "n_head": 4}, None),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": 50, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
        None,
    ),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 50, "d_model": 32, "n_layers": 4, "n_heads": 4}, None),
    "roformer": ("RoFormerForMaskedLM", "RoFormerConfig", TEXT, None),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, None),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5, None),
    "longt5": ("LongT5ForConditionalGeneration", "LongT5Config", T5, None),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5 | {"num_experts": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        None,
    ),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", CODED, ["model.encoder.layers", "model.decoder.layers"]),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPOKEN, None),
    "wavlm": ("WavLMForCTC", "WavLMConfig", SPOKEN, None),
    "jamba": ("JambaForCausalLM", "JambaConfig", JAMBA, None),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", ZAMBA, None),
}


def made(name):
    model, config, options, blocks = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).double(), blocks


def run(net):
    draw = torch.Generator().manual_seed(4)
    if net.main_input_name == "input_values":
        return net(torch.randn(2, 400, generator=draw, dtype=torch.float64)).logits
    tokens = torch.randint(3, 50, (2, 10), generator=draw)
    more = {"decoder_input_ids": tokens.flip(1)} if net.config.is_encoder_decoder else {}
    return net(input_ids=tokens, use_cache=False, **more).logits  # a cache stores keys in another layout


def reversible(model, blocks, backward):
    make_reversible(model, blocks, backward=backward)
    return model.train()


QUICK = ("bloom", "t5", "wav2vec2", "zamba2", "m2m100")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in MODELS])
def test_gradients_equal_those_of_autograd(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model changes the stream")
        expected = gradients(reversible(*made(name), "autograd"), steps=3, run=run)
        net = reversible(*made(name), "reversible")
        assert_equal(gradients(net, steps=3, run=run), expected)
    assert sum(len(stack.blocks) for stack in stacks_in(net)) >= 4


VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
PROMPT = TEXT | {"num_key_value_heads": 2, "head_dim": 8}


def test_features_that_are_added_between_blocks():
    """Qwen3-VL's deepstack adds those of the image after each of the first text blocks."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3VLConfig(
        text_config=PROMPT | {"rope_parameters": rope},
        vision_config=VISION,
        image_token_id=40,
        vision_start_token_id=41,
        vision_end_token_id=42,
        video_token_id=43,
    )
    pixels = torch.randn(16, 3 * 4 * 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = torch.tensor([[3, 41, 40, 40, 40, 40, 42, 5, 6]])
    kinds = (tokens == 40).int()
    found = {}
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        net = transformers.Qwen3VLForConditionalGeneration(config).double()
        reversible(net, "model.language_model.layers", backward)
        with pytest.warns(UserWarning, match="between block 0 and block 1, block 1 and block 2; there it is stored"):
            found[backward] = gradients(
                net,
                run=lambda net: (
                    net(
                        input_ids=tokens, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]]), mm_token_type_ids=kinds
                    ).logits
                ),
            )
    assert any("visual" in name for name in found["autograd"])
    assert_equal(found["reversible"], found["autograd"])


def test_cross_attention_that_is_skipped_without_an_image():
    config = transformers.models.mllama.MllamaTextConfig(**PROMPT | {"cross_attention_layers": [1, 4]})
    found = {}
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        net = reversible(transformers.MllamaForCausalLM(config).double(), None, backward)
        found[backward] = gradients(net, run=run)
    assert_equal(found["reversible"], found["autograd"])


PARTS = {
    "hiera_tiny_224": (
        {"img_size": 64, "embed_dim": 8, "num_heads": 1, "stages": (1, 3, 3, 3)},
        ["blocks[2:4]", "blocks[5:7]", "blocks[8:]"],
    ),
    "maxvit_tiny_rw_224": (
        {"img_size": 64, "depths": (2, 3), "embed_dim": (32, 64), "stem_width": 16},
        ["stages.0.blocks[1:]", "stages.1.blocks[1:]"],
    ),
    "resnet26": ({}, ["layer1[1:]", "layer2[1:]"]),
    "mvitv2_tiny": ({"img_size": 64}, ["stages.2.blocks[1:]"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_lists_whose_first_block_changes_the_shape(name):
    options, blocks = PARTS[name]
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        net = timm.create_model(name, num_classes=3, **options).double()
        found[backward] = gradients(reversible(net, blocks, backward), run=lambda net: net(x))
    assert stacks_in(net)
    assert_equal(found["reversible"], found["autograd"])

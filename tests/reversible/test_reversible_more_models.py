"""Models that do more than run their blocks one after another: they leave out some, or add to the stream between two."""

import warnings

import pytest
import torch
from compared import assert_equal
from small_stacks import gradients

from holotrain.reversible import make_reversible, stacks_in

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIR = {"d_model": 32, "vocab_size": 50, "pad_token_id": 0, "decoder_start_token_id": 1}
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
MODELS = {  # the model, its configuration, the list of blocks
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", CODED, ["model.encoder.layers", "model.decoder.layers"]),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPOKEN, None),
    "wavlm": ("WavLMForCTC", "WavLMConfig", SPOKEN, None),
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


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_dropped_at_random(name):
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

"""Swin against timm's and published sizes, and the reversible one against its plain twin and plain autograd."""

import re

import pytest
import timm
import torch
from compared import assert_equal
from timm.models.swin_transformer import SwinTransformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holotrain.models import SWIN_SIZES, RevSwin, Swin
from holotrain.models.pretrained import load_pretrained
from holotrain.tasks.optimizers import decay_groups

# Liu et al. (ICCV 2021), table 1: parameters and multiply-accumulates at 224 pixels; the large one's as timm and its authors
# give them for that size. The products of attention are counted, as in the published figures.
PUBLISHED = {
    "tiny": (28.3e6, 4.5e9),
    "small": (49.6e6, 8.7e9),
    "base": (87.8e6, 15.4e9),
    "large": (196.5e6, 34.5e9),
}

# Five blocks in two stages, of odd and even depth, on maps of 6 and 3 tokens: shifted windows, windows that do not fill the
# map, a window as large as the map.
SMALL = {
    "image_size": 12,
    "patch_size": 2,
    "channels": 1,
    "classes": 5,
    "dim": 8,
    "depths": (3, 2),
    "heads": (1, 2),
    "window": 4,
}
RANDOM = {"dropout": 0.1, "attention_dropout": 0.2, "drop_path": 0.3}


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


def macs(model):
    with FlopCounterMode(display=False) as counter:
        model.eval()(torch.empty(1, 3, 224, 224, device="meta"))
    return counter.get_total_flops() / 2


def with_random_parameters(model):
    """None is left at a value, such as zero or one, that would hide that it is not used."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim == 1 or "table" in name else parameter[0].numel() ** -0.5
        nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, scale)
    return model.eval()


@pytest.mark.parametrize("size", ["tiny", *(pytest.param(size, marks=pytest.mark.slow) for size in ("small", "base", "large"))])
def test_sizes_are_the_published_ones_and_timms(size):
    parameters, published_macs = PUBLISHED[size]
    model = on_meta(Swin, **SWIN_SIZES[size])
    reference = on_meta(timm.create_model, f"swin_{size}_patch4_window7_224")
    assert parameter_count(model) == parameter_count(reference) == pytest.approx(parameters, rel=0.01)
    assert macs(model) == macs(reference) == pytest.approx(published_macs, rel=0.02)


def as_the_authors_name_them(weights):
    """A merging counts with the stage before it, the head is no module of several, and derived buffers are saved."""
    renamed = {
        re.sub(r"(?<=layers\.)\d+(?=\.downsample)", lambda stage: str(int(stage[0]) - 1), name).replace("head.fc.", "head."): x
        for name, x in weights.items()
    }
    derived = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(1), "layers.0.blocks.1.attn_mask": torch.zeros(1)}
    return renamed | derived


def test_outputs_of_weights_as_the_authors_name_them_are_timms():
    reference = with_random_parameters(timm.create_model("swin_tiny_patch4_window7_224"))
    model = Swin(**SWIN_SIZES["tiny"]).eval()
    loaded = load_pretrained(model, as_the_authors_name_them(reference.state_dict()))
    assert loaded.missing == loaded.unexpected == loaded.head == ()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        ours, theirs = model(images), reference(images)
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-5


@pytest.mark.parametrize(
    ("image_size", "window", "depths"),
    [(32, 4, (2, 2, 2)), (36, 5, (2, 3, 1)), (28, 4, (3, 2, 2)), (8, 16, (1, 2, 2))],
    ids=["windows fill maps", "maps of 18, 9 and 5", "maps of 14, 7 and 4", "windows larger than maps"],
)
def test_outputs_are_timms_on_maps_that_windows_do_not_fill(image_size, window, depths):
    shared = {"patch_size": 2, "depths": depths}
    reference = with_random_parameters(
        SwinTransformer(image_size, embed_dim=8, num_heads=(1, 2, 4), num_classes=5, window_size=window, **shared).double()
    )
    model = Swin(image_size, dim=8, heads=(1, 2, 4), classes=5, window=window, **shared).double().eval()
    loaded = load_pretrained(model, reference.state_dict())
    assert loaded.missing == loaded.unexpected == loaded.head == ()
    images = torch.randn(2, 3, image_size, image_size, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "said"),
    [("vit_tiny_patch16_224", "a timm ViT"), ("swinv2_tiny_window8_256", "no known model"), ("mvitv2_tiny", "a timm MViTv2")],
)
def test_weights_of_other_models_are_told_apart(name, said):
    with pytest.raises(ValueError, match=f"these weights are (for|of) {said}"):
        load_pretrained(on_meta(Swin), on_meta(timm.create_model, name).state_dict())


@pytest.mark.parametrize("size", SWIN_SIZES)
def test_the_twins_differ_in_what_two_streams_need(size):
    plain = {name: p.shape for name, p in on_meta(Swin, **SWIN_SIZES[size]).named_parameters()}
    reversible = {name: p.shape for name, p in on_meta(RevSwin, **SWIN_SIZES[size]).named_parameters()}
    shared, last = set(plain) & set(reversible), len(SWIN_SIZES[size]["depths"]) - 1
    assert {name for name in shared if plain[name] != reversible[name]} == {"head.weight"}
    assert set(plain) - shared == {"norm.weight", "norm.bias"}
    assert set(reversible) - shared == {
        *(f"stages.{stage}.fusion.project.{kind}" for stage in range(last) for kind in ("weight", "bias")),
        *(f"stages.{last}.fusion.norm.{kind}" for kind in ("weight", "bias")),
    }


def gradients(model_class, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = model_class(**SMALL, **RANDOM, **options).to(dtype)
    images = torch.randn(6, 1, 12, 12, dtype=dtype)
    model(images).logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_the_forward_takes_the_attention_kernel_of_its_recomputation():
    """Under autocast two kernels differ by the rounding of bf16, which would show as drift."""
    grads = []
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        model = RevSwin(**SMALL, backward=backward, exact=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(torch.randn(6, 1, 12, 12))
        logits.float().logsumexp(-1).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert ((grads[1] - grads[0]).abs().max() / grads[0].abs().max()).item() <= 1e-3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "engine",
    [
        {"backward": "checkpoint"},
        {"backward": "reversible"},
        {"backward": "pareprop"},
        {"backward": "reversible", "store": 3},
        {"backward": "pareprop", "store": (0, 4), "keep": ("attention",)},
    ],
    ids=str,
)
def test_gradients_of_every_schedule_are_equal(engine, exact):
    reference = gradients(RevSwin, backward="autograd", exact=exact)
    largest = max(grad.abs().max() for grad in reference.values())
    for name, grad in gradients(RevSwin, exact=exact, **engine).items():
        assert reference[name].abs().max() > 0, name
        error = ((grad - reference[name]).abs().max() / largest).item()
        assert error <= 1e-10, name


def test_options_of_the_engine_reach_every_stage_and_store_counts_through_them():
    model = RevSwin(**SMALL, backward="pareprop", store=3, exact=12, keep=("attention",))
    first, second = (stage.blocks for stage in model.stages)
    assert (first.store, second.store) == ([2], [0, 1])
    for blocks in (first, second):
        assert (blocks.backward, blocks.exact, blocks.keep) == ("pareprop", 12, ("attention",))


def test_each_stage_hands_on_the_average_of_its_streams_at_first():
    y1, y2 = torch.randn(2, 3, 6, 6, 8)
    torch.testing.assert_close(RevSwin(**SMALL).stages[0].fusion(y1, y2), (y1 + y2) / 2)


def test_initialisation_is_the_published_one():
    torch.manual_seed(0)
    for name, parameter in RevSwin(**SMALL | {"dim": 64, "heads": (8, 16), "window": 6}).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any() or name == "embedding.project.bias", name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "fusion" not in name and name != "embedding.project.weight":
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name


def test_rates_reach_every_block_and_drop_path_grows_through_all_stages():
    model = Swin(**SMALL, **RANDOM)
    blocks = [block for stage in model.stages for block in stage.blocks.blocks]
    rates = [0, 0.075, 0.15, 0.225, 0.3]
    assert [block.f.drop_path.probability for block in blocks] == pytest.approx(rates)
    assert [block.g.drop_path.probability for block in blocks] == pytest.approx(rates)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.1}


def test_attention_weights_are_dropped_in_training_alone():
    attention = Swin(**SMALL, attention_dropout=0.5).stages[1].blocks.blocks[1].f.attention
    x = torch.randn(2, 3, 3, 16)
    assert not torch.allclose(attention(x), attention(x))
    attention.eval()
    assert_equal(attention(x), attention(x))


def test_relative_positions_do_not_decay():
    model = on_meta(RevSwin, **SMALL)
    exempt = {id(p) for p in decay_groups(model, 0.05)[1]["params"]}
    tables = [p for name, p in model.named_parameters() if ".attention.bias." in name]
    assert len(tables) == 5 and all(id(table) in exempt for table in tables)

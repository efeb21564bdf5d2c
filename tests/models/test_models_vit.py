"""Vision transformers against published sizes, and the reversible one against its plain counterpart."""

import pytest
import timm
import torch
from compared import assert_equal
from torch.utils.flop_counter import FlopCounterMode

from holotrain.models import VIT_SIZES, MViT, RevMViT, RevSwin, RevViT, Swin, ViT
from holotrain.models.layers.blocks import AttentionBranch, MLPBranch

# Mangalam et al. (CVPR 2022), table 1; Dosovitskiy et al. (2021) for the large one: parameters and multiply-accumulates.
# The paper gives parameters in whole millions, so the small model's can only be held to half a million.
PUBLISHED = {"small": (22e6, 0.5e6, 4.6e9), "base": (87e6, 0.87e6, 17.6e9)}


def on_meta(model_class, size, **arguments):
    with torch.device("meta"):
        return model_class(**VIT_SIZES[size], **arguments)


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_the_published_ones(size):
    parameters, tolerance, macs = PUBLISHED[size]
    model = on_meta(RevViT, size)
    assert abs(parameter_count(model) - parameters) <= tolerance
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 224, 224, device="meta"))
    assert counter.get_total_flops() / 2 == pytest.approx(macs, rel=0.02)


@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_the_plain_twin_has_timms_parameters(size):
    with torch.device("meta"):
        reference = timm.create_model(f"vit_{size}_patch16_224", class_token=False, global_pool="avg")
    assert parameter_count(on_meta(ViT, size)) == parameter_count(reference)


@pytest.mark.parametrize("size", VIT_SIZES)
def test_the_twins_differ_in_the_head_alone(size):
    plain = {name: p.shape for name, p in on_meta(ViT, size).named_parameters()}
    reversible = {name: p.shape for name, p in on_meta(RevViT, size).named_parameters()}
    shared = set(plain) & set(reversible)
    assert {name for name in shared if plain[name] != reversible[name]} == {"head.weight"}
    assert set(plain) - shared == {"norm.weight", "norm.bias"}
    assert set(reversible) - shared == {"fusion.norm.weight", "fusion.norm.bias"}


@pytest.mark.parametrize("network", [ViT, RevViT, Swin, RevSwin, MViT, RevMViT])
def test_the_channels_of_streams_are_in_a_row(network):
    """A norm copies what is not, in each branch, forward and recomputation."""
    model, found = network(image_size=32, channels=3, classes=2), []
    for branch in model.modules():
        if isinstance(branch, AttentionBranch | MLPBranch):
            branch.register_forward_pre_hook(lambda branch, given: found.append(given[0].is_contiguous()))
    model(torch.ones(1, 3, 32, 32))
    assert found and all(found)


@pytest.mark.parametrize("pool", ["mean", "class"])
@pytest.mark.parametrize("backward", ["checkpoint", "reversible"])
@pytest.mark.parametrize(("image_size", "patch_size", "channels"), [(8, 2, 1), (32, 4, 3)])
def test_gradients_of_every_schedule_are_equal(image_size, patch_size, channels, backward, pool):
    grads = []
    for schedule in ("autograd", backward):
        torch.manual_seed(0)
        model = RevViT(
            image_size=image_size, patch_size=patch_size, channels=channels, classes=7, dim=24, depth=5, heads=3,
            dropout=0.1, attention_dropout=0.1, drop_path=0.2, pool=pool, backward=schedule,
        ).double()  # fmt: skip
        images = torch.randn(6, channels, image_size, image_size, dtype=torch.float64)
        model(images).logsumexp(-1).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert ((grads[1] - grads[0]).abs().max() / grads[0].abs().max()).item() <= 1e-10


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    model = ViT(image_size=8, patch_size=4, channels=1, dim=8, depth=4, heads=2, drop_path=0.4)
    drop = model.blocks.blocks[-1].g.drop_path
    assert drop.probability == pytest.approx(0.4)
    assert model.blocks.blocks[0].g.drop_path.probability == 0
    torch.manual_seed(0)
    out = drop(torch.ones(4000, 3, 2))
    assert set(out.unique().tolist()) == {0.0, out.max().item()}
    assert (out.flatten(1).std(dim=1) == 0).all()
    assert out.mean().item() == pytest.approx(1, abs=0.05)
    assert_equal(drop.eval()(torch.ones(3, 2, 2)), torch.ones(3, 2, 2))


@pytest.mark.parametrize("model_class", [ViT, RevViT])
def test_a_class_token_alone_is_read_by_the_head(model_class):
    """What the blocks give out for patches has no gradient."""
    torch.manual_seed(0)
    model = model_class(image_size=8, patch_size=4, channels=1, classes=3, dim=8, depth=2, heads=2, pool="class")
    outputs = []
    model.blocks.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    logits = model(torch.randn(2, 1, 8, 8))
    for gradient in torch.autograd.grad(logits.sum(), outputs[0] if isinstance(outputs[0], tuple) else outputs):
        assert gradient.shape == (2, 5, 8)
        assert gradient[:, 0].abs().max() > 0 and not gradient[:, 1:].any()


@pytest.mark.parametrize("model_class", [ViT, RevViT])
def test_layer_scale_begins_with_its_value(model_class):
    arguments = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 5, "dim": 16, "depth": 2, "heads": 2}
    without, with_scales = model_class(**arguments).state_dict(), model_class(**arguments, layer_scale=0.5).state_dict()
    added = {name: with_scales[name] for name in with_scales.keys() - without.keys()}
    assert {*added} == {f"blocks.blocks.{block}.{branch}.scale.weight" for block in (0, 1) for branch in "fg"}
    assert all(torch.equal(scale, torch.full((16,), 0.5)) for scale in added.values())
    with pytest.raises(ValueError, match="layer_scale must be at least 0, not -1"):
        model_class(**arguments, layer_scale=-1)


def test_blocks_of_scale_zero_do_nothing():
    model = ViT(image_size=8, patch_size=2, channels=1, classes=5, dim=16, depth=2, heads=2, layer_scale=0)
    tokens = torch.randn(2, 16, 16)
    assert_equal(model.blocks(tokens), tokens)


@pytest.mark.parametrize("backward", ["checkpoint", "reversible", "pareprop"])
def test_scales_have_the_gradients_of_every_schedule(backward):
    grads = []
    for schedule in ("autograd", backward):
        torch.manual_seed(0)
        arguments = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 5, "dim": 16, "depth": 3, "heads": 2}
        model = RevViT(**arguments, layer_scale=0.3, backward=schedule)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 1, 8, 8)).float().square().sum().backward()
        grads.append([parameter.grad for name, parameter in model.named_parameters() if ".scale." in name])
    assert len(grads[0]) == 6 and all(grad.abs().sum() > 0 for grad in grads[0])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)

"""Multi-scale vision transformers against published sizes and timm's, and the reversible one against its plain counterpart."""

import pytest
import timm
import torch
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holotrain.models import MVIT_SIZES, MViT, RevMViT
from holotrain.models.pretrained import load_pretrained

# Li et al. (CVPR 2022), table 1: millions of parameters, in whole ones, and 10^9 multiply-accumulates.
PUBLISHED = {"tiny": (24, 4.7), "small": (35, 7.0), "base": (52, 10.2)}
SMALL = {"image_size": 32, "channels": 3, "classes": 7, "dim": 8, "heads": 2}


def on_meta(model_class, size, **arguments):
    with torch.device("meta"):
        return model_class(**MVIT_SIZES[size], **arguments)


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


def multiply_adds(model):
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 224, 224, device="meta"))
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("model_class", [MViT, RevMViT])
@pytest.mark.parametrize("size", ["tiny", *(pytest.param(size, marks=pytest.mark.slow) for size in ("small", "base"))])
def test_sizes_are_the_published_ones_and_timms(size, model_class):
    """The products within attention are counted too, of both."""
    model = on_meta(model_class, size)
    with torch.device("meta"):
        reference = timm.create_model(f"mvitv2_{size}")
    millions, billions = PUBLISHED[size]
    assert parameter_count(model) == parameter_count(reference)
    assert abs(parameter_count(model) / 1e6 - millions) <= 0.5 + 0.01 * millions
    assert multiply_adds(model) == multiply_adds(reference)
    assert multiply_adds(model) / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_published_rev_mvit_has_its_published_size():
    """Mangalam et al. (CVPR 2022), table 2: Rev-MViT-B has 39 M parameters and 8.7 GFLOPs."""
    model = on_meta(RevMViT, "paper_base")
    assert parameter_count(model) / 1e6 == pytest.approx(39, rel=0.03)
    assert multiply_adds(model) / 1e9 == pytest.approx(8.7, rel=0.03)
    assert [len(stage.blocks.blocks) for stage in model.stages] == [1, 1, 10, 1]  # and transitions as blocks 1, 3 and 14


def scattered(model):
    """Norms, biases and relative positions as training leaves them, so that none of them is without effect."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def outputs_of_both(reference, images, **arguments):
    model = MViT(**arguments).double().eval()
    loaded = load_pretrained(model, reference.state_dict())
    assert loaded.missing == loaded.unexpected == loaded.head == ()
    with torch.no_grad():
        return model(images), reference(images)


@pytest.mark.parametrize(("depths", "heads", "kv_stride", "size"), [((1, 2, 3), 2, 4, 64), ((2, 1, 1, 2), 1, 2, 32)])
def test_outputs_are_timms(depths, heads, kv_stride, size):
    torch.manual_seed(0)
    stages = len(depths)
    cfg = MultiScaleVitCfg(
        depths=depths, embed_dim=8, num_heads=heads, mlp_ratio=2.0, stride_kv_adaptive=(kv_stride,) * 2,
        stride_q=((1, 1), *((2, 2),) * (stages - 1)),
    )  # fmt: skip
    reference = scattered(MultiScaleVit(cfg, img_size=(size, size), in_chans=1, num_classes=5))
    images = torch.randn(2, 1, size, size, dtype=torch.float64)
    ours, theirs = outputs_of_both(
        reference, images, image_size=size, channels=1, classes=5, dim=8, depths=depths, heads=heads, mlp_ratio=2.0,
        kv_stride=kv_stride,
    )  # fmt: skip
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-10


@pytest.mark.slow
def test_outputs_of_a_published_size_are_timms():
    torch.manual_seed(0)
    reference = scattered(timm.create_model("mvitv2_tiny", num_classes=10))
    ours, theirs = outputs_of_both(
        reference, torch.randn(1, 3, 224, 224, dtype=torch.float64), classes=10, **MVIT_SIZES["tiny"]
    )
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-10


@pytest.mark.parametrize(("name", "tensor"), [("mvitv2_small_cls", "cls_token"), ("mvitv2_large", "shortcut_proj_mlp")])
def test_weights_with_tensors_that_ours_lack_are_refused(name, tensor):
    with torch.device("meta"):
        weights = timm.create_model(name).state_dict()
    with pytest.raises(ValueError, match=f"no place for .*{tensor}"):
        load_pretrained(on_meta(MViT, "small"), weights)


def test_streams_start_as_one_and_end_as_their_average():
    torch.manual_seed(0)
    model = scattered(RevMViT(**SMALL, depths=(1, 2)))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    x = model.embedding(images)
    for stage in model.stages:
        x = stage.transition(x)
        y1 = x + stage.blocks.blocks[0].f(x)
        y2 = x + stage.blocks.blocks[0].g(y1)
        x = (y1 + y2) / 2
    torch.testing.assert_close(model(images), model.head(model.norm(x).mean(dim=(1, 2))))


def as_published(model, images):
    """The output of a published Rev-MViT, from its weights: products and softmax written out, and one head after the other."""
    weights = model.state_dict()

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def pool(x, name, stride):  # (B, S, S, D): the nine neighbours of every stride-th token, those outside zero
        kernel, (_, size, _, _) = weights[f"{name}.conv.weight"], x.shape
        x = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
        shifted = ((kernel[:, 0, i, j], x[:, i : i + size : stride, j : j + size : stride]) for i in range(3) for j in range(3))
        return norm(sum(factor * neighbours for factor, neighbours in shifted), f"{name}.norm")

    def attention(x, name, heads, stride_q, stride_kv):
        normed, name, found = norm(x, f"{name}.norm"), f"{name}.attention", []
        of_heads = (part.chunk(heads, -1) for part in linear(normed, f"{name}.qkv").chunk(3, -1))
        for q, k, v in zip(*of_heads, strict=True):
            q = pool(q, f"{name}.pool_q", stride_q) if stride_q > 1 else q
            k, v = pool(k, f"{name}.pool_k", stride_kv).flatten(1, 2), pool(v, f"{name}.pool_v", stride_kv).flatten(1, 2)
            scores = q.flatten(1, 2) @ k.mT / q.shape[-1] ** 0.5
            found.append((scores.softmax(-1) @ v).view_as(q))
        return linear(torch.cat(found, -1), f"{name}.project")

    def perceptron(x, widen, narrow):
        return linear(nn.functional.gelu(linear(x, widen)), narrow)

    def mlp(x, name):
        return perceptron(norm(x, f"{name}.norm"), f"{name}.widen", f"{name}.narrow")

    project = weights["embedding.project.weight"], weights["embedding.project.bias"]
    x = nn.functional.conv2d(images, *project, stride=4, padding=3).permute(0, 2, 3, 1) + weights["embedding.position"]
    heads, stride_kv = 1, 4
    for number, stage in enumerate(model.stages):
        if number > 0:
            name = f"stages.{number}.transition"
            heads, stride_kv = 2 * heads, max(stride_kv // 2, 1)
            x = x + perceptron(x, f"{name}.fusion.0", f"{name}.fusion.2")
            pooled = [pool(part, f"{name}.f.attention.pool_q", 2) for part in x.chunk(heads, -1)]
            x = torch.cat(pooled, -1) + attention(x, f"{name}.f", heads, 2, stride_kv)
            x = x + mlp(x, f"{name}.g")
        y1 = y2 = x
        for block in range(len(stage.blocks.blocks)):
            name = f"stages.{number}.blocks.blocks.{block}"
            y1 = y1 + attention(y2, f"{name}.f", heads, 1, stride_kv)
            y2 = y2 + mlp(y1, f"{name}.g")
        x = torch.cat((y1, y2), -1)
    return linear(norm(x, "norm").mean((1, 2)), "head")


def test_outputs_of_the_published_design_are_those_of_its_formulas():
    torch.manual_seed(0)
    sizes = {"image_size": 64, "classes": 5, "dim": 8, "depths": (1, 2, 3, 2), "kv_stride": 4}
    model = scattered(RevMViT(**sizes, design="rev_mvit"))
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        ours, expected = model(images), as_published(model, images)
    assert ((ours - expected).abs().max() / expected.abs().max()).item() <= 1e-10


def gradients(model_class=RevMViT, **arguments):
    torch.manual_seed(0)
    model = model_class(**SMALL, dropout=0.1, drop_path=0.3, **arguments).double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model(images).logsumexp(-1).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


ENGINES = [
    {"backward": "checkpoint"},
    {"backward": "reversible"},
    {"backward": "pareprop"},
    {"backward": "reversible", "store": 2},
    {"backward": "pareprop", "store": (0, 3)},
    {"backward": "reversible", "exact": True},
    {"backward": "reversible", "keep": ("attention",)},
]


@pytest.mark.parametrize(
    ("depths", "design"), [((1, 2, 5, 2), "mvitv2"), ((2, 3, 4), "mvitv2"), ((1, 2, 5), "rev_mvit")], ids=str
)  # reversible blocks: 1, 1, 4, 1 and 2, 2, 3 and 1, 1, 4
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_gradients_of_every_schedule_are_equal(engine, depths, design):
    reference = gradients(depths=depths, design=design, backward="autograd", exact=engine.get("exact", False))
    grads = gradients(depths=depths, design=design, **engine)
    assert ((grads - reference).abs().max() / reference.abs().max()).item() <= 1e-10


@pytest.mark.parametrize("exact", [False, True])
def test_the_forward_takes_the_attention_kernel_of_its_recomputation(exact):
    """Under autocast two kernels differ by the rounding of bf16, which would show as drift."""
    grads = []
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        model = RevMViT(**SMALL, depths=(2, 3, 4), backward=backward, exact=exact)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(torch.randn(4, 3, 32, 32))
        logits.float().logsumexp(-1).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert ((grads[1] - grads[0]).abs().max() / grads[0].abs().max()).item() <= 1e-3


def test_the_reversible_blocks_are_counted_through_all_stages():
    model = RevMViT(**SMALL, depths=(2, 3, 1, 3), store=3)
    assert [len(stage.blocks.blocks) for stage in model.stages] == [2, 2, 0, 2]
    assert [stage.blocks.store for stage in model.stages] == [[], [1], [], [0, 1]]
    with pytest.raises(ValueError, match="blocks up to 6"):
        RevMViT(**SMALL, depths=(2, 3, 1, 3), store=7)


def test_drop_path_grows_through_all_blocks():
    model = MViT(**SMALL, depths=(2, 3), drop_path=0.4)
    first, last = model.stages
    blocks = [*first.blocks.blocks, last.transition, *last.blocks.blocks]
    rates = [0.0, 0.1, 0.2, 0.3, 0.4]
    assert [block.f.drop_path.probability for block in blocks] == pytest.approx(rates)
    assert [block.g.drop_path.probability for block in blocks] == pytest.approx(rates)


def test_relative_positions_do_not_start_from_zero():
    torch.manual_seed(0)
    attention = MViT(**SMALL | {"dim": 64, "heads": 1}, depths=(1,)).stages[0].blocks.blocks[0].f.attention
    for table in (attention.height_position, attention.width_position):
        assert table.shape == (15, 64)
        assert table.std().item() == pytest.approx(0.02, rel=0.1)

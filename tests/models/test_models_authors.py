"""Weights under the names of the authors of reversible networks of images: outputs against their networks, which are written
here as functions of those weights, in float64. What such a function reads is the layout of the file."""

import pytest
import torch
from compared import assert_close
from torch.nn import functional as F

from holotrain.models import RevMViT, RevSwin, RevViT, ViT
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.pretrained import load_pretrained

COMMON = {"channels": 3, "classes": 5}
VIT = COMMON | {"image_size": 32, "patch_size": 8, "dim": 16, "depth": 3, "heads": 4}
MVIT = COMMON | {"image_size": 64, "dim": 8, "depths": (1, 2, 3), "heads": 1, "kv_stride": 4, "design": "rev_mvit"}
SWIN = (
    COMMON
    | {"image_size": 16, "patch_size": 2, "dim": 8, "depths": (2, 3), "heads": (2, 4), "window": 4}
    | {"fusion": "mlp", "shift_all": True}
)


class Weights(dict):
    """Weights by name, which are drawn when they are first read."""

    def read(self, name, *shape):
        if name not in self:
            generator = torch.Generator().manual_seed(len(self))
            scale = 0.5 if len(shape) == 1 else torch.Size(shape[1:]).numel() ** -0.5
            self[name] = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return self[name]

    def linear(self, name, x, out):
        return F.linear(x, self.read(f"{name}.weight", out, x.shape[-1]), self.read(f"{name}.bias", out))

    def norm(self, name, x, eps):
        width = x.shape[-1]
        return F.layer_norm(x, (width,), self.read(f"{name}.weight", width), self.read(f"{name}.bias", width), eps)

    def mlp(self, name, x, hidden, out):
        return self.linear(f"{name}.fc2", F.gelu(self.linear(f"{name}.fc1", x, hidden)), out)

    def patches(self, name, images, out, kernel, stride, padding=0):
        weight = self.read(f"{name}.weight", out, images.shape[1], kernel, kernel)
        return F.conv2d(images, weight, self.read(f"{name}.bias", out), stride, padding)


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def softmax_attention(q, k, v, added=0):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + added, dim=-1) @ v


def pooled(w, name, x, stride, size):
    """SlowFast pools (B, N, S * S, D) as a video of one frame."""
    batch, width = x.shape[0], x.shape[-1]
    video = x.flatten(0, 1).mT.unflatten(-1, (1, size, size))
    kernel = w.read(f"{name[0]}.weight", width, 1, 1, 3, 3)
    video = F.conv3d(video, kernel, stride=(1, stride, stride), padding=(0, 1, 1), groups=width)
    return w.norm(name[1], video.flatten(2).mT.unflatten(0, (batch, -1)), 1e-6)


def attention_of_slowfast(w, name, x, heads, out, strides=None, size=0):
    """``strides``: of queries (1: not pooled) and of keys; None: nothing is pooled."""
    x = w.norm(f"{name}.norm", x, 1e-6)
    q, k, v = (heads_of(w.linear(f"{name}.attn.{part}", x, out), heads) for part in "qkv")
    if strides is not None:
        names = {part: (f"{name}.attn.pool_{part}", f"{name}.attn.norm_{part}") for part in "qkv"}
        q = pooled(w, names["q"], q, strides[0], size) if strides[0] > 1 else q
        k, v = pooled(w, names["k"], k, strides[1], size), pooled(w, names["v"], v, strides[1], size)
    return w.linear(f"{name}.attn.proj", softmax_attention(q, k, v).transpose(1, 2).flatten(2), out)


def mlp_of_slowfast(w, name, x):
    return w.mlp(f"{name}.mlp", w.norm(f"{name}.norm", x, 1e-6), 4 * x.shape[-1], x.shape[-1])


def head_of_slowfast(w, streams):
    return w.linear("head.projection", w.norm("norm", torch.cat(streams, dim=-1), 1e-6).mean(1), COMMON["classes"])


def rev_vit(w, images):
    """configs/ImageNet/REV_VIT_S.yaml and REV_VIT_B.yaml."""
    dim, size = VIT["dim"], VIT["patch_size"]
    x = w.patches("patch_embed.proj", images, dim, size, size).flatten(2).mT
    x1 = x2 = x + w.read("pos_embed", 1, x.shape[1], dim)
    for layer in range(VIT["depth"]):
        name = f"rev_backbone.layers.{layer}"
        x1 = x1 + attention_of_slowfast(w, f"{name}.F", x2, VIT["heads"], dim)
        x2 = x2 + mlp_of_slowfast(w, f"{name}.G", x1)
    return head_of_slowfast(w, (x1, x2))


def rev_mvit(w, images):
    """configs/ImageNet/REV_MVIT_B_16_CONV.yaml: the buffer layers begin a stage."""
    dim, heads, stride, layer, size = MVIT["dim"], MVIT["heads"], MVIT["kv_stride"], 0, images.shape[-1] // 4
    x = w.patches("patch_embed.proj", images, dim, 7, 4, 3).flatten(2).mT
    x = x1 = x2 = x + w.read("pos_embed", 1, x.shape[1], dim)
    for stage, depth in enumerate(MVIT["depths"]):
        if stage:
            name, dim, heads, stride = f"rev_backbone.layers.{layer}", 2 * dim, 2 * heads, max(stride // 2, 1)
            x = torch.cat((x1, x2), dim=-1)
            x = x + w.mlp(f"{name}.pre_q_fuse.fuse_fn", x, 2 * dim, dim)
            attended = attention_of_slowfast(w, f"{name}.F", x, heads, dim, (2, stride), size)
            queries = (f"{name}.F.attn.pool_q", f"{name}.F.attn.norm_q")
            x = pooled(w, queries, heads_of(x, heads), 2, size).transpose(1, 2).flatten(2) + attended
            x = x + mlp_of_slowfast(w, f"{name}.G", x)
            size, layer = size // 2, layer + 1
        x1 = x2 = x
        for _ in range(depth - (stage > 0)):
            name = f"rev_backbone.layers.{layer}"
            x1 = x1 + attention_of_slowfast(w, f"{name}.F", x2, heads, dim, (1, stride), size)
            x2 = x2 + mlp_of_slowfast(w, f"{name}.G", x1)
            layer += 1
    return head_of_slowfast(w, (x1, x2))


def windows_of_minrev(x, window):
    """(B, S, S, C) -> (B * N, window^2, C)."""
    x = x.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
    return x.reshape(-1, window**2, x.shape[-1])


def attention_of_minrev(w, name, x, heads, window, shift):
    """The windows of a map (B, S, S, C), and -100 between tokens whose regions differ."""
    size, width, at = x.shape[1], x.shape[-1], torch.arange(window)
    region = torch.zeros(1, size, size, 1)
    parts = (slice(0, -window), slice(-window, -shift or None), slice(-shift, None) if shift else slice(0, 0))
    for number, (rows, columns) in enumerate((a, b) for a in parts for b in parts):
        region[:, rows, columns] = number
    region = windows_of_minrev(region, window)
    mask = -100.0 * (region != region.mT) if shift else torch.zeros(len(region), window**2, window**2)
    moved = windows_of_minrev(x.roll((-shift, -shift), (1, 2)), window)
    q, k, v = (heads_of(part, heads) for part in w.linear(f"{name}.qkv", moved, 3 * width).split(width, dim=-1))
    table = w.read(f"{name}.relative_position_bias_table", (2 * window - 1) ** 2, heads)
    steps = (at[:, None] - at + window - 1).double()
    index = (steps[:, None, :, None] * (2 * window - 1) + steps[None, :, None, :]).reshape(window**2, window**2).long()
    w[f"{name}.relative_position_index"] = index
    added = table[index].permute(2, 0, 1) + mask.repeat(len(x), 1, 1)[:, None]
    out = w.linear(f"{name}.proj", softmax_attention(q, k, v, added).transpose(1, 2).flatten(2), width)
    across = size // window
    out = out.reshape(len(x), across, across, window, window, width).transpose(2, 3).reshape(x.shape)
    return out.roll((shift, shift), (1, 2))


def rev_swin(w, images):
    """minREV's revswin.py: the second, fourth ... block of each stage is shifted, also where the map is one window."""
    dim, window, depths = SWIN["dim"], SWIN["window"], SWIN["depths"]
    size = SWIN["patch_size"]
    x = w.norm("patch_embed.norm", w.patches("patch_embed.proj", images, dim, size, size).permute(0, 2, 3, 1), 1e-5)
    for stage, depth in enumerate(depths):
        x1 = x2 = x
        for block in range(depth):
            name, shift = f"layers.{stage}.blocks.{block}", window // 2 * (block % 2)
            normed = w.norm(f"{name}.norm1", x2, 1e-5)
            x1 = x1 + attention_of_minrev(w, f"{name}.attn", normed, SWIN["heads"][stage], window, shift)
            x2 = x2 + w.mlp(f"{name}.mlp", w.norm(f"{name}.norm2", x1, 1e-5), 4 * dim, dim)
        x = torch.cat((x1, x2), dim=-1)
        if stage < len(depths) - 1:
            x = w.mlp(f"layers.{stage}.lateral_fuse.fuse_fn", x, 2 * dim, dim)
            x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
            x = w.norm(f"layers.{stage}.downsample.norm", x, 1e-5)
            x = F.linear(x, w.read(f"layers.{stage}.downsample.reduction.weight", 2 * dim, 4 * dim))
            dim = 2 * dim
    return w.linear("head", w.norm("norm", x, 1e-5).mean((1, 2)), COMMON["classes"])


NETWORKS = {"vit": (RevViT, VIT, rev_vit), "mvit": (RevMViT, MVIT, rev_mvit), "swin": (RevSwin, SWIN, rev_swin)}


def drawn(name):
    """The authors' weights, images, and what their network makes of them."""
    size, weights = NETWORKS[name][1]["image_size"], Weights()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return weights, images, NETWORKS[name][2](weights, images)


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_authors_weights_make_their_network(tmp_path, name):
    weights, images, theirs = drawn(name)
    torch.save({"epoch": 300, "model_state": dict(weights), "optimizer_state": {}, "cfg": "MVIT:\n"}, tmp_path / "theirs.pyth")
    kind, sizes, _ = NETWORKS[name]
    model = kind(**sizes).double().eval()
    loaded = load_pretrained(model, read_weights(tmp_path / "theirs.pyth"))
    assert (loaded.missing, loaded.unexpected, loaded.head, loaded.resized) == ((), (), (), ())
    assert_close(model(images), theirs, rtol=0, atol=1e-10)


def grown(weights):
    """Of videos: another kernel in time."""
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"][:, :, None].expand(-1, -1, 3, -1, -1)
    return weights


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "model", "change", "message"),
    [
        ("swin", lambda: RevSwin(**SWIN | {"fusion": "linear"}), dict, "fusion=mlp and shift_all=true"),
        ("swin", lambda: RevSwin(**SWIN | {"shift_all": False}), dict, "fusion=mlp and shift_all=true"),
        ("swin", lambda: RevViT(**VIT), dict, "fusion=mlp and shift_all=true"),
        ("mvit", lambda: RevMViT(**MVIT | {"design": "mvitv2"}), dict, "rev_mvit_paper_base take them"),
        ("mvit", lambda: RevSwin(**SWIN), dict, "rev_mvit_paper_base take them"),
        ("mvit", lambda: RevMViT(**MVIT), grown, r"embedding.project.weight is \(8, 3, 3, 7, 7\) there and \(8, 3, 7, 7\)"),
        ("vit", lambda: RevViT(**VIT | {"dim": 24}), dict, r"q.weight is \(16, 16\) there, not \(24, 24\)"),
    ],
)
def test_weights_of_other_networks_are_refused(name, model, change, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(model(), change(drawn(name)[0]))


@pytest.mark.parametrize("name", ["vit", "mvit"])
def test_positions_follow_the_image(name):
    kind, sizes, _ = NETWORKS[name]
    model = kind(**sizes | {"image_size": 2 * sizes["image_size"], "classes": 7})
    loaded = load_pretrained(model, drawn(name)[0])
    assert loaded.resized == ("embedding.position",) and set(loaded.head) == {"head.weight", "head.bias"}


def test_a_plain_model_takes_the_branches():
    loaded = load_pretrained(ViT(**VIT), drawn("vit")[0])
    assert len([name for name in loaded.loaded if name.startswith("blocks.")]) == 36 and loaded.missing == (
        "norm.weight",
        "norm.bias",
    )

"""Published weights: outputs against the libraries they come from, and what a model of another form takes over."""

import re

import pytest
import timm
import torch
import transformers
from compared import assert_close, assert_equal
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification

from holotrain.models import GPT, MViT, RevGPT, RevRoBERTa, RevSwin, RevViT, RoBERTa, Swin, ViT
from holotrain.models.adapters import add_adapters
from holotrain.models.pretrained import load_pretrained

transformers.utils.logging.set_verbosity_error()

IMAGE = {"image_size": 8, "patch_size": 2, "classes": 5, "dim": 16, "depth": 3, "heads": 2}
WINDOWS = {"image_size": 16, "patch_size": 2, "classes": 5, "dim": 8, "depths": (2, 1), "heads": (1, 2), "window": 4}
TEXT = {"vocab": 40, "context": 12, "dim": 16, "depth": 3, "heads": 2}
ENCODER = TEXT | {"dropout": 0.0, "attention_dropout": 0.0}
POOLS = {"class": {}, "mean": {"class_token": False, "global_pool": "avg"}}


def randomised(model):
    """None is left at a value, such as zero or one, that would hide that it is not used."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim == 1 or "table" in name else parameter[0].numel() ** -0.5
        nn.init.normal_(parameter, 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, scale)
    return model.eval()


def timm_vit(image_size=8, **options):
    return randomised(VisionTransformer(image_size, patch_size=2, num_classes=5, embed_dim=16, depth=3, num_heads=2, **options))


def timm_swin():
    sizes = {"embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4, "num_classes": 5}
    return randomised(SwinTransformer(16, patch_size=2, **sizes))


def gpt2():
    return randomised(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=3, n_head=2)))


def roberta(kind=RobertaForMaskedLM, classes=2):
    return randomised(
        kind(
            RobertaConfig(
                vocab_size=40, max_position_embeddings=14, type_vocab_size=1, hidden_size=16, num_hidden_layers=3,
                num_attention_heads=2, intermediate_size=64, layer_norm_eps=1e-5, num_labels=classes,
            )
        )
    )  # fmt: skip


def assert_same(ours, theirs):
    assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def images(size):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def words():
    return torch.randint(2, 40, (3, 12), generator=torch.Generator().manual_seed(1))  # 1 is RoBERTa's padding


@torch.no_grad()
@pytest.mark.parametrize("size", [8, 12, 4])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("pool", POOLS)
def test_vit_is_timms_at_every_image_size(pool, scale, size):
    weights, reference = (timm_vit(each, init_values=scale, **POOLS[pool]) for each in (8, size))
    weights = weights.state_dict()
    reference.load_state_dict(checkpoint_filter_fn(dict(weights), reference, interpolation="bicubic", antialias=True))
    model = ViT(**IMAGE | {"image_size": size}, pool=pool, layer_scale=scale).eval()
    loaded = load_pretrained(model, weights)
    assert loaded.missing == () and loaded.resized == (() if size == 8 else ("embedding.position",))
    assert_same(model(images(size)), reference(images(size)))


def as_the_authors_name_them(weights):
    """A merging counts with the stage before it, the head is no module of several, and derived buffers are saved."""
    renamed = {
        re.sub(r"(?<=layers\.)\d+(?=\.downsample)", lambda stage: str(int(stage[0]) - 1), name).replace("head.fc.", "head."): x
        for name, x in weights.items()
    }
    derived = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(1), "layers.0.blocks.1.attn_mask": torch.zeros(1)}
    return renamed | derived


def windows(image_size, window, depths):
    """Swin and timm's."""
    shared = {"patch_size": 2, "depths": depths}
    theirs = SwinTransformer(image_size, embed_dim=8, num_heads=(1, 2, 4), num_classes=5, window_size=window, **shared)
    return Swin(image_size, dim=8, heads=(1, 2, 4), classes=5, window=window, **shared), theirs


def pooled(image_size, depths, heads, kv_stride):
    """MViT and timm's."""
    cfg = MultiScaleVitCfg(
        depths=depths, embed_dim=8, num_heads=heads, mlp_ratio=2.0, stride_kv_adaptive=(kv_stride,) * 2,
        stride_q=((1, 1), *((2, 2),) * (len(depths) - 1)),
    )  # fmt: skip
    sizes = {"dim": 8, "depths": depths, "heads": heads, "mlp_ratio": 2.0, "kv_stride": kv_stride}
    return MViT(image_size, classes=5, **sizes), MultiScaleVit(cfg, img_size=(image_size, image_size), num_classes=5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("both", "size"),
    [
        pytest.param(lambda: windows(32, 4, (2, 2, 2)), 32, id="swin, windows fill maps"),
        pytest.param(lambda: windows(36, 5, (2, 3, 1)), 36, id="swin, maps of 18, 9 and 5"),
        pytest.param(lambda: windows(28, 4, (3, 2, 2)), 28, id="swin, maps of 14, 7 and 4"),
        pytest.param(lambda: windows(8, 16, (1, 2, 2)), 8, id="swin, windows larger than maps"),
        pytest.param(lambda: pooled(64, (1, 2, 3), 2, 4), 64, id="mvit, three stages"),
        pytest.param(lambda: pooled(32, (2, 1, 1, 2), 1, 2), 32, id="mvit, four stages"),
    ],
)
def test_models_of_images_are_timms_in_float64(both, size):
    model, reference = (each.double().eval() for each in both())
    weights = randomised(reference).state_dict()
    for named in (weights, as_the_authors_name_them(weights)) if isinstance(model, Swin) else (weights,):
        loaded = load_pretrained(model, named)
        assert loaded.missing == loaded.unexpected == loaded.head == loaded.resized == ()
    ours, theirs = model(images(size).double()), reference(images(size).double())
    assert_close(ours, theirs, rtol=0, atol=1e-10 * min(1, theirs.abs().max().item()))


@torch.no_grad()
@pytest.mark.parametrize("context", [12, 7])
@pytest.mark.parametrize("bare", [False, True])
def test_gpt2_is_transformers(bare, context):
    """A shorter one takes the first positions."""
    reference = gpt2()
    model = GPT(**TEXT | {"context": context}, positions="learned", gelu="tanh").eval()
    weights = reference.transformer.state_dict() if bare else reference.state_dict()
    masks = {f"{'' if bare else 'transformer.'}h.0.attn.{name}": torch.ones(1, 1, 12, 12) for name in ("bias", "masked_bias")}
    loaded = load_pretrained(model, weights | masks)
    assert loaded.missing == loaded.unexpected == ()
    assert loaded.resized == (() if context == 12 else ("embedding.position",))
    assert_same(model(words()[:, :context]), reference(words()[:, :context]).logits)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "classes"), [(RobertaForMaskedLM, None), (RobertaForSequenceClassification, 4)])
def test_roberta_is_transformers(kind, classes):
    reference = roberta(kind, classes or 2)
    model = RoBERTa(**ENCODER, norm="post", classes=classes).eval()
    weights = reference.state_dict() | {"roberta.embeddings.position_ids": torch.arange(14)[None]}
    loaded = load_pretrained(model, weights)
    assert loaded.missing == loaded.unexpected == loaded.head == ()
    mask = torch.arange(12) < torch.tensor([12, 7, 3])[:, None]
    tokens = words().where(mask, 1)
    ours, theirs = model(tokens, mask), reference(tokens, attention_mask=mask.long()).logits
    assert_same(ours, theirs) if classes else assert_same(ours[mask], theirs[mask])
    assert not torch.allclose(model(tokens)[0], ours[1], atol=1e-3)  # the mask does something


def branches(model):
    return {name for name in model.state_dict() if ".f." in name or ".g." in name}


REVERSIBLE = {
    "vit": (RevViT, IMAGE, timm_vit, {"embedding.class_token"}),
    "swin": (RevSwin, WINDOWS, timm_swin, set()),
    "gpt": (RevGPT, TEXT | {"positions": "learned", "gelu": "tanh"}, gpt2, set()),
    "roberta": (RevRoBERTa, ENCODER, roberta, set()),
}


@pytest.mark.parametrize("family", REVERSIBLE)
def test_reversible_models_take_over_f_and_g(family):
    model_class, arguments, reference, unexpected = REVERSIBLE[family]
    model = model_class(**arguments)
    loaded = load_pretrained(model, reference().state_dict())
    assert branches(model) <= set(loaded.loaded) and len(branches(model)) >= 24
    rest = {name for name, _ in model.named_parameters()} - set(loaded.loaded)
    assert set(loaded.missing) == {name for name in rest if "fusion" in name}
    assert set(loaded.head) == rest - set(loaded.missing) == ({"head.weight", "head.bias"} if "fusion" in str(rest) else set())
    norm = {"norm.weight", "norm.bias"} if "fusion" in str(rest) else set()  # the plain model's last
    assert set(loaded.unexpected) == unexpected | norm


@torch.no_grad()
def test_a_pre_norm_branch_reads_what_its_post_norm_one_read():
    """Of each block, given the same residual stream, before and after its attention's norm."""
    post, pre = RoBERTa(**ENCODER, norm="post").eval(), RoBERTa(**ENCODER).eval()
    reference = roberta().state_dict()
    load_pretrained(post, reference)
    load_pretrained(pre, reference)
    x = torch.randn(2, 5, 16)
    behind = [post.embedding.norm, *(norm for block in post.blocks.blocks for norm in (block.f.norm, block.g.norm))]
    updates = [update for block in post.blocks.blocks for update in (block.f.update, block.g.update)]
    forwards = [branch for block in pre.blocks.blocks for branch in (block.f, block.g)]
    for norm, update, branch in zip(behind[:-1], updates, forwards, strict=True):
        assert_equal(branch(x), update(norm(x)))
    assert_equal(pre.norm(x), behind[-1](x))
    assert not torch.allclose(post(words()), pre(words()), atol=1e-2)  # as pre_norm says


def test_class_tokens_come_and_go():
    ours, weights = ViT(**IMAGE, pool="class").state_dict(), timm_vit().state_dict()
    for given, position in ((ours, "embedding.position"), (weights, "pos_embed")):
        model = ViT(**IMAGE)
        loaded = load_pretrained(model, given)
        assert (loaded.missing, loaded.unexpected) == ((), ("embedding.class_token",))
        assert_equal(model.embedding.position, given[position][:, 1:])
    model = ViT(**IMAGE, pool="class")
    first, weights = model.embedding.position[:, :1].clone(), timm_vit(**POOLS["mean"]).state_dict()
    loaded = load_pretrained(model, weights)
    assert (loaded.missing, loaded.unexpected) == (("embedding.class_token",), ())
    assert_equal(model.embedding.position, torch.cat((first, weights["pos_embed"]), dim=1))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_our_own_weights_come_from_checkpoints(prefix):
    """Of an exact model, whose grid is not taken over, for images of another size."""
    trained = RevViT(**IMAGE, exact=12)
    model = RevViT(**IMAGE | {"image_size": 12})
    loaded = load_pretrained(model, {prefix + name: x for name, x in trained.state_dict().items()})
    assert (loaded.missing, loaded.unexpected, loaded.head) == ((), (), ()) and loaded.resized == ("embedding.position",)
    assert_equal(model.fusion.norm.weight, trained.fusion.norm.weight)
    assert_equal(model.blocks.blocks[2].g.widen.weight, trained.blocks.blocks[2].g.widen.weight)


def of_timm(name):
    with torch.device("meta"):
        return timm.create_model(name).state_dict()


QKV = "roberta.encoder.layer.1.attention.self"


def lacking_a_key():
    return {name: x for name, x in roberta().state_dict().items() if name != f"{QKV}.key.weight"}


def too_large():
    """To be put together: 2^46 numbers each, of one number in memory."""
    huge = {f"{QKV}.{part}.weight": torch.zeros(1).expand(2**23, 2**23) for part in ("query", "key", "value")}
    return roberta().state_dict() | huge


def of_another_type():
    weights = ViT(**IMAGE).state_dict()
    return weights | {"head.weight": weights["head.weight"].bool()}


def post_norm():
    return RoBERTa(norm="post", **ENCODER)


SEGMENTS = "embeddings.token_type_embeddings.weight"


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (Swin, lambda: of_timm("swinv2_tiny_window8_256"), "these weights are of no known model"),
        (Swin, lambda: of_timm("mvitv2_tiny"), "these weights are for a timm MViTv2; the model is a Swin"),
        (MViT, lambda: of_timm("mvitv2_large"), "no place for .*shortcut_proj_mlp"),
        (lambda: RevGPT(**TEXT), lambda: ViT(**IMAGE).state_dict(), "of another family than RevGPT, which has no embedding.p"),
        (
            lambda: ViT(**IMAGE | {"depth": 9}),
            lambda: timm_vit(**POOLS["mean"]).state_dict(),
            "fit: they have 43 of the 115 tensors",
        ),
        (
            lambda: GPT(**TEXT | {"vocab": 39}),
            lambda: gpt2().state_dict(),
            r"word.weight is \(40, 16\) there and \(39, 16\)",
        ),
        (lambda: GPT(**TEXT), lambda: {SEGMENTS: torch.tensor(1.0)}, "no known model"),
        (
            lambda: GPT(**TEXT),
            lambda: gpt2().state_dict() | {"lm_head.weight": torch.zeros(40, 16)},
            "not tied to the embedding",
        ),
        (post_norm, lacking_a_key, r"Hugging Face RoBERTa, lack encoder\.layer\.1\.attention\.self\.key"),
        (post_norm, too_large, "do not fit into memory"),
        (lambda: ViT(**IMAGE), of_another_type, "head.weight is torch.bool, not a floating-point type$"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(model, weights, message):
    weights = weights()
    with torch.device("meta" if next(iter(weights.values())).is_meta else "cpu"):
        model = model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, weights)
    if not next(model.parameters()).is_meta:
        assert_equal(model.state_dict(), before)


def test_bert_is_not_taken_for_roberta():
    """Their encoders have the same names; a RoBERTa may be configured with two segments as well, and reads the first."""
    theirs = roberta().state_dict()
    segment = theirs[f"roberta.{SEGMENTS}"]
    two = theirs | {f"roberta.{SEGMENTS}": torch.cat((segment, torch.ones(1, 16)))}
    one, other = RoBERTa(**TEXT, norm="post"), RoBERTa(**TEXT, norm="post")
    load_pretrained(one, theirs)
    load_pretrained(other, two)
    assert_equal(one.embedding.position, other.embedding.position)
    bert = {name.removeprefix("roberta."): x for name, x in two.items() if not name.startswith("lm_head.")}
    with pytest.raises(ValueError, match="of no known model"):
        load_pretrained(RoBERTa(**TEXT), bert)


def test_words_that_a_tokenizer_added_stay_new():
    model = GPT(**TEXT | {"vocab": 43}, positions="learned")
    before = model.embedding.word.weight.detach().clone()
    weights = gpt2().state_dict()
    loaded = load_pretrained(model, weights)
    assert_equal(model.embedding.word.weight[:40], weights["transformer.wte.weight"])
    assert_equal(model.embedding.word.weight[40:], before[40:])
    assert "embedding.word.weight" in loaded.resized


def test_an_adapted_model_gives_its_branches():
    adapted = RevGPT(**TEXT)
    expected = {name: x.clone() for name, x in adapted.state_dict().items()}
    add_adapters(adapted, 4)
    model = RevGPT(**TEXT)
    loaded = load_pretrained(model, adapted.state_dict())
    assert_equal(model.state_dict(), expected)
    assert loaded.unexpected and all(".down." in name or ".up." in name for name in loaded.unexpected)
    assert str(loaded).startswith(f"{len(expected)} tensors of a holotrain model; left out: blocks.blocks.0.f.down.bias")


@pytest.mark.parametrize(
    ("theirs", "model"),
    [
        (timm_vit, lambda: ViT(**IMAGE, pool="class")),
        (timm_swin, lambda: Swin(**WINDOWS)),
        (lambda: pooled(32, (2, 1), 1, 2)[1], lambda: pooled(32, (2, 1), 1, 2)[0]),
        (gpt2, lambda: GPT(**TEXT, positions="learned", gelu="tanh")),
        (roberta, lambda: RoBERTa(norm="post", **ENCODER)),
    ],
)
def test_a_number_in_place_of_a_tensor_is_refused_wherever_it_stands(theirs, model):
    weights, model = theirs().state_dict(), model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for name in [name for name in weights if not name.startswith(("head.", "lm_head."))]:  # another head is left out
        with pytest.raises(ValueError, match="(these .*|the )weights"):
            load_pretrained(model, weights | {name: torch.tensor(1.0)})
    assert_equal(model.state_dict(), before)


def test_norms_after_a_missing_one_move_too():
    post = RoBERTa(norm="post", **ENCODER)
    weights = {name: torch.full_like(x, number) for number, (name, x) in enumerate(post.state_dict().items())}
    del weights["blocks.blocks.0.g.norm.weight"]
    load_pretrained(model := RoBERTa(norm="pre", **ENCODER), weights)
    own = model.state_dict()
    assert_equal(own["norm.weight"], weights["blocks.blocks.2.g.norm.weight"])
    assert_equal(own["blocks.blocks.0.g.norm.weight"], weights["blocks.blocks.0.f.norm.weight"])

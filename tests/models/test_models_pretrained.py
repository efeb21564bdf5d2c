"""Weights of our own models in others of their family: what is taken over, fitted, left out and refused."""

import pytest
import torch
from compared import assert_equal
from small_models import FAMILIES, IMAGE, TEXT

from holotrain import models
from holotrain.models import GPT, RevGPT, RevViT, RoBERTa, Swin, ViT
from holotrain.models.layers.patches import resized_positions
from holotrain.models.pretrained import load_pretrained


@pytest.mark.parametrize("family", FAMILIES)
def test_reversible_models_take_over_f_and_g(family):
    plain, model = getattr(models, family)(**FAMILIES[family]), getattr(models, f"Rev{family}")(**FAMILIES[family])
    loaded, own = load_pretrained(model, plain.state_dict()), model.state_dict()
    branches = {name for name in own if ".f." in name or ".g." in name}
    assert branches <= set(loaded.loaded) and len(branches) >= 24
    assert_equal({name: own[name] for name in loaded.loaded}, {name: plain.state_dict()[name] for name in loaded.loaded})
    rest = {name for name, _ in model.named_parameters()} - set(loaded.loaded)
    assert set(loaded.missing) == {name for name in rest if "fusion" in name}
    assert set(loaded.head) == rest - set(loaded.missing) == ({"head.weight", "head.bias"} if rest else set())
    assert set(loaded.unexpected) == ({"norm.weight", "norm.bias"} if rest else set())  # the plain model's last


def test_class_tokens_come_and_go():
    given = ViT(**IMAGE, pool="class").state_dict()
    model = ViT(**IMAGE)
    loaded = load_pretrained(model, given)
    assert (loaded.missing, loaded.unexpected) == ((), ("embedding.class_token",))
    assert_equal(model.embedding.position, given["embedding.position"][:, 1:])
    model, given = ViT(**IMAGE, pool="class"), ViT(**IMAGE).state_dict()
    first = model.embedding.position[:, :1].clone()
    loaded = load_pretrained(model, given)
    assert (loaded.missing, loaded.unexpected) == (("embedding.class_token",), ())
    assert_equal(model.embedding.position, torch.cat((first, given["embedding.position"]), dim=1))


@pytest.mark.parametrize("size", [(6, 6), (2, 2)])
def test_positions_of_images_are_resized_as_timm_does(size):
    timm = pytest.importorskip("timm")
    given, wanted = torch.randn(1, 1 + 16, 8), torch.zeros(1, 1 + size[0] * size[1], 8)
    assert_equal(resized_positions(given, wanted, True, True), timm.layers.resample_abs_pos_embed(given, size))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_our_own_weights_come_from_checkpoints(prefix):
    """Of an exact model, whose grid is not taken over, for images of another size."""
    trained = RevViT(**IMAGE, exact=12)
    model = RevViT(**IMAGE | {"image_size": 12})
    loaded = load_pretrained(model, {prefix + name: x for name, x in trained.state_dict().items()})
    assert (loaded.missing, loaded.unexpected, loaded.head) == ((), (), ()) and loaded.resized == ("embedding.position",)
    assert_equal(model.fusion.norm.weight, trained.fusion.norm.weight)
    assert_equal(model.blocks.blocks[1].g.widen.weight, trained.blocks.blocks[1].g.widen.weight)


def test_shorter_texts_take_the_first_positions_and_added_words_stay_new():
    model, given = GPT(**TEXT | {"vocab": 43, "context": 7}, positions="learned"), GPT(**TEXT, positions="learned").state_dict()
    before = model.embedding.word.weight.detach().clone()
    loaded = load_pretrained(model, given)
    assert_equal(model.embedding.position, given["embedding.position"][:7])
    assert_equal(model.embedding.word.weight[:40], given["embedding.word.weight"])
    assert_equal(model.embedding.word.weight[40:], before[40:])
    assert set(loaded.resized) == {"embedding.word.weight", "embedding.position"}


def test_a_head_of_another_task_is_left_out():
    model = RoBERTa(**TEXT, classes=3)
    loaded = load_pretrained(model, RoBERTa(**TEXT).state_dict())
    assert set(loaded.head) == {f"head.{layer}.{kind}" for layer in ("dense", "classify") for kind in ("weight", "bias")}
    report = f"{len(loaded.loaded)} tensors of a holotrain model; new, random: head.classify.bias, head.classify.weight"
    assert str(loaded).startswith(report)


def of_another_type():
    weights = ViT(**IMAGE).state_dict()
    return weights | {"head.weight": weights["head.weight"].bool()}


OTHER = "their embedding is not that of a {}; model=timm and model=huggingface take weights of other libraries"


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (lambda: RevGPT(**TEXT), lambda: ViT(**IMAGE).state_dict(), OTHER.format("RevGPT")),
        (lambda: GPT(**TEXT), lambda: GPT(**TEXT, positions="learned").state_dict(), OTHER.format("GPT")),
        (lambda: Swin(**FAMILIES["Swin"]), lambda: {"patch_embed.proj.weight": torch.zeros(8, 1, 2, 2)}, OTHER.format("Swin")),
        (lambda: ViT(**IMAGE | {"depth": 9}), lambda: ViT(**IMAGE | {"depth": 3}).state_dict(), "fit: they have 43 of the 115"),
        (
            lambda: GPT(**TEXT | {"vocab": 39}),
            lambda: GPT(**TEXT).state_dict(),
            r"word.weight is \(40, 16\) there and \(39, 16\)",
        ),
        (lambda: ViT(**IMAGE), of_another_type, "head.weight is torch.bool, not a floating-point type$"),
        (
            lambda: GPT(**TEXT),
            lambda: GPT(**TEXT).state_dict() | {"blocks.blocks.0.g.widen.numbers": torch.zeros(2)},
            "these weights are in few bits or beside layers of peft",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(model, weights, message):
    model = model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, weights())
    assert_equal(model.state_dict(), before)


@pytest.mark.parametrize("family", ["ViT", "Swin", "GPT"])
def test_a_number_in_place_of_a_tensor_is_refused_wherever_it_stands(family):
    model = getattr(models, family)(**FAMILIES[family])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for name, _ in model.named_parameters():
        if name.startswith("head."):  # another head is left out
            continue
        with pytest.raises(ValueError, match="the weights of a holotrain model do not fit"):
            load_pretrained(model, before | {name: torch.tensor(1.0)})
    assert_equal(model.state_dict(), before)

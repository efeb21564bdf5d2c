"""All architectures that the README of reversible names: their gradients equal those of the same recurrence, stored."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from architectures import IMAGES, LANGUAGE, MASKED, PAIRS, SPEECH, TIMM, inputs_of, made_by_transformers
from compared import assert_close, assert_equal
from small_stacks import gradients

from holotrain.reversible import make_reversible, stacks_in

README = Path(__file__).parents[2] / "holotrain" / "reversible" / "README.md"
TRANSFORMERS = [*LANGUAGE, *MASKED, *PAIRS, *IMAGES, *SPEECH]
LISTS = {
    "M2M100ForConditionalGeneration": ["model.encoder.layers", "model.decoder.layers"],
    "Data2VecAudioForCTC": "data2vec_audio.encoder.layers",
}


def require_the_same(make, lists, run, equal=assert_equal):
    """The gradients of two steps are those of plain autograd through the same recurrence, and eval() is the model itself."""
    found = {}
    for backward in ("autograd", "reversible"):
        net = make_reversible(make(), lists, backward=backward).train()
        found[backward] = gradients(net, steps=2, run=run)
    assert len(found["autograd"]) > 10 and sum(len(stack.blocks) for stack in stacks_in(net)) >= 2
    equal(found["reversible"], found["autograd"])
    with torch.no_grad():
        torch.manual_seed(0)
        plain = run(make().eval())
        torch.manual_seed(0)
        assert_equal(run(make_reversible(make(), lists).eval()), plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model changes the stream")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    # The gradients of its experts are added up in another order.
    equal = partial(assert_close, rtol=1e-3, atol=1e-4) if name.startswith("Switch") else assert_equal
    make = partial(made_by_transformers, transformers, name)
    require_the_same(make, LISTS.get(name), lambda net: net(**inputs_of(net)).logits, equal)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model changes the stream")
@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    timm = pytest.importorskip("timm")
    side, told, lists = TIMM[name]
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))

    def make():
        torch.manual_seed(0)
        return timm.create_model(name, num_classes=5, **({"img_size": side} if told else {}))

    require_the_same(make, lists, lambda net: net(images))


def test_the_readme_names_them_all():
    rows = re.findall(r"^\| (?:transformers|timm) [^|]*\| (.+) \|$", README.read_text(), re.MULTILINE)
    assert sorted(", ".join(rows).split(", ")) == sorted([*TRANSFORMERS, *TIMM])

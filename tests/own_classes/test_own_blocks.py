"""The blocks of a user's own model are made reversible from the command line."""

import json
import sys
from pathlib import Path

import pytest
import torch
from compared import assert_equal
from left_by_runs import assert_same_weights, summary
from small_run import SMALL

import holotrain as package

BLOCKS = '''
from torch import nn
from torch.nn import functional as F
from holotrain.reversible import make_reversible


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A classifier of rows of pixels."""

    def __init__(self, classes: int, depth: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, classes)
        self.layers = nn.ModuleList(Block(16) for _ in range(depth))
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))

    def forward(self, images):
        x = self.stem(images[:, 0])
        for block in (*self.layers, *self.others):
            x = block(x)
        return self.head(x.mean(1))


class Coupled(Net):
    """Reversible by its constructor."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        make_reversible(self, "layers", bits=3)


class Counted(Net):
    """With a parameter whose name is that of an option."""

    def __init__(self, classes: int, blocks: int = 3) -> None:
        super().__init__(classes, blocks)
'''
OWN = [*SMALL[3:], "optimizer=adamw", "logger=none", "callbacks.progress=null"]
NET = [*OWN, "model._target_=own_blocks.Net"]
THREE_BITS = ["model.reversible=3bit", "model.blocks=layers"]


@pytest.fixture
def typed(holotrain, tmp_path, monkeypatch):
    (tmp_path / "own_blocks.py").write_text(BLOCKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_blocks", raising=False)
    return holotrain


def test_blocks_are_reversible_as_by_the_constructor(typed):
    trust = "trust=own_blocks"
    typed.done("fit", *NET, *THREE_BITS, "backward=reversible", "hydra.run.dir=run")
    typed.done("fit", *OWN, "model._target_=own_blocks.Coupled", "hydra.run.dir=same")
    assert_same_weights(Path("run/checkpoints/last.ckpt"), Path("same/checkpoints/last.ckpt"))
    assert summary(Path("run"))["between_blocks"] == summary(Path("same"))["between_blocks"] is not None
    typed.done("test", "ckpt_path=run", trust, "hydra.run.dir=test")
    assert summary(Path("test"))["metrics"]["test/loss"] == pytest.approx(summary(Path("run"))["metrics"]["test/loss"])
    typed.done("export", "ckpt_path=run", trust, "to=tuned")
    images = torch.randn(2, 1, 8, 8)
    assert_equal(package.load("tuned", trust="own_blocks")(images), package.load("run", trust="own_blocks")(images))
    words = ["resume=true", trust, "trainer.max_epochs=3"]
    for folder in ("run", "same"):
        typed.done("fit", *words, f"hydra.run.dir={folder}")
    assert_same_weights(Path("run/checkpoints/last.ckpt"), Path("same/checkpoints/last.ckpt"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["backward=reversible"], "model.reversible=4bit makes its blocks reversible, and model.blocks=NAME names their list"),
        (["model.blocks=layers"], "model.blocks: names the blocks to make reversible; give model.reversible=4bit too"),
        (["model.reversible=4bit"], "model.reversible: Net has several lists of blocks: layers, others; name one"),
        (["model.reversible=4bit", "model.blocks=layer"], "model.reversible: 'layer' is not a list of blocks; the model has"),
        (["model.reversible=9bit"], "model.reversible: "),
        (["model.reversible=4bit", "model._target_=own_blocks.Counted"], "model.reversible: there is no 'reversible' in model"),
        (
            ["backward=reversible", "model._target_=own_blocks.Counted"],
            "to make its blocks reversible, call holotrain.reversible.make_reversible(self, NAME) in its constructor",
        ),
        (["model=vit_tiny", "model.reversible=4bit"], "model.reversible: there is no 'reversible' in model"),
    ],
)
def test_a_mistake_is_one_line(typed, words, said):
    own = [] if words[0].startswith("model=") else [] if "_target_" in words[-1] else NET[len(OWN) :]
    assert said in typed.refused("fit", *OWN, *own, *words)


def test_plans_know_it(typed):
    typed.done("plan", *NET, "model.depth=4", "data.batch_size=8", "model.blocks=null", "json=plan.json", "memory=1MiB")
    # with two lists nothing can be chosen; with one, plan and auto take it
    Path("own_blocks.py").write_text(BLOCKS.replace("range(2)", "range(0)"))
    sys.modules.pop("own_blocks")
    words = [*NET, "model.depth=4", "data.batch_size=8"]
    out = typed.done("plan", *words, "json=plan.json", "memory=1MiB")
    assert "reversible, 4bit" in out
    plan = json.loads(Path("plan.json").read_text())
    assert plan["footprints"]["autograd"]["peak"] > 0


def test_an_object_is_made_reversible_once(typed):
    from own_blocks import Net

    net, words = Net(10), [*OWN, *THREE_BITS]
    result = package.fit(model=net, overrides=words, folder="run", quiet=True)
    assert summary(Path("run"))["between_blocks"] and result.model is net
    found = package.test(model=net, overrides=["ckpt_path=run"], quiet=True)
    assert found["test/loss"] == pytest.approx(result.metrics["test/loss"])

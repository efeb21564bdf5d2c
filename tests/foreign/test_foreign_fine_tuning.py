"""Trainings that start from pretrained weights: their defaults, and what is not evaluated before."""

from pathlib import Path

import pytest
from covering import slow
from foreign_models import NETWORKS, TEXT, write_network

import holotrain as package

transformers = pytest.importorskip("transformers")
CAUSAL = ["task=causal_lm", "model=huggingface", "model.name=network"]
MINE = "# @package _global_\ndefaults:\n  - override /model: huggingface\nmodel:\n  name: ${oc.env:PWD}/network\n"
WITH_RATE = "optimizer:\n  lr: 3e-3\n"


LONG = {"n_positions": 256}  # as many tokens as data have by default


def write_pretrained(folder: Path) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**NETWORKS["gpt2"] | LONG)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("words", "name", "rate"),
    [
        (CAUSAL, "adamw", 1e-4),
        ([*CAUSAL, "optimizer=muon"], "muon", 1.6e-2),
        slow([*CAUSAL, "model.name=random"], "muon", 1.6e-2),
        (["task=causal_lm", "experiment=mine"], "adamw", 1e-4),
        slow(["task=causal_lm", "experiment=mine_with_rate"], "adamw", 3e-3),
        slow(["task=sequence_classification", "model=roberta_tiny", "model.pretrained=weights"], "adamw", 1e-4),
        (["model=timm", "model.name=resnet10t", "model.download=true"], "adamw", 1e-4),
        (["model=vit_tiny", "model.pretrained=weights", "model.trained=head"], "adamw", 1e-3),
    ],
)
def test_pretrained_weights_are_tuned_gently(tmp_path, monkeypatch, words, name, rate):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    write_pretrained(Path("network"))
    write_network(Path("random"), "gpt2", **LONG)
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/mine.yaml").write_text(MINE)
    Path("mine/experiment/mine_with_rate.yaml").write_text(MINE + WITH_RATE)
    config = package.compose("fit", words, config_dir="mine")
    assert (config.optimizer.name, config.optimizer.lr) == (name, rate)
    assert config.trainer.gradient_clip_val == 1 and 0 < config.scheduler.warmup <= 0.1


def test_random_weights_are_not_evaluated(holotrain):
    write_network(Path("network"), "gpt2", **LONG)
    assert holotrain.refused("test", *TEXT, *CAUSAL).startswith("holotrain: ckpt_path: a checkpoint is needed; give")

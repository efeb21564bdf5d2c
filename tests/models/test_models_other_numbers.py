"""Weights to begin with are numbers of the kind that the model has."""

import pytest
import torch
from small_models import FAMILIES

from holotrain.models import load_pretrained
from holotrain.models.building import build
from holotrain.models.checkpoint_files import read_weights


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.int64])
def test_weights_of_other_numbers_are_not_converted(dtype):
    model = build("holotrain.models.RevViT", FAMILIES["ViT"])
    weights = model.state_dict()
    name = "head.weight"
    with pytest.raises(ValueError, match=f"head.weight is {dtype}, not a floating-point type$"):
        load_pretrained(model, weights | {name: weights[name].to(dtype)})


def test_a_folder_of_transformers_is_read_as_others(tmp_path):
    transformers = pytest.importorskip("transformers")
    from holotrain.models.huggingface import HuggingFace

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path)
    model = HuggingFace(str(tmp_path), "causal_lm")
    assert "new" not in model.start_from(None)
    weights = read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    name = next(name for name in weights if name.endswith("ln_f.weight"))
    for other, words in (
        (torch.ones(1).expand(8), "claims 32 bytes and has 4"),
        (torch.ones(8, dtype=torch.bool), "ln_f.weight is torch.bool"),
        (torch.ones(8, dtype=torch.complex64), "ln_f.weight is torch.complex64"),
    ):
        torch.save(weights | {name: other}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=words):
            model.start_from(None)

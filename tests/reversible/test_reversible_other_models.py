"""Small models of timm and Hugging Face, as their authors wrote them, with reversible blocks."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from compared import assert_equal

from holotrain.reversible import make_reversible

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

IMAGE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}
IMAGE |= {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 1}
HUGGING_FACE = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", TEXT | {"n_embd": 32, "n_layer": 4, "n_head": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
}
NAMES = ["vit", *HUGGING_FACE]


def made(name):
    """A model and what its forward takes."""
    torch.manual_seed(0)
    if name == "vit":
        return timm.create_model("vit_tiny_patch16_224", **IMAGE), {"x": torch.randn(3, 3, 32, 32)}
    cls, config, options = HUGGING_FACE[name]
    model = getattr(transformers, cls)(getattr(transformers, config)(**options))
    tokens = torch.randint(5, 50, (3, 12))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0  # padding
    return model, {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def run(model, batch):
    return model(*batch.values()) if "x" in batch else model(**batch)


def gradients(model, batch, amp=False):
    model.train()
    for step in range(2):  # the first chooses the grid
        model.zero_grad()
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = run(model, batch)
            loss = out.square().mean() if "x" in batch else out.loss
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reversible(model, **options):
    return make_reversible(copy.deepcopy(model), **options)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_autocast_equal_those_of_stored_blocks(name):
    model, batch = made(name)
    expected = gradients(reversible(model, backward="autograd"), batch, amp=True)
    assert len(expected) > 20
    assert_equal(gradients(reversible(model), batch, amp=True), expected)


def test_gradient_checkpointing_beside_it_is_warned_of():
    model, batch = made("gpt2")
    net = reversible(model).train()
    net.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match=r"turn it off with model.gradient_checkpointing_disable\(\)"):
        run(net, batch)
    net.gradient_checkpointing_disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(net, batch)


def test_hidden_states_carry_gradients():
    """Each is a stream, of which a loss may be taken."""
    model, batch = made("llama")

    def loss(net):
        out = net(**batch, output_hidden_states=True)
        return out.loss + sum(state.square().mean() for state in out.hidden_states)

    found = {}
    for backward in ("autograd", "reversible"):
        net = reversible(model, backward=backward).train()
        for step in range(2):
            torch.manual_seed(step)
            net.zero_grad()
            loss(net).backward()
        found[backward] = {name: p.grad for name, p in net.named_parameters()}
    assert_equal(found["reversible"], found["autograd"])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_text_is_generated_as_before(name):
    model, batch = made(name)
    net = reversible(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = [each.eval().generate(batch["input_ids"][1:], **options) for each in (model, net)]
    assert texts[0].shape == (2, 20)
    assert_equal(texts[1], texts[0])


LOADING = """
import sys, torch, transformers
sys.modules["holotrain"] = None
folder, cls = sys.argv[1:]
batch = torch.load(f"{folder}/batch.pt")
net = getattr(transformers, cls).from_pretrained(folder).eval()
assert torch.equal(net(**batch).logits, torch.load(f"{folder}/logits.pt"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_trained_model_is_saved_and_loaded_without_holotrain(name, tmp_path):
    model, batch = made(name)
    net = reversible(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gradients(net, batch)
    optimizer.step()
    net.eval().save_pretrained(tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    torch.save(net(**batch).logits.detach(), tmp_path / "logits.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADING, tmp_path, HUGGING_FACE[name][0]], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]

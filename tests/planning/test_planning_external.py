"""Plans of models of transformers and timm, against what a step on real tensors takes; and plans for a GPU, against PyTorch's
own rules on fake tensors of a GPU. Without a GPU they run, but have no backward."""

import pytest
import torch
from covering import slow
from measured_memory import measured_peak
from torch.nn import functional as F

from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.devices import ALLOCATORS, cuda_rules
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.tracker import AllocationTracker
from holotrain.reversible import recompute

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

SMALL = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GROUPED = SMALL | {"num_key_value_heads": 2} | NO_TOKENS
ENCODER = SMALL | {"max_position_embeddings": 2048} | NO_TOKENS
CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
LANGUAGE = {
    "gpt2": (CAUSAL, {"vocab_size": 500, "n_positions": 2048, "n_embd": 64, "n_layer": 3, "n_head": 4} | NO_TOKENS),
    "llama": (CAUSAL, GROUPED),
    "qwen3": (CAUSAL, GROUPED | {"head_dim": 16}),
    "gemma2": (CAUSAL, GROUPED | {"head_dim": 16}),
    "bert": (MASKED, ENCODER),
    "modernbert": (MASKED, SMALL | {"cls_token_id": 1, "sep_token_id": 2} | NO_TOKENS),
}
IMAGES = {
    "vit_tiny_patch16_224": {"embed_dim": 64, "depth": 3, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {"embed_dim": 24, "depths": (1, 1, 1, 1)},
}
CONVNEXT = {"convnext_atto": {"dims": (16, 32, 64, 128), "depths": (1, 1, 1, 1)}}
"""Not compared with a step: what its convolutions take depends on the CPU."""


def make(name: str) -> torch.nn.Module:
    if name not in LANGUAGE:
        return timm.create_model(name, **(IMAGES | CONVNEXT)[name])
    kind, sizes = LANGUAGE[name]
    return getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(name, **sizes))


def step_of(model, name: str, size: int) -> TrainingStep:
    if name in LANGUAGE:
        tokens = torch.zeros(2, size, dtype=torch.long)
        loss = lambda: model(input_ids=tokens, labels=tokens).loss  # noqa: E731
        held = [tokens]
    else:
        images, labels = torch.zeros(size, 3, 224, 224), torch.zeros(size, dtype=torch.long)
        loss = lambda: F.cross_entropy(model(images), labels)  # noqa: E731
        held = [images, labels]
    return TrainingStep(model.train(), loss, torch.optim.AdamW(model.parameters()), held={"batch": held})


CASES = [*(slow(name, 256) for name in LANGUAGE), *(slow(name, 2) for name in IMAGES)]


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_plan_of_a_model_of_others_is_what_a_step_takes(name, size):
    """Also where the model looks at values, such as those of positions, before it builds a mask."""
    with torch.device("meta"):
        model = make(name)
    with fake_tensors():
        planned = simulate_step(step_of(fake_parameters(model, torch.device("cpu")), name, size))
    measured = measured_peak(step_of(make(name), name, size), torch.device("cpu"))
    assert planned.peak / 1.02 <= measured <= planned.bound * 1.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_plan_of_a_few_tiles_is_that_of_all(monkeypatch):
    """A plan takes some tiles of the loss and of MLPs for all."""
    monkeypatch.setattr("holotrain.reversible.pending.MOST_LOGITS", {"cpu": 2 * 32 * 500})
    with torch.device("meta"):
        model = make("gpt2")
    with fake_tensors():
        planned = simulate_step(step_of(recompute(fake_parameters(model, torch.device("cpu")), tile=32), "gpt2", 256))
    measured = measured_peak(step_of(recompute(make("gpt2"), tile=32), "gpt2", 256), torch.device("cpu"))
    assert planned.peak / 1.02 <= measured <= planned.bound * 1.02


@pytest.fixture
def autocast_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


@pytest.mark.usefixtures("autocast_without_a_gpu")
@pytest.mark.parametrize("name", ["gpt2", slow("bert"), slow("swin_tiny_patch4_window7_224"), "convnext_atto"])
def test_a_forward_keeps_the_bytes_that_it_keeps_on_a_gpu(name, monkeypatch):
    found = {}
    for device in ("cpu", "cuda"):
        if device == "cuda" and name in LANGUAGE:  # which PyTorch chooses only where it sees the GPU
            monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
        with torch.device("meta"):
            model = make(name)
        tracker = AllocationTracker(ALLOCATORS["cuda"])
        with fake_tensors(), cuda_rules():
            fake_parameters(model, torch.device(device)).train()
            text = name in LANGUAGE
            shape, dtype = ((2, 256), torch.int64) if text else ((2, 3, 224, 224), torch.float32)
            given = torch.zeros(shape, dtype=dtype, device=device)
            tracker.label("given", [given, *model.parameters(), *model.buffers()])
            before = tracker.alive
            with tracker.tracking(), torch.autocast(device, torch.bfloat16):
                kept = model(given, labels=given).loss if text else model(given).sum()
            found[device] = tracker.alive - before
        del kept
    assert found["cpu"] == pytest.approx(found["cuda"], rel=0.01)

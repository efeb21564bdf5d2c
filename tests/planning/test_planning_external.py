"""Plans of models of transformers and timm, against what a step on real tensors takes; and plans for a GPU, against PyTorch's
own rules on fake tensors of a GPU. Without a GPU they run, but have no backward."""

import pytest
import torch
from covering import slow
from measured_memory import measured_peak
from torch.nn import functional as F

from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.devices import ALLOCATORS, IN_FP32, TO_FP32, cuda_rules
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


@pytest.mark.filterwarnings("ignore")
def test_the_plan_of_a_few_tiles_is_that_of_all(monkeypatch):
    """A plan takes some tiles of the loss and of MLPs for all."""
    monkeypatch.setattr("holotrain.reversible.tiled_loss.MOST_LOGITS", {"cpu": 2 * 32 * 500})
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


def one(name: str, x: torch.Tensor) -> torch.Tensor:
    """The result of an operation of the lists, called as people do."""
    weight = torch.ones(4, device=x.device)
    images = x.reshape(1, 3, 4, 1).expand(1, 3, 4, 4)
    special = {
        "layer_norm": lambda: F.layer_norm(x, (4,), weight),
        "group_norm": lambda: F.group_norm(images, 1),
        "native_layer_norm": lambda: torch.native_layer_norm(x, [4], weight, weight, 1e-5)[0],
        "rms_norm": lambda: F.rms_norm(x, (4,), weight),
        "cosine_similarity": lambda: F.cosine_similarity(x, x),
        "dist": lambda: torch.dist(x, x),
        "pdist": lambda: F.pdist(x),
        "renorm": lambda: torch.renorm(x, 2, 0, 1.0),
        "logsumexp": lambda: torch.logsumexp(x, 1),
        "softplus": lambda: F.softplus(x),
        "softmax.int": lambda: torch.softmax(x, 1),
        "log_softmax.int": lambda: F.log_softmax(x, 1),
        "cumsum": lambda: x.cumsum(0),
        "cumprod": lambda: x.cumprod(0),
        "sum.dim_IntList": lambda: x.sum((0, 1)),
        "linalg_vector_norm": lambda: torch.linalg.vector_norm(x),
        "pow.Scalar": lambda: 2**x,
        "pow.Tensor_Scalar": lambda: x**2,
        "pow.Tensor_Tensor": lambda: x**x,
        "upsample_linear1d": lambda: F.interpolate(x[None], 8, mode="linear"),
        "upsample_nearest2d": lambda: F.interpolate(images, 8),
        "upsample_bilinear2d": lambda: F.interpolate(images, 8, mode="bilinear"),
        "_upsample_bilinear2d_aa": lambda: F.interpolate(images, 8, mode="bilinear", antialias=True),
        "upsample_bicubic2d": lambda: F.interpolate(images, 8, mode="bicubic"),
        "_upsample_bicubic2d_aa": lambda: F.interpolate(images, 8, mode="bicubic", antialias=True),
        "upsample_trilinear3d": lambda: F.interpolate(images[None], (2, 2, 2), mode="trilinear"),
    }
    return special[name]() if name in special else getattr(torch, name)(x)


OTHERS = {
    "linear": lambda x: F.linear(x, torch.ones(4, 4, device=x.device)),
    "gelu": F.gelu,
    "mean": torch.mean,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cat": lambda x: torch.cat((x, x.float())),
}


@pytest.mark.usefixtures("autocast_without_a_gpu")
@pytest.mark.parametrize("name", [*IN_FP32, *TO_FP32, *OTHERS])
def test_results_have_the_dtypes_that_they_have_on_a_gpu(name):
    found = {}
    for device in ("cuda", "cpu"):
        with fake_tensors(), cuda_rules(), torch.autocast(device, torch.bfloat16):
            x = torch.ones(3, 4, dtype=torch.bfloat16, device=device)
            found[device] = (OTHERS[name](x) if name in OTHERS else one(name, x)).dtype
    assert found["cpu"] == found["cuda"]


def test_after_the_context_a_cpu_has_its_own_rules():
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    with cuda_rules():
        pass
    with torch.autocast("cpu", torch.bfloat16):
        assert F.softmax(x, 1).dtype == torch.bfloat16 and F.layer_norm(x, (4,)).dtype == torch.bfloat16


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
            given = (
                torch.zeros(2, 256, dtype=torch.int64, device=device) if text else torch.zeros(2, 3, 224, 224, device=device)
            )
            tracker.label("given", [given, *model.parameters(), *model.buffers()])
            before = tracker.alive
            with tracker.tracking(), torch.autocast(device, torch.bfloat16):
                kept = model(given, labels=given).loss if text else model(given).sum()
            found[device] = tracker.alive - before
        del kept
    assert found["cpu"] == pytest.approx(found["cuda"], rel=0.01)

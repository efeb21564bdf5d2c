"""Plans for a GPU, against PyTorch's own rules on fake tensors of a GPU. Without a GPU they run, but have no backward."""

import pytest
import torch
from torch.nn import functional as F

from holotrain.planning.devices import ALLOCATORS, IN_FP32, TO_FP32, cuda_rules
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.tracker import AllocationTracker

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
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


def gpt2():
    sizes = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def roberta():
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes))


MODELS = {
    "gpt2": gpt2,
    "roberta": roberta,
    "swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1, 1, 1)),
    "convnext": lambda: timm.create_model("convnext_atto", dims=(16, 32, 64, 128), depths=(1, 1, 1, 1)),
}


def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_keeps_the_bytes_that_it_keeps_on_a_gpu(name, monkeypatch):
    found = {}
    for device in ("cpu", "cuda"):
        if device == "cuda" and name in ("gpt2", "roberta"):  # which PyTorch chooses only where it sees the GPU
            monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
        with torch.device("meta"):
            model = MODELS[name]()
        tracker = AllocationTracker(ALLOCATORS["cuda"])
        with fake_tensors(), cuda_rules():
            fake_parameters(model, torch.device(device)).train()
            if name in ("gpt2", "roberta"):
                given = torch.zeros(2, 256, dtype=torch.int64, device=device)
            else:
                given = torch.zeros(2, 3, 224, 224, device=device)
            tracker.label("given", [given, *model.parameters(), *model.buffers()])
            before = tracker.alive
            with tracker.tracking(), torch.autocast(device, torch.bfloat16):
                kept = model(given, labels=given).loss if given.dtype == torch.int64 else model(given).sum()
            found[device] = tracker.alive - before
        del kept
    assert found["cpu"] == pytest.approx(found["cuda"], rel=0.01)

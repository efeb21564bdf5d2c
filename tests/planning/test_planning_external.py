"""Plans of models of transformers and timm, against what a step on real tensors takes."""

import pytest
import torch
from covering import slow
from measured_memory import measured_peak
from torch.nn import functional as F

from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
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


def language(name: str):
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


CASES = [
    (pytest.param if index % 4 == 0 and size in (512, 4) else slow)(name, size)
    for index, name in enumerate([*LANGUAGE, *IMAGES])
    for size in ((256, 512) if name in LANGUAGE else (2, 4))
]


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_plan_of_a_model_of_others_is_what_a_step_takes(name, size):
    """Also where the model looks at values, such as those of positions, before it builds a mask."""

    def make():
        return language(name) if name in LANGUAGE else timm.create_model(name, **IMAGES[name])

    with torch.device("meta"):
        model = make()
    with fake_tensors():
        planned = simulate_step(step_of(fake_parameters(model, torch.device("cpu")), name, size))
    measured = measured_peak(step_of(make(), name, size), torch.device("cpu"))
    assert planned.peak / 1.02 <= measured <= planned.bound * 1.02


@pytest.mark.filterwarnings("ignore")
def test_the_plan_of_a_few_tiles_is_that_of_all(monkeypatch):
    """A plan takes some tiles of the loss and of MLPs for all."""
    monkeypatch.setattr("holotrain.reversible.tiled_loss.MOST_LOGITS", {"cpu": 2 * 64 * 500})
    with torch.device("meta"):
        model = language("gpt2")
    with fake_tensors():
        planned = simulate_step(step_of(recompute(fake_parameters(model, torch.device("cpu")), tile=64), "gpt2", 512))
    measured = measured_peak(step_of(recompute(language("gpt2"), tile=64), "gpt2", 512), torch.device("cpu"))
    assert planned.peak / 1.02 <= measured <= planned.bound * 1.02

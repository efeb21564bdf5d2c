"""Every family, compiled block by block, gives the gradients that it gives otherwise."""

import pytest
import torch
from covering import slow
from small_models import FAMILIES, TRANSFORMERS, example
from torch._dynamo.utils import counters

from holotrain.models.block_schedules import compile_blocks
from holotrain.models.building import build

CASES = [*((name, {}) for name in TRANSFORMERS), ("RoBERTa", {"norm": "post"}), ("RevSwin", {"backward": "pareprop"})]
QUICK = [("RevViT", {}), ("RoBERTa", {"norm": "post"})]
MODELS = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_gradients_are_those_of_the_model_as_it_is(name, options):
    """With the eager backend: what is traced and where, not what a code generator makes of it."""
    arguments = FAMILIES[name.removeprefix("Rev")] | {"dropout": 0.0} | options
    grads, traced = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = build(f"holotrain.models.{name}", arguments).double()
        if compiled:
            compile_blocks(model, backend=lambda graph, inputs: traced.append(graph) or graph.forward)
        model(example(name, dtype=torch.float64)).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert traced, "nothing was compiled"
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)
    assert not any("_orig_mod" in name for name in model.state_dict())


@pytest.mark.parametrize(("name", "codes"), [("RevViT", 4), slow("ViT", 4), slow("RevGPT", 4), slow("RevRoBERTa", 4)])
def test_blocks_share_the_codes_of_one(name, codes):
    """Those of f and g, and both again for the first block, in which no sample is dropped. No graph breaks."""
    torch.compiler.reset()
    counters.clear()
    arguments = FAMILIES[name.removeprefix("Rev")] | {"depth": 4, "dropout": 0.1, "drop_path": 0.2}
    model = build(f"holotrain.models.{name}", arguments)
    compile_blocks(model, backend="eager")
    for _ in range(2):  # with the recomputations
        model(example(name)).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == codes and not counters["graph_break"]

"""Every family, compiled block by block, gives the gradients that it gives otherwise."""

import pytest
import torch
from small_models import FAMILIES, TRANSFORMERS, example

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

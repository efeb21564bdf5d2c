"""Blocks beside others that wrap, copy, compile, script or hook them: accelerate, peft, nn.DataParallel, compilers."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from compared import assert_equal
from small_stacks import WIDTH, gradients, inputs, model, reversible
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, make_reversible, undo
from holotrain.reversible.stack import stack_of, stacks_in


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate").hooks


def wrapped(net, hooks):
    for layer in net.layers:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    return net


def unwrapped(net, hooks):
    for layer in net.layers:
        hooks.remove_hook_from_module(layer)
    return net


def test_a_wrapped_forward_is_found_and_undone(hooks):
    plain, coupled = gradients(model()), gradients(reversible())
    net = wrapped(reversible(), hooks)
    assert stacks_in(net) == [stack_of(net.layers[3])]
    assert_equal(gradients(net), coupled)
    undo(net)
    assert not stacks_in(net)
    assert_equal(gradients(net), plain)
    assert_equal(gradients(reversible(net)), coupled)
    unwrapped(undo(net), hooks)
    assert_equal(gradients(net), plain)
    assert_equal(gradients(reversible(net)), coupled)
    net = undo(unwrapped(wrapped(reversible(), hooks), hooks))  # the wrapper goes before undo
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert_equal(gradients(net), plain)


def test_a_stack_of_copies_leaves_a_wrapper_behind(hooks):
    net = wrapped(reversible(), hooks)
    chain = stack_of(net.layers[0]).again(3, "reversible")
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for _ in range(2):
        chain(x).sum().backward()
    assert stack_of(chain.blocks[0]).blocks == list(chain.blocks)
    assert stack_of(net.layers[0]).grid_state() is None  # it has not run


def replica_of(net):
    """What nn.DataParallel makes for each GPU: its parameters are attributes, copies with a graph."""
    modules = list(net.modules())
    copies = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        twin = copies[id(module)]
        for name, child in module._modules.items():
            setattr(twin, name, copies[id(child)])
        for name, parameter in module._parameters.items():
            setattr(twin, name, parameter * 1)
    return copies[id(net)]


@pytest.mark.parametrize("copied", [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_replicas_of_data_parallel_are_refused(copied):
    net = copied(reversible())
    with pytest.raises(ValueError, match="start one process for each GPU with torchrun, or .* CUDA_VISIBLE_DEVICES=0"):
        replica_of(net)
    undo(net)
    assert_equal(gradients(net, run=lambda x: replica_of(net)(x)), gradients(model()))


@pytest.mark.parametrize(("backward", "exact"), [("checkpoint", False), ("reversible", True), ("pareprop", False)])
def test_replicas_of_a_sequence_run_their_own_parts(backward, exact):
    branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(6)]
    net = ReversibleSequence(map(ReversibleBlock, branches[:3], branches[3:]), backward, exact=exact).double()
    expected = gradients(net, run=lambda x: torch.cat(net(x, x.sin())))
    assert_equal(gradients(net, run=lambda x: torch.cat(replica_of(net)(x, x.sin()))), expected)


def test_a_hook_that_comes_after_the_forward_stays_and_does_not_run_in_the_recomputation():
    net, calls = reversible(), []
    net.layers[2].inner.register_forward_hook(lambda *_: calls.append("first"))
    gradients(net)
    calls.clear()
    loss = net(inputs()).sum()
    net.layers[2].inner.register_forward_hook(lambda *_: calls.append("second"))
    loss.backward()
    assert calls == ["first", "first"]
    net(inputs())
    assert calls == ["first", "first", "first", "second"]


def test_scripting_says_what_to_do():
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot .* call undo\(model\) first, or use torch.export"):
        torch.jit.script(reversible().layers[0])
    net = reversible().eval()
    assert_equal(torch.jit.trace(net, inputs())(inputs(seed=2)), net(inputs(seed=2)))


def test_a_compiled_model_is_compiled_once_for_all_blocks():
    frames = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        net = reversible(model(depth=12))
        run = torch.compile(net, backend=frames) if compiled else net
        with torch._dynamo.config.patch(error_on_recompile=True):
            found.append(gradients(net, run=lambda x, run=run: run(inputs())))
    assert_equal(*found)
    torch.compiler.reset()
    frames.clear()
    evaluated = torch.compile(net.eval(), backend=frames, fullgraph=True)
    assert_equal(evaluated(inputs()), model(depth=12).eval()(inputs()))
    assert frames.frame_count == 1
    torch.compiler.reset()


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


TOKENS = torch.randint(5, 50, (3, 12), generator=torch.Generator().manual_seed(2))
LORA = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"]}


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1)).double()


def adapted(net, backward="reversible"):
    """With random adapters, which begin with zeros."""
    torch.manual_seed(1)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad or "lora" in name:
            parameter.data = torch.randn_like(parameter) / 10
    blocks = next(name for name, _ in net.named_modules() if name.endswith("model.layers"))
    return make_reversible(net, blocks, backward=backward).train()


@pytest.mark.parametrize(
    ("kind", "options", "arguments", "adapters"),
    [
        ("LoraConfig", {"alora_invocation_tokens": [7]}, {"alora_offsets": [3, 5, None]}, 16),
        ("PolyConfig", {"n_tasks": 3, "n_skills": 2}, {"task_ids": torch.tensor([0, 1, 2])}, 24),
    ],
)
def test_adapters_that_hook_the_forward(peft, kind, options, arguments, adapters):
    found = []
    for backward in ("autograd", "reversible"):
        net = adapted(peft.get_peft_model(llama(), getattr(peft, kind)(**LORA, **options)), backward)
        found.append(gradients(net, run=lambda x, net=net: net(input_ids=TOKENS, **arguments).logits))
    assert len(found[0]) == 2 * adapters
    assert_equal(*found)


def test_caches_of_the_past_are_refused(peft):
    net = adapted(peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)))
    with pytest.raises(ValueError, match="a block got past keys and values in training"):
        net(input_ids=TOKENS)
    net = make_reversible(llama())
    with pytest.raises(ValueError, match="a block got a StaticCache in training, .* use_cache=False"):
        net(TOKENS, past_key_values=pytest.importorskip("transformers").StaticCache(config=net.config, max_cache_len=16))
    net(TOKENS, use_cache=False)


def loss_of(net):
    with torch.autocast("cpu", torch.bfloat16):
        return net(input_ids=TOKENS, labels=TOKENS).loss


def test_adapters_that_change_before_the_backward(peft):
    """A scale for the forward alone is named; another adapter is refused."""
    helpers = pytest.importorskip("peft.helpers")
    config = peft.LoraConfig(**LORA, lora_alpha=32)
    net = peft.get_peft_model(llama().float(), config)
    net.add_adapter("second", config)
    adapted(net)
    loss_of(net).backward()
    first = loss_of(net)
    net.set_adapter("second")
    with pytest.raises(RuntimeError, match=r"saved|other parameters in the recomputation"):
        (first + loss_of(net)).backward()
    net.set_adapter("default")
    with helpers.rescale_adapter_scale(net, 0.2):
        loss = loss_of(net)
    with pytest.warns(UserWarning, match="layers': a stream .* wrong.*attribute of a module changed"):
        loss.backward()

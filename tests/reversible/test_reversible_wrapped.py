"""Stacks of blocks beside others that wrap, copy, compile or hook the blocks: accelerate, peft, nn.DataParallel, compilers."""

import copy
import gc
import pickle
import weakref
from typing import NamedTuple

import pytest
import torch
import torch._dynamo.testing
from compared import assert_equal
from small_stacks import WIDTH, Model, gradients, inputs, reversible
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, make_reversible, stack_of, stacks_in, undo

BACKWARDS = ["checkpoint", "reversible", "pareprop"]


class Biased(nn.Module):
    """As T5: the first block computes a position bias, which it returns and later ones read."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(5, 5))

    def forward(self, x, bias=None):
        bias = self.bias.sigmoid() * x.mean() if bias is None else bias
        return x + torch.tanh(bias @ self.linear(x)), bias


class BiasedModel(Model):
    def blocks(self, x):
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias=bias)
        return x * bias.sum()


class TwoStreamed(nn.Module):
    """As MMDiT and Flux: two streams are updated from each other."""

    def __init__(self):
        super().__init__()
        self.ours, self.theirs = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context):
        joint = torch.cat((self.ours(x), self.theirs(context)), 1)
        mixed = torch.tanh(joint @ joint.mT) @ joint
        return x + mixed[:, : x.shape[1]], context + mixed[:, x.shape[1] :]


class TwoStreamedModel(Model):
    def blocks(self, x):
        context = x[:, :2]
        for layer in self.layers:
            x, context = layer(x, context)
        return torch.cat((x, context), 1)


@pytest.mark.parametrize(("cls", "block"), [(BiasedModel, Biased), (TwoStreamedModel, TwoStreamed)])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_more_tensors_that_a_block_returns_carry_their_gradients(cls, block, backward):
    expected = gradients(reversible(cls(4, block), "autograd"))
    assert len(expected) > 10
    assert_equal(gradients(reversible(cls(4, block), backward)), expected)


class Returned(NamedTuple):
    hidden: torch.Tensor
    context: torch.Tensor


class Listing(TwoStreamed):
    def forward(self, x, context):
        return [*super().forward(x, context)]


class Naming(TwoStreamed):
    def forward(self, x, context):
        return Returned(*super().forward(x, context))


@pytest.mark.parametrize(("block", "kind"), [(Listing, list), (Naming, Returned)])
def test_a_block_may_return_a_list_or_a_named_tuple(block, kind):
    net = reversible(TwoStreamedModel(4, block))
    x = net.stem(inputs())
    assert type(net.layers[0](x, x[:, :2])) is kind
    expected = gradients(reversible(TwoStreamedModel(4, block), "autograd"))
    assert_equal(gradients(net), expected)


def test_more_tensors_that_a_block_returns_are_not_kept():
    """Those with a graph go with their graph, which holds the block's coupling."""
    net = reversible(TwoStreamedModel(3, TwoStreamed))
    gradients(net)
    x, context = net.stem(inputs()), net.stem(inputs())
    seen = []
    for layer in net.layers:
        x, context = layer(x, context)
        seen.append(weakref.ref(context))
    del x, context
    gc.collect()
    assert all(each() is None for each in seen)


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate").hooks


def wrapped(net, hooks):
    for layer in net.layers:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    return net


def test_a_wrapped_forward_is_found_and_undone(hooks):
    plain = gradients(Model())
    coupled = gradients(reversible(Model()))
    net = wrapped(reversible(Model()), hooks)
    assert stacks_in(net) == [stack_of(net.layers[3])]
    assert_equal(gradients(net), coupled)
    undo(net)
    assert not stacks_in(net)
    assert_equal(gradients(net), plain)
    assert_equal(gradients(reversible(net)), coupled)
    undo(net)
    for layer in net.layers:
        hooks.remove_hook_from_module(layer)
    assert_equal(gradients(net), plain)
    assert_equal(gradients(reversible(net)), coupled)


def test_a_wrapper_that_goes_before_undo(hooks):
    net = wrapped(reversible(Model()), hooks)
    for layer in net.layers:
        hooks.remove_hook_from_module(layer)
    undo(net)
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert_equal(gradients(net), gradients(Model()))


def test_a_stack_of_copies_leaves_a_wrapper_behind(hooks):
    net = wrapped(reversible(Model()), hooks)
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
    net = copied(reversible(Model()))
    with pytest.raises(ValueError, match="start one process for each GPU with torchrun, or .* CUDA_VISIBLE_DEVICES=0"):
        replica_of(net)
    undo(net)
    assert_equal(gradients(net, run=lambda net: replica_of(net)(inputs())), gradients(Model()))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_replicas_of_a_sequence_run_their_own_parts(backward, exact):
    def net():
        torch.manual_seed(0)
        branches = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(6))
        return ReversibleSequence(map(ReversibleBlock, branches, branches), backward, exact=exact).double()

    def run(net):
        return torch.cat(net(inputs(), inputs(2)))

    expected = gradients(net(), run=run)
    assert_equal(gradients(net(), run=lambda net: run(replica_of(net))), expected)


class ForTheForward(Model):
    """Registers hooks for the time of its forward, as peft does."""

    def forward(self, x):
        handles = []
        for index, layer in enumerate(self.layers):
            scale = lambda module, args, index=index: (args[0] * (1 + index),)  # noqa: E731
            shift = lambda module, args, kwargs: ((args[0] + 1,), kwargs)  # noqa: E731
            handles += [
                layer.inner.register_forward_pre_hook(scale),
                layer.inner.register_forward_pre_hook(shift, with_kwargs=True),
                layer.outer.register_forward_hook(lambda module, args, output: output * 2),
            ]
        try:
            return super().forward(x)
        finally:
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("backward", BACKWARDS)
def test_hooks_that_are_there_in_the_forward_alone(backward):
    expected = gradients(reversible(ForTheForward(), "autograd"))
    net = reversible(ForTheForward(), backward)
    assert_equal(gradients(net), expected)
    assert not any(layer.inner._forward_pre_hooks or layer.inner._forward_pre_hooks_with_kwargs for layer in net.layers)


def test_a_hook_that_comes_after_the_forward_stays_and_does_not_run_in_the_recomputation():
    net, calls = reversible(Model()), []
    net.layers[2].inner.register_forward_hook(lambda *_: calls.append("first"))
    gradients(net)
    calls.clear()
    loss = net(inputs()).sum()
    net.layers[2].inner.register_forward_hook(lambda *_: calls.append("second"))
    loss.backward()
    assert calls == ["first", "first"]
    net(inputs())
    assert calls == ["first", "first", "first", "second"]


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1)).double()


def tuned(peft, config, backward, **more):
    net = peft.get_peft_model(llama(), config)
    torch.manual_seed(1)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) / 10  # adapters begin with zeros
    make_reversible(net, next(name for name, _ in net.named_modules() if name.endswith("model.layers")), backward=backward)
    tokens = torch.randint(5, 50, (3, 12), generator=torch.Generator().manual_seed(2))
    return gradients(net, run=lambda net: net(input_ids=tokens, **more).logits)


def test_activated_lora(peft):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[7])
    offsets = {"alora_offsets": [3, 5, None]}
    expected = tuned(peft, config, "autograd", **offsets)
    assert len(expected) == 16
    assert_equal(tuned(peft, config, "reversible", **offsets), expected)


def test_poly(peft):
    config = peft.PolyConfig(task_type="CAUSAL_LM", r=2, n_tasks=3, n_skills=2, target_modules=["q_proj", "v_proj"])
    tasks = {"task_ids": torch.tensor([0, 1, 2])}
    expected = tuned(peft, config, "autograd", **tasks)
    assert len(expected) == 24
    assert_equal(tuned(peft, config, "reversible", **tasks), expected)


def test_prefix_tuning_is_refused(peft):
    with pytest.raises(ValueError, match="a block got past keys and values in training"):
        tuned(peft, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "reversible")


def test_a_static_cache_in_training_is_refused():
    net = make_reversible(llama())
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="a block got a StaticCache in training, .* use_cache=False"):
        net(tokens, past_key_values=pytest.importorskip("transformers").StaticCache(config=net.config, max_cache_len=16))
    net(tokens, use_cache=False)


def test_scripting_says_what_to_do():
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot .* call undo\(model\) first, or use torch.export"):
        torch.jit.script(reversible(Model()))
    torch.jit.script(undo(reversible(Model())))
    net = reversible(Model()).eval()
    assert_equal(torch.jit.trace(net, inputs())(inputs(2)), net(inputs(2)))


def test_a_compiled_model_is_compiled_once_for_all_blocks():
    frames = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        net = reversible(Model(12))
        run = torch.compile(net, backend=frames) if compiled else net
        with torch._dynamo.config.patch(error_on_recompile=True):
            found.append(gradients(net, run=lambda _, run=run: run(inputs())))
    assert_equal(*found)
    torch.compiler.reset()
    frames.clear()
    evaluated = torch.compile(net.eval(), backend=frames, fullgraph=True)
    assert_equal(evaluated(inputs()), Model(12)(inputs()))
    assert frames.frame_count == 1
    torch.compiler.reset()


def adapted(peft):
    """A Llama with two adapters, of which the first is active; both are random."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
    net = peft.get_peft_model(llama().float(), config)
    net.add_adapter("second", config)
    torch.manual_seed(1)
    for name, parameter in net.named_parameters():
        if "lora" in name:
            parameter.data = torch.randn_like(parameter) / 5
    return make_reversible(net, "base_model.model.model.layers").train()


def loss_of(net):
    tokens = torch.randint(5, 50, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        return net(input_ids=tokens, labels=tokens).loss


def test_a_scale_of_adapters_that_changes_around_the_forward_alone_is_named(peft):
    helpers = pytest.importorskip("peft.helpers")
    net = adapted(peft)
    loss_of(net).backward()
    with helpers.rescale_adapter_scale(net, 0.5):
        loss = loss_of(net)
    with pytest.warns(UserWarning, match="layers': a stream .* wrong.*attribute of a module changed"):
        loss.backward()


def test_another_active_adapter_in_the_backward_is_refused(peft):
    net = adapted(peft)
    loss_of(net).backward()
    first = loss_of(net)
    net.set_adapter("second")
    with pytest.raises(RuntimeError, match=r"saved|other parameters in the recomputation"):
        (first + loss_of(net)).backward()

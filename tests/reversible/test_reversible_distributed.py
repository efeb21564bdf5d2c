"""DDP and FSDP2 on two gloo processes against one process. As a script, this is one of the processes: every case trains one
step on half of the batch, and rank 0 compares with one process on all of it."""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them, found_by_processes, whole
from torch import nn

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from holotrain.reversible import ReversibleBlock, ReversibleSequence, recompute, train_in_chunks
from holotrain.reversible.context import recomputing
from holotrain.reversible.tiled_loss import tile_loss

WIDTH, DEPTH, BATCH = 16, 4, 4
events: list[str] = []


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, bias=None):
        if recomputing():
            events.append(f"recompute {self.number}")
        hidden = torch.tanh(self.inner(self.norm(x)))
        return self.outer(hidden if bias is None else hidden + bias)


class Model(nn.Module):
    def __init__(self, backward: str, store: int = 0, exact=False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 32))
        self.spare = nn.Linear(WIDTH, WIDTH)  # never used
        self.sequence = ReversibleSequence([ReversibleBlock(Branch(), Branch()) for _ in range(DEPTH)], backward, store, exact)
        self.head = nn.Linear(WIDTH, 1)
        for number, block in enumerate(self.sequence.blocks):
            block.f.number = block.g.number = number

    def forward(self, x):
        x = self.stem(x)
        y1, y2 = self.sequence(x, x.tanh(), f_kwargs={"bias": self.bias})
        return self.head(y1 * y2).square().mean()


def model(backward: str, **options) -> Model:
    torch.manual_seed(0)
    return Model(backward, **options).double()


def batch() -> torch.Tensor:
    return torch.randn(2 * BATCH, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ddp(net, **options):
    return DistributedDataParallel(net, bucket_cap_mb=1e-3, **options)


def logged(state, bucket):
    events.append("all-reduce")
    return allreduce_hook(state, bucket)


class LoggedReduceScatter(DefaultReduceScatter):
    def __call__(self, *arguments, **keywords):
        events.append("reduce-scatter")
        return super().__call__(*arguments, **keywords)


def step(net, x, times: int = 1) -> None:
    """``times`` micro-batches; all but the last without synchronization."""
    for turn in range(times):
        if turn < times - 1 and isinstance(net, DistributedDataParallel):
            with net.no_sync():
                (net(x * (turn + 1)) / times).backward()
        else:
            (net(x * (turn + 1)) / times).backward()


def sharded(net, **options):
    for block in net.sequence.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def in_tiles(net):
    net.sequence.tile = 2
    return net


def freeze(net):
    net.stem.requires_grad_(False)
    net.sequence.blocks[1].requires_grad_(False)
    return net


CASES = {
    "ddp": (lambda net: ddp(net, find_unused_parameters=True), 1),
    "ddp, static graph": (lambda net: ddp(net, static_graph=True), 1),
    "ddp, frozen parts": (lambda net: ddp(freeze(net), find_unused_parameters=True), 1),
    "ddp, no_sync": (lambda net: ddp(net, find_unused_parameters=True), 3),
    "ddp, tiles": (lambda net: ddp(in_tiles(net), find_unused_parameters=True), 1),
    "ddp, static graph, tiles": (lambda net: ddp(in_tiles(net), static_graph=True), 1),
    "fsdp2": (sharded, 1),
    "fsdp2, tiles": (lambda net: sharded(in_tiles(net)), 1),
    "fsdp2, kept whole after the forward": (lambda net: sharded(net, reshard_after_forward=False), 1),
    "fsdp2, root alone": (fully_shard, 1),
    "fsdp2, frozen parts": (lambda net: sharded(freeze(net)), 1),
    "fsdp2, accumulating": (sharded, 2),
}


def error(backward: str, name: str, rank: int) -> float:
    wrap, times = CASES[name]
    reference = model("autograd")
    if "frozen" in name:
        freeze(reference)
    step(reference, batch(), times)
    net = wrap(model(backward))
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    rounds = 2 if "static" in name else 1  # the first step records the static graph
    for _ in range(rounds):
        net.zero_grad()
        step(net, batch()[rank * BATCH : (rank + 1) * BATCH], times)
    worst = 0.0
    for (key, parameter), (_, true) in zip(inner.named_parameters(), reference.named_parameters(), strict=True):
        grad = whole(parameter.grad)
        if (grad is None and true.grad is None) or key.startswith("spare"):
            continue
        worst = max(worst, ((grad - true.grad).abs().max() / true.grad.abs().max()).item())
    return worst


def order(kind: str, backward: str, rank: int) -> list[str]:
    """The recomputations and collectives of a backward, in order."""
    net = model(backward)
    if kind == "ddp":
        net = ddp(net, find_unused_parameters=True)
        net.register_comm_hook(None, logged)
    else:
        net = sharded(net)
        for part in (net, *net.sequence.blocks):
            part.set_custom_reduce_scatter(LoggedReduceScatter())
    for _ in range(2):  # DDP rebuilds its buckets after the first
        events.clear()
        step(net, batch()[rank * BATCH : (rank + 1) * BATCH])
    return list(events)


def shard_a_branch(net):
    fully_shard(net.sequence.blocks[1].f)
    return fully_shard(net)


def cast_blocks(net):
    for block in net.sequence.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return fully_shard(net)


def wrap_a_branch(wrapper):
    def wrap(net):
        net.sequence.blocks[1].f = wrapper(net.sequence.blocks[1].f)
        return net

    return wrap


REFUSED = {
    "fully_shard on f": shard_a_branch,
    "streams cast to bf16": cast_blocks,
    "DDP within": wrap_a_branch(DistributedDataParallel),
    "FSDP1 within": wrap_a_branch(lambda f: FullyShardedDataParallel(f, device_id=torch.device("cpu"))),
}


def refusal(name: str) -> str:
    net = REFUSED[name](model("reversible"))
    try:
        net(batch())
    except ValueError as refused:
        return str(refused)
    return "not refused"


class Residual(Branch):
    def forward(self, x, bias=None):
        return x + super().forward(x, bias)


class Stacked(nn.Module):
    """Blocks that recompute takes as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Residual() for _ in range(DEPTH))
        for number, block in enumerate(self.blocks):
            block.number = number

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def shard_blocks(net):
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def recomputed(wrap, backward: str, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = wrap(recompute(Stacked().double(), "blocks", backward=backward))
    step(net, batch()[rank * BATCH : (rank + 1) * BATCH])
    return [whole(p.grad) for p in net.parameters()]


def recomputed_errors(rank: int) -> dict[str, float]:
    """The largest differences to plain autograd, in the same wrapper."""
    found = {}
    for name, wrap in {"ddp": ddp, "fsdp2": shard_blocks, "fsdp2, root alone": fully_shard}.items():
        true = recomputed(wrap, "autograd", rank)
        for backward in ("checkpoint", "offload"):
            pairs = zip(recomputed(wrap, backward, rank), true, strict=True)
            found[f"{name}, {backward}"] = max((a - b).abs().max().item() for a, b in pairs)
    return found


def tiled_model(tied: bool):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = transformers.Qwen3Config(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).double().train()


def tiled_step(net, parts: list[slice], half: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of the mean of the losses of some rows, of which one has few labels."""
    tokens = torch.randint(97, (2 * BATCH, 24), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :16] = -100
    for number in range(3):  # gradients add up
        if isinstance(net, FSDPModule):
            net.set_requires_gradient_sync(number != 1)
        torch.manual_seed(2)
        for rows in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = net(input_ids=tokens[rows], labels=labels[rows]).loss
            (loss / len(parts)).backward()
    return {name.removeprefix("module."): whole(parameter.grad) for name, parameter in net.named_parameters()}


def shard_language_model(net, *more):
    for part in (*net.model.layers, *more):
        fully_shard(part)
    return fully_shard(net)


TILED = {
    "ddp": (DistributedDataParallel, True),
    "fsdp2": (shard_language_model, True),
    "fsdp2, the head apart": (lambda net: shard_language_model(net, net.lm_head), False),
}


def tiled_errors(rank: int) -> dict:
    """Of a loss in tiles, or in chunks, against one process with the whole loss on the whole batch."""
    float64_stays = lambda self: self if self.dtype == torch.float64 else self.to(torch.float32)  # noqa: E731
    torch.Tensor.float = float64_stays  # ty: ignore[invalid-assignment]
    worst = {}
    cuts = {
        "tiles": lambda model: tile_loss(model, most_logits=5 * BATCH * 97),
        "chunks": lambda model: train_in_chunks(model, 10),
    }
    parts = [slice(0, BATCH), slice(BATCH, 2 * BATCH)]
    for (name, (wrap, tied)), cut in product(TILED.items(), cuts):
        net = wrap(cuts[cut](tiled_model(tied)))
        expected, found = tiled_step(tiled_model(tied), parts), tiled_step(net, parts[rank : rank + 1])
        errors = [((found[key] - each).abs().max() / each.abs().max()).item() for key, each in expected.items()]
        worst[f"{name}, {cut}"] = max(errors)
    net = shard_language_model(train_in_chunks(tiled_model(True).float(), 10))
    found, expected = tiled_step(net, parts[rank : rank + 1], half=True), tiled_step(tiled_model(True), parts)
    worst["fsdp2, chunks, autocast"] = max(((found[key] - each).norm() / each.norm()).item() for key, each in expected.items())
    worst |= {"refused": [refused_chunks(*each) for each in ((False, 24), (True, 24 if rank else 9))]}
    return worst


def refused_chunks(root: bool, length: int) -> str:
    """What is said of a model of whose blocks FSDP2 knows, or of whose root, too, and of a sequence."""
    net = train_in_chunks(tiled_model(True), 10)
    for block in net.model.layers:
        fully_shard(block)
    tokens = torch.zeros(1, length, dtype=torch.long)
    try:
        (fully_shard(net) if root else net)(input_ids=tokens, labels=tokens)
    except ValueError as refusal:
        return str(refusal)
    return ""


def find(rank: int) -> dict:
    init_device_mesh("cpu", (2,))
    if Path(sys.argv[3]).parent.name.startswith("tiled"):
        return tiled_errors(rank)
    found = {"errors": {}, "orders": {}, "refused": {}, "recomputed": recomputed_errors(rank)}
    for backward in ("checkpoint", "reversible", "pareprop"):
        names = {"checkpoint": [*CASES][::2], "reversible": CASES, "pareprop": [*CASES][1::2]}[backward]
        found["errors"][backward] = {name: error(backward, name, rank) for name in names}
        if backward != "checkpoint":
            found["orders"][backward] = {kind: order(kind, backward, rank) for kind in ("ddp", "fsdp2")}
    found["refused"] = {name: refusal(name) for name in REFUSED}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__), tmp_path_factory.mktemp("two_processes"))


@pytest.mark.parametrize("backward", ["checkpoint", "reversible", "pareprop"])
def test_gradients_equal_those_of_one_process(found, backward):
    errors = found["errors"][backward]
    assert len(errors) == (12 if backward == "reversible" else 6)
    assert max(errors.values()) <= 1e-12, errors


def test_gradients_of_recomputed_blocks_equal_those_of_stored_ones(found):
    assert len(found["recomputed"]) == 6
    assert set(found["recomputed"].values()) == {0.0}, found["recomputed"]


@pytest.mark.slow
def test_gradients_of_a_loss_in_tiles_or_chunks_equal_those_of_one_process(tmp_path_factory):
    """DDP, and FSDP2 with the head in the root's group and in one of its own."""
    pytest.importorskip("transformers")
    errors = found_by_processes(Path(__file__), tmp_path_factory.mktemp("tiled"))
    whole_model, one_length = errors.pop("refused")
    assert "FSDP2 of the whole model alone" in whole_model and "sequences of 9 to 24 tokens" in one_length
    assert len(errors) == 7
    for name, error in errors.items():  # norms in fp32 round gradients of a sum otherwise than those of a mean
        assert error < (0.03 if "autocast" in name else 1e-6 if "chunks" in name else 1e-10), errors


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
@pytest.mark.parametrize(("kind", "collective"), [("ddp", "all-reduce"), ("fsdp2", "reduce-scatter")])
def test_each_block_is_reduced_before_the_backward_ends(found, backward, kind, collective):
    """Between the recomputation of a block and that of the block two before it, its gradients are on their way."""
    order = found["orders"][backward][kind]
    assert collective in order[order.index(f"recompute {DEPTH - 1}") :]
    for block in range(2, DEPTH):
        begun, reached = order.index(f"recompute {block}"), order.index(f"recompute {block - 2}")
        assert collective in order[begun:reached], order


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fully_shard on f", "apply fully_shard to the ReversibleBlock"),
        ("streams cast to bf16", "cast_forward_inputs=False"),
        ("DDP within", "DistributedDataParallel inside a ReversibleBlock"),
        ("FSDP1 within", "FullyShardedDataParallel inside a ReversibleBlock"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(found, name, words):
    assert words in found["refused"][name]


if __name__ == "__main__":
    find_as_one_of_them(find)

"""One of two gloo processes: a step with its loss in tiles on half of the batch; rank 0 compares with one process on all of it.

    python tiled_in_two_processes.py RANK STORE RESULTS

Not a test by itself: test_reversible_tiled_loss.py starts it twice and reads what rank 0 wrote.
"""

import torch
import transformers
from gloo_pair import find_as_one_of_them, whole
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holotrain.reversible.tiled_loss import tile_loss

WORDS, T, BATCH = 97, 24, 2


def model(tied: bool):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = transformers.Qwen3Config(vocab_size=WORDS, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).double().train()


def sharded(net, apart: bool):
    for block in net.model.layers:
        fully_shard(block)
    if apart:
        fully_shard(net.lm_head)
    return fully_shard(net)


def step(net) -> dict[str, Tensor]:
    tokens = torch.randint(WORDS, (2 * BATCH, T), generator=torch.Generator().manual_seed(1))
    rank = torch.distributed.get_rank()
    part = tokens if net.whole else tokens[rank * BATCH : (rank + 1) * BATCH]
    for _ in range(2):
        net.zero_grad()
        torch.manual_seed(2)
        net(input_ids=part, labels=part, use_cache=False).loss.backward()
    gradients = {name.removeprefix("module."): parameter.grad for name, parameter in net.named_parameters()}
    return {name: whole(each) for name, each in gradients.items()}


CASES = {
    "ddp": (DistributedDataParallel, True),
    "fsdp2": (lambda net: sharded(net, False), True),
    "fsdp2, the head apart": (lambda net: sharded(net, True), False),
}


def find(rank: int) -> dict[str, float]:
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else self.to(torch.float32)  # ty: ignore[invalid-assignment]
    worst = {}
    for name, (wrap, tied) in CASES.items():
        alone, net = model(tied), model(tied)
        alone.whole = True
        tile_loss(net, most_logits=5 * BATCH * WORDS)
        net = wrap(net)
        net.whole = False
        expected, found = step(alone), step(net)
        lacking = [key for key, each in found.items() if each is None]
        assert not lacking, (name, lacking)
        worst[name] = max(((found[key] - each).abs().max() / each.abs().max()).item() for key, each in expected.items())
    return worst


find_as_one_of_them(find)

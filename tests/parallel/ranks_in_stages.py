"""One of three gloo processes that run a step of a model in stages, and compare it with a step in one process.

Not a test by itself: test_parallel_pipeline.py starts it twice.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from small_models import IMAGE, TEXT

from holotrain.models.gpt import GPT, RevGPT
from holotrain.models.vit import RevViT, ViT
from holotrain.parallel.stages import SCHEDULES, ModelStage, collected
from holotrain.tasks import CausalLM, ImageClassifier

DEPTH = {"depth": 4}

MODELS = {
    "ViT": lambda: ViT(**IMAGE | DEPTH, pool="class"),
    "RevViT": lambda: RevViT(**IMAGE | DEPTH, backward="pareprop"),
    "GPT": lambda: GPT(**TEXT | DEPTH, backward="checkpoint", positions="learned"),
    "RevGPT": lambda: RevGPT(**TEXT | DEPTH, backward="reversible"),
}


def task_of(name: str):
    torch.manual_seed(0)
    model = MODELS[name]()
    if "ViT" in name:
        return ImageClassifier(model, classes=5).double()
    return CausalLM(model, torch.ones(TEXT["vocab"])).double()


def batch_of(name: str):
    generator = torch.Generator().manual_seed(1)
    if "ViT" in name:
        return torch.rand(8, 1, 8, 8, generator=generator, dtype=torch.float64), torch.randint(5, (8,), generator=generator)
    tokens = torch.randint(TEXT["vocab"], (8, 11), generator=generator)
    lengths = torch.tensor([11, 3, 1, 1, 5, 11, 4, 9])  # the loss of a microbatch is the mean of many tokens, of few, of none
    return {"tokens": tokens, "lengths": lengths}


def grads_of(task) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in task.named_parameters() if each.grad is not None}


def step(name: str, schedule: str) -> dict[str, float]:
    """The largest differences of a step in stages from one in this process."""
    alone, task = task_of(name), task_of(name)
    inputs = alone.inputs(batch_of(name))
    loss = alone.loss(*inputs)
    loss.backward()
    stage = ModelStage(task, dist.group.WORLD, nullcontext)
    inside = stage.step(stage.make_schedule(4, schedule, *inputs), *inputs)
    ends = dist.new_group([0, 2])
    for parameter in stage.tied:
        dist.all_reduce(parameter.grad, group=ends)
    grads, expected = grads_of(task), grads_of(alone)
    together = collected(dict(grads), dist.group.WORLD, torch.device("cpu"))
    with torch.no_grad():
        whole, evaluated = alone.eval().loss(*inputs), task.eval().loss(*inputs)
    found = {"loss": (inside - loss).abs().item(), "evaluated": (evaluated - whole).abs().item()}
    found |= {"missing": len(expected.keys() ^ together.keys()) if stage.first else 0, "own": len(grads) / len(expected)}
    return found | {"grad": max((grads[each] - expected[each]).abs().max().item() for each in grads)}


def drawn_by_stages() -> dict[str, bool]:
    """With dropout, whether all stages draw the same from the global generator afterwards, and the same within."""
    torch.manual_seed(0)
    task = ImageClassifier(RevViT(**IMAGE | DEPTH, dropout=0.5), classes=5)
    inputs = batch_of("RevViT")[0].float(), batch_of("RevViT")[1]
    within = []
    task.model.blocks.blocks[dist.get_rank()].register_forward_pre_hook(lambda *_: within.append(torch.initial_seed()))
    stage = ModelStage(task, dist.group.WORLD, nullcontext)
    stage.step(stage.make_schedule(4, "1f1b", *inputs), *inputs)
    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, (torch.rand(4).tolist(), within[:1]))
    return {"after": told[0][0] == told[1][0] == told[2][0], "seeds": len({str(seed) for _, seed in told})}


def find(rank: int) -> dict:
    return {"drawn": drawn_by_stages()} | {
        f"{name}, {schedule}": step(name, schedule) for name in MODELS for schedule in SCHEDULES
    }


if __name__ == "__main__":
    find_as_one_of_them(find)

"""Models that are divided into stages: the same numbers as in one process. As a script, this is a gloo process of several."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from covering import long, paired, slow
from gloo_pair import find_as_one_of_them, found_by_processes
from small_models import IMAGE, POOLED, TEXT, WINDOWS

from holotrain.models.gpt import GPT, RevGPT
from holotrain.models.mvit import MViT
from holotrain.models.roberta import RevRoBERTa, RoBERTa
from holotrain.models.swin import RevSwin, Swin
from holotrain.models.vit import RevViT, ViT
from holotrain.parallel.stages import SCHEDULES, ModelStage, check_stages, collected
from holotrain.parallel.strategies import clip
from holotrain.tasks import CausalLM, ImageClassifier, MaskedLM, SequenceClassifier

DEPTH = {"depth": 4}
DRY = {"dropout": 0.0, "attention_dropout": 0.0}
MAPS = WINDOWS | {"depths": (2, 3)}  # between two stages a map changes its size; between others it does not

MODELS = {
    "ViT": lambda: ViT(**IMAGE | DEPTH, pool="class"),
    "RevViT": lambda: RevViT(**IMAGE | DEPTH, backward="pareprop"),
    "GPT": lambda: GPT(**TEXT | DEPTH, backward="checkpoint", positions="learned"),
    "RevGPT": lambda: RevGPT(**TEXT | DEPTH, backward="reversible"),
    "RoBERTa": lambda: RoBERTa(**TEXT | DEPTH | DRY),
    "RevRoBERTa": lambda: RevRoBERTa(**TEXT | DEPTH | DRY),
    "RevRoBERTa, classes": lambda: RevRoBERTa(**TEXT | DEPTH | DRY, classes=5),
    "Swin": lambda: Swin(**MAPS, backward="checkpoint"),
    "RevSwin": lambda: RevSwin(**MAPS),
}


def task_of(name: str):
    torch.manual_seed(0)
    model = MODELS[name]()
    if "ViT" in name or "Swin" in name:
        return ImageClassifier(model, classes=5).double()
    if "classes" in name:
        return SequenceClassifier(model, classes=5).double()
    if "RoBERTa" in name:
        return MaskedLM(model, torch.ones(TEXT["vocab"]), mask_id=3).double()
    return CausalLM(model, torch.ones(TEXT["vocab"])).double()


def batch_of(name: str):
    generator = torch.Generator().manual_seed(1)
    if "ViT" in name or "Swin" in name:
        return torch.rand(8, 1, 8, 8, generator=generator, dtype=torch.float64), torch.randint(5, (8,), generator=generator)
    tokens = torch.randint(TEXT["vocab"], (8, 11), generator=generator)
    lengths = torch.tensor([11, 3, 1, 1, 5, 11, 4, 9])  # the loss of a microbatch is the mean of many tokens, of few, of none
    return {"tokens": tokens, "lengths": lengths, "labels": torch.arange(8) % 5}


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
    ends = dist.new_group([0, dist.get_world_size() - 1])
    for parameter in stage.tied:
        dist.all_reduce(parameter.grad, group=ends)
    grads, expected = grads_of(task), grads_of(alone)
    held = sum(not parameter.is_meta for parameter in task.parameters())
    together = collected(dict(grads), dist.group.WORLD, torch.device("cpu"))
    with torch.no_grad():
        whole, evaluated = alone.eval().loss(*inputs), task.eval().loss(*inputs)
    found = {"loss": (inside - loss).abs().item(), "evaluated": (evaluated - whole).abs().item()}
    found |= {"missing": len(expected.keys() ^ together.keys()) if stage.first else 0, "own": held / len(expected)}
    found["grad"] = difference(grads, expected)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    trained = [parameter for parameter in task.parameters() if parameter.grad is not None]
    clip(trained, 0.01, "norm", {*stage.tied} if stage.last else set(), dist.group.WORLD)
    return found | {"clipped": difference(grads_of(task), grads_of(alone)), "norm": norm.item()}


def difference(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max((grads[each] - expected[each]).abs().max().item() for each in grads)


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
    return {"after": all(after == told[0][0] for after, _ in told), "seeds": len({str(seed) for _, seed in told})}


def find(rank: int) -> dict:
    return {"drawn": drawn_by_stages()} | {str(case): step(*case) for case in paired([*MODELS], [*SCHEDULES])}


@pytest.mark.parametrize("stages", [3, long(2), slow(4)])
def test_a_step_in_stages_is_that_of_one_process(stages, tmp_path):
    steps = found_by_processes(Path(__file__), tmp_path, stages)
    # What is drawn for data stays the same in all stages, whatever each drops.
    assert steps.pop("drawn") == {"after": True, "seeds": stages}
    assert len(steps) == len(MODELS)
    for where, found in steps.items():
        assert max(found[name] for name in ("loss", "evaluated", "grad", "clipped")) < 1e-13, (where, found)
        assert found["norm"] > 0.1, (where, found)  # ten times as much as it is clipped to
        assert found["missing"] == 0 and 0.1 < found["own"] < 0.7, (where, found)  # each process has its own part


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: GPT(**TEXT | {"depth": 1}), "a model of 1 block cannot be divided into 2 stages"),
        (lambda: RevViT(**IMAGE, exact=True), "exact streams have one grid"),
        (lambda: RevSwin(**WINDOWS, exact=True), "exact streams have one grid"),
        (lambda: MViT(**POOLED), "MViT cannot be divided"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(model, expected):
    with pytest.raises(ValueError, match=expected):
        check_stages(model(), 2)


if __name__ == "__main__":
    find_as_one_of_them(find)

"""Steps as CUDA graphs in whole trainings, on a GPU on paper: as without, to the bit; and why a step stays an ordinary one."""

import copy
import re
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import pytest
import torch
from compared import assert_equal
from covering import long, slow
from foreign_models import write_network
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from paper_gpu import paper_gpu
from peft import LoraConfig, get_peft_model
from small_models import IMAGE, TEXT
from small_trainings import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from holotrain.callbacks import WeightAverage
from holotrain.data.text.tokenise import OnCPU
from holotrain.models import GPT, HuggingFace, RevGPT, RevViT, ViT, gpt
from holotrain.models.block_schedules import set_tile
from holotrain.reversible import ReversibleBlock, ReversibleSequence, graphs, loss_ops, recompute, undo
from holotrain.reversible.context import recomputing
from holotrain.reversible.graphs import WARM_UPS, StepGraphs
from holotrain.tasks import CausalLM, ImageClassifier, MaskedLM, SequenceClassifier, optimizer_functions, schedules


@pytest.fixture(autouse=True)
def on_paper(monkeypatch):
    monkeypatch.setattr(loss_ops, "_works", lambda device: False)  # Triton's kernels read addresses
    with paper_gpu(monkeypatch) as machine:
        yield machine


class OnPaper(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Takes a device that there is not."""


def trainer(**options) -> pl.Trainer:
    accelerator = OnPaper()
    strategy = SingleDeviceStrategy(device=torch.device("cuda", 0), accelerator=accelerator)
    return quiet_trainer(**{"accelerator": "auto", "strategy": strategy, "max_epochs": 2} | options)


def images(number: int):
    """12 of 3 or 5 images."""
    count, generator = (3, 5)[number % 4 == 3], torch.Generator().manual_seed(number)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 5


def texts(number: int):
    """Of three lengths."""
    return {"tokens": torch.randint(40, (2, (13, 9, 7)[number % 3]), generator=torch.Generator().manual_seed(number))}


def gpt2():
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16, **dry))
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return Logits(recompute(get_peft_model(model, lora), "base_model.model.transformer.h"))


def foreign(kind: str, head: str):
    """A model of ``model=huggingface`` that knows a word for padding."""
    with TemporaryDirectory() as folder:
        drops = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob")
        write_network(Path(folder), kind, pad_token_id=39, **dict.fromkeys(drops, 0.0))
        return HuggingFace(folder, head, classes=5)


class Logits(nn.Module):
    """Makes the loss of whole logits. Those in tiles ask torch itself for the device."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets=None):
        logits = self.model(tokens)
        logits = getattr(logits, "logits", logits)
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tiled_gpt():
    model = GPT(**TEXT, backward="checkpoint8")
    set_tile(model, 4)
    return Logits(model)


TRAININGS = {
    "images, validated between": (partial(ViT, **IMAGE), images, {"val_check_interval": 5}),
    "two streams, clipped, averaged": (partial(RevViT, **IMAGE), images, {"gradient_clip_val": 0.1}),
    "clipped by value": (partial(RevViT, **IMAGE), images, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated": (partial(RevViT, **IMAGE, backward="pareprop"), images, {"accumulate_grad_batches": 2}),
    "texts": (lambda: Logits(RevGPT(**TEXT)), texts, {}),
    "in tiles, 8 bits": (tiled_gpt, texts, {"gradient_clip_val": 1.0}),
    "huggingface": (partial(foreign, "gpt2", "causal_lm"), texts, {}),
    "GPT-2 with LoRA": (gpt2, texts, {"accumulate_grad_batches": 3}),
}
QUICK = ("accumulated", "texts")


def trained(name: str, captured: bool, folder=None, optimizer="adamw", more=(), **fit) -> tuple[list, pl.LightningModule]:
    """What is saved after two epochs; into a folder a checkpoint of each."""
    make, batch, options = TRAININGS[name]
    torch.manual_seed(0)
    kind = partial(ImageClassifier, classes=5) if batch is images else CausalLM
    optimizer = getattr(optimizer_functions, optimizer)
    task = kind(make(), optimizer=optimizer, scheduler=schedules.cosine, graphs=captured)
    callbacks = [WeightAverage(decay=0.9)] if "averaged" in name else []
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1))
    fitted = trainer(callbacks=[*callbacks, *more], enable_checkpointing=folder is not None, **options)
    fitted.fit(task, DataLoader([*map(batch, range(12))], batch_size=None), DataLoader([batch(0)], batch_size=None), **fit)
    return [each.cpu() for each in task.state_dict().values()], task


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in TRAININGS])
def test_a_training_is_the_same_to_the_bit(name):
    expected, _ = trained(name, False)
    found, task = trained(name, True)
    assert re.fullmatch(r"[23] shapes, forward and backward", str(task.graphs))
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("accumulated", True, False),
        long("accumulated", False, True),
        slow("accumulated", True, True),
        long("two streams, clipped, averaged", True, False),
        slow("two streams, clipped, averaged", False, True),
        long("two streams, clipped, averaged", True, True),
    ],
)
def test_a_resumed_training_is_the_same_with_graphs_before_or_after(name, before, after, tmp_path):
    expected, _ = trained(name, False)
    trained(name, before, tmp_path)
    found, _ = trained(name, after, tmp_path / "resumed", ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_equal(found, expected)


class Waits(pl.Callback):
    """Collects what the host waited for in each batch, in callbacks, too, if it is the last of them."""

    def __init__(self, machine):
        self.machine, self.found = machine, []

    def on_train_batch_start(self, *_):
        self.machine.waits.clear()

    def on_train_batch_end(self, *_):
        self.found += self.machine.waits


@pytest.mark.parametrize("optimizer", ["adamw", long("sgd"), slow("muon"), long("adafactor")])
def test_no_step_waits(optimizer, on_paper):
    """With clipping, the optimizer, its schedule and the average."""
    waits = Waits(on_paper)
    _, task = trained("two streams, clipped, averaged", True, optimizer=optimizer, more=[waits])
    assert task.graphs.captured > 1
    assert set(waits.found) == ({"aten._local_scalar_dense"} if optimizer == "adafactor" else set())  # torch's reads norms


DROPOUT = {
    "in blocks": lambda: Logits(RevGPT(**TEXT | {"dropout": 0.2}, backward="pareprop")),
    "in int8": lambda: Logits(GPT(**TEXT | {"dropout": 0.2}, backward="checkpoint8")),
    "in chunks": lambda: recompute(GPT(**TEXT | {"dropout": 0.2}), backward="chunks", chunk=4),
}


class DeviceState(pl.Callback):
    """Saves the state of the device's own generator, as ExactResume does on a GPU."""

    def __init__(self, machine):
        self.machine, self.state = machine, None

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["device"] = self.machine.generator.get_state()

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.state = checkpoint["device"]

    def on_train_start(self, trainer, pl_module):
        self.machine.generator.set_state(torch.Generator().get_state() if self.state is None else self.state)


def whole_loss(hidden, weight, targets, reduction):
    return nn.functional.cross_entropy(hidden @ weight.T, targets, reduction=reduction)


def dropped(name: str, machine, folder, **options) -> tuple[list[torch.Tensor], CausalLM]:
    torch.manual_seed(0)
    task = CausalLM(DROPOUT[name](), optimizer=optimizer_functions.adamw, scheduler=schedules.cosine, graphs=True)
    saving = ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    fitted = trainer(callbacks=[saving, DeviceState(machine)], enable_checkpointing=True)
    fitted.fit(task, DataLoader([*map(texts, (0, 1) * 3)], batch_size=None), **options)
    return [each.cpu() for each in task.state_dict().values()], task


@pytest.mark.parametrize("name", ["in int8", slow("in blocks"), long("in chunks")])
def test_dropout_is_the_same_whenever_a_step_is_captured_and_after_a_resume(name, on_paper, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "linear_cross_entropy", whole_loss)  # tiles ask torch itself for the device
    found, task = dropped(name, on_paper, tmp_path)
    assert task.graphs.captured == 2 and task.graphs.reason is None
    resumed, _ = dropped(name, on_paper, tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_equal(resumed, found)
    assert not copy.deepcopy(task).graphs.captured  # as an average makes one of it
    monkeypatch.setattr(graphs, "MOST", 0)
    ordinary, task = dropped(name, on_paper, tmp_path)
    assert not task.graphs.captured
    assert_equal(found, ordinary)


class LateNoise(nn.Module):
    """Draws after the last of what its backward needs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = nn.functional.dropout(self.linear(x))
        return y + torch.rand_like(y)


def test_what_a_recomputation_does_not_draw_again_is_found(on_paper):
    blocks = recompute(nn.Sequential(LateNoise(), LateNoise()).to("cuda"))
    step = StepGraphs(lambda x: blocks(x).square().mean(), blocks)
    with pytest.warns(UserWarning, match="draws random numbers that its recomputation does not"):
        for _ in range(WARM_UPS + 1):
            step(x_of())


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(
    ("kind", "head", "task"),
    [
        ("gpt2", "causal_lm", CausalLM),
        ("llama", "causal_lm", CausalLM),
        slow("llama", "sequence_classification", partial(SequenceClassifier, classes=5)),
        slow("bert", "masked_lm", partial(MaskedLM, token_bytes=torch.ones(40), mask_id=38, mask_probability=0.9)),
    ],
)
def test_models_of_transformers_wait_for_nothing_but_true_padding(on_paper, monkeypatch, kind, head, task, padding):
    """With words for padding inside a text. In the capture of a graph attention gets no mask, which would slow it down."""
    masks: list[torch.Tensor | None] = []
    task = task(foreign(kind, head)).to("cuda").train()
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    noted = lambda module, q, k, v, mask, **more: masks.append(mask) or attention(module, q, k, v, mask, **more)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", noted)
    lengths = torch.tensor([8, 8 - padding])
    batch = {"tokens": torch.arange(24, 40).view(2, 8).to("cuda"), "labels": torch.tensor([1, 4]).to("cuda")}
    batch |= {"lengths": lengths.to("cuda"), "cpu_lengths": OnCPU(lengths)}
    inputs, waits = task.inputs(batch), padding > 0 and head != "causal_lm"
    on_paper.waits.clear()
    task.loss(*inputs).backward()
    assert bool(on_paper.waits) == waits and any(mask is not None for mask in masks) == waits
    if not waits:
        step = StepGraphs(task.loss, task.model)
        for _ in range(WARM_UPS + 1):
            step(*inputs)
        assert step.captured == 1 and masks[-1] is None


def step_of(loss=None, **more):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to("cuda")
    net.unused = nn.Parameter(torch.ones(2, device="cuda"))
    net.register_buffer("scale", torch.ones(1, device="cuda"))
    return net, StepGraphs(loss or (lambda x: net(x).square().mean()), net)


def x_of(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * rows).view(rows, 4).to("cuda")


def test_gradients_are_added_and_what_has_none_keeps_none(on_paper):
    net, step = step_of()
    for _ in range(WARM_UPS + 2):
        step(x_of(), scale=0.5)
    due = torch.autograd.grad(net(x_of()).square().mean(), net[0].weight)[0]
    torch.testing.assert_close(net[0].weight.grad, 0.5 * (WARM_UPS + 2) * due)
    assert net.unused.grad is None and step.captured == 1
    on_paper.waits.clear()
    for set_to_none in (True, False):
        net.zero_grad(set_to_none)
        step(x_of(), scale=0.5)
    assert not on_paper.waits
    torch.testing.assert_close(net[0].weight.grad, 0.5 * due)


def test_a_shape_is_captured_when_it_is_seen_again_up_to_eight(on_paper, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 3)
    net, step = step_of()
    for _ in range(3):
        for rows in (1, 2, 3, 4):
            loss = step(x_of(rows))
            assert loss.item() == net(x_of(rows)).square().mean().item()
    assert step.captured == 3


def frozen(net):
    net[0].requires_grad_(False)


def evaluated(net):
    net[1].eval()


def moved(net):
    net[0].weight.data = net[0].weight.data.clone()


def another_buffer(net):
    net.scale = torch.ones(1, device="cuda")


@pytest.mark.parametrize("change", [frozen, evaluated, moved, another_buffer])
def test_a_change_of_the_model_drops_the_graphs(change):
    net, step = step_of()
    for _ in range(WARM_UPS + 1):
        step(x_of())
    assert step.captured == 1
    change(net)
    net.zero_grad()
    step(x_of())
    assert not step.captured and (net[0].weight.grad is None) == (change is frozen)


def test_a_change_of_schedules_drops_the_graphs():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).to("cuda")
    step = StepGraphs(lambda x: blocks(x).square().mean(), blocks)
    for change in (recompute, partial(recompute, backward="checkpoint8"), undo):
        for _ in range(WARM_UPS + 1):
            step(x_of())
        assert step.captured == 1
        change(blocks)
        step(x_of())
        assert not step.captured


def waiting(net):
    return lambda x: net(x).square().mean() * float(net(x).mean() < 1e9)


def refused(net):
    def loss(x):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
        return net(x).square().mean()

    return loss


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net: lambda x: net(x).mean() * float(torch.rand(())), "draws random numbers on the CPU"),
        (waiting, r"waits for the device \(.*\.py:\d+\)"),
        (refused, "RuntimeError: operation not permitted when stream is capturing$"),
    ],
)
def test_what_cannot_be_captured_is_said_once_and_the_training_goes_on(make, words):
    net, step = step_of()
    step._loss = make(net)
    with pytest.warns(UserWarning, match=f"not captured as a CUDA graph: .*{words}") as warned:
        for _ in range(WARM_UPS + 3):
            net.zero_grad()
            loss = step(x_of())
    assert len(warned) == 1 and step.reason and loss.isfinite() and net[0].weight.grad.abs().sum() > 0


class Crowded(nn.Module):
    """Finds no memory when it runs ahead in a capture, once."""

    def __init__(self):
        super().__init__()
        self.linear, self.met = nn.Linear(4, 4), False

    def forward(self, x):
        ahead = recomputing() and "side" in torch.cuda.current_stream().name
        if torch.cuda.is_current_stream_capturing() and ahead and not self.met:
            self.met = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.linear(x)


def test_a_block_that_finds_no_memory_ahead_of_its_turn_ends_the_capture():
    net = ReversibleSequence([ReversibleBlock(Crowded(), Crowded()) for _ in range(3)], "pareprop").to("cuda")
    step = StepGraphs(lambda x: sum(net(x, x.tanh())).square().mean(), net)
    with pytest.warns(UserWarning, match="not captured as a CUDA graph: OutOfMemoryError: CUDA out of memory"):
        for _ in range(WARM_UPS + 1):
            step(x_of())
    assert any(part.met for part in net.modules() if isinstance(part, Crowded))


def test_tensors_off_the_gpu_are_ordinary_steps():
    net = nn.Linear(4, 1)
    step = StepGraphs(lambda x: net(x).mean(), net)
    for _ in range(WARM_UPS + 2):
        step(torch.ones(2, 4))
    assert not step._graphs and net.weight.grad.sum() == 4 * (WARM_UPS + 2)


def test_shapes_that_are_seen_once_take_no_place(monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    net, step = step_of()
    for rows in (1, 2, 3, 4, 9, 9, 9):
        step(x_of(rows))
    assert step.captured == 1


def test_what_only_some_shapes_train_stays_without_a_gradient():
    """Else an optimizer would decay it."""
    net = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]).to("cuda")
    step = StepGraphs(lambda x: (net[0](x) + (net[1](x) if len(x) == 3 else 0)).square().mean(), net)
    for _ in range(WARM_UPS + 1):
        for rows in (3, 2):
            step(x_of(rows))  # gradients of the first are there while the second is captured
    assert step.captured == 2
    net.zero_grad()
    step(x_of(2))
    assert net[1].weight.grad is None and net[0].weight.grad is not None


@pytest.mark.parametrize("precision", ["16-mixed"])
def test_gradients_that_are_scaled_are_refused(precision):
    scaling = pl.plugins.precision.MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))
    task = ImageClassifier(ViT(**IMAGE), 5, optimizer=optimizer_functions.adamw, graphs=True)
    with pytest.raises(ValueError, match="graphs: does not go together with the gradient scaling of 16-mixed"):
        trainer(plugins=[scaling]).fit(task, DataLoader([images(0)], batch_size=None))

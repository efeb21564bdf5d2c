"""Models that keep less, in the training loops of others: transformers' Trainer, those of TRL, and Lightning's. Compared with
the same loop over the plain model."""

import math
import warnings
from functools import cache
from itertools import product
from pathlib import Path
from types import MethodType
from typing import Any

import lightning
import pytest
import torch
from covering import long, pairwise, slow
from foreign_models import write_tokenizer
from gloo_pair import found_by_processes
from made_once import made_once
from torch import nn

import holotrain
from holotrain.models.quantised import quantise
from holotrain.reversible import recompute, replaced_forward

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 128, "tie_word_embeddings": True, "pad_token_id": 0}
WAYS = {"checkpoint": {}, "checkpoint8": {"backward": "checkpoint8"}, "tile": {"tile": 16}, "chunks": {"chunk": 16}}
TOKENS = torch.randint(3, 260, (12, 40), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]
TEXTS = [f"{number} and {number * number} are what they are" for number in range(12)]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Other trainings in this process may have left the variables of theirs, which accelerate reads."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A pretrained model with its tokenizer, of bytes."""

    def make(path: Path) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, eos_token_id=1)
        transformers.LlamaForCausalLM(config).save_pretrained(path / "model")
        write_tokenizer(path / "model")

    return made_once(tmp_path_factory, "pretrained_for_trainers", make)


def loaded(folder: Path, part: str = "whole") -> Any:
    """The pretrained model; ``part``: what of it is trained."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    if part != "whole":
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    if part == "4-bit":
        quantise(model, 4)
    return model


# Loops


class Tuned(lightning.LightningModule):
    """Trains and evaluates a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.figures = model, []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.figures.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.figures.append(self.model(**batch).loss.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def figures_of_lightning(model: nn.Module, folder: Path) -> list[float]:
    loaders = [torch.utils.data.DataLoader(ROWS, batch_size=2)] * 2
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    task = Tuned(model.train())
    lightning.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=1, **options, **quiet).fit(task, *loaders)
    return task.figures


def made_trainer(kind: str, model: nn.Module, folder: Path, **changed: Any) -> Any:
    """A Trainer of transformers or TRL that accumulates over two batches, and evaluates after each step but in GRPO."""
    options = {"output_dir": folder / "out", "max_steps": 3, "logging_steps": 1, "report_to": [], "use_cpu": True, "seed": 0}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "disable_tqdm": True}
    options |= {"save_strategy": "no", "bf16": False, "gradient_checkpointing": False}
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    if kind == "Trainer":
        arguments = transformers.TrainingArguments(**options | evaluates | changed)
        return transformers.Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:4])
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    if kind.startswith("SFT"):
        own = {"compute_loss": transformers.Trainer.compute_loss} if kind != "SFT" else {}
        trainer = type("Trainer", (trl.SFTTrainer,), own)
        data = datasets.Dataset.from_dict({"text": TEXTS})
        arguments = trl.SFTConfig(**options | evaluates | {"max_length": 64, "packing": True} | changed)
        return trainer(model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    if kind == "DPO":
        rows = {"prompt": TEXTS, "chosen": [" yes"] * len(TEXTS), "rejected": [" not at all"] * len(TEXTS)}
        data = datasets.Dataset.from_dict(rows)
        arguments = trl.DPOConfig(**options | evaluates | {"max_length": 64} | changed)
        return trl.DPOTrainer(model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    data = datasets.Dataset.from_dict({"prompt": TEXTS})
    options |= {"num_generations": 2, "max_completion_length": 8, "num_iterations": 2, "beta": 0.1}
    arguments = trl.GRPOConfig(**options | changed)
    return trl.GRPOTrainer(model, distinct_letters, arguments, train_dataset=data, processing_class=tokenizer)


def distinct_letters(completions, **rest) -> list[float]:
    """A reward."""
    return [float(len(set(text))) for text in completions]


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def figures_of(kind: str, model: nn.Module, folder: Path, **changed: Any) -> list[float]:
    """The losses of training and evaluation, and the norms of gradients."""
    if kind == "Lightning":
        return figures_of_lightning(model, folder)
    trainer = made_trainer(kind, model, folder, **changed)
    trainer.train()
    return [figure for name in ("loss", "eval_loss", "grad_norm") for figure in logged(trainer, name)]


KINDS = ["Trainer", "SFT", "DPO", "GRPO", "Lightning"]
CLOSE = {"checkpoint": 0, "checkpoint8": 1e-3, "tile": 1e-6, "chunks": 1e-6}


@cache
def plain_figures(kind: str, part: str, folder: Path, **changed: Any) -> list[float]:
    return figures_of(kind, loaded(folder, part), folder, **changed)


def assert_close(found: list[float], expected: list[float], way: str) -> None:
    off = max(abs(ours - theirs) / max(abs(theirs), 1) for ours, theirs in zip(found, expected, strict=True))
    assert len(found) > 5 and off <= CLOSE[way]


PARTS = ["whole", "lora", "4-bit"]
FEW = [("lora", "tile"), ("4-bit", "chunks")]
OFTEN = pairwise(KINDS, PARTS, list(WAYS))
MATRIX = [(slow if case in OFTEN else long)(*case) for case in product(KINDS, PARTS, WAYS)]


@pytest.mark.parametrize(("kind", "part", "way"), MATRIX)
def test_figures_are_those_of_the_plain_model(folder, kind, part, way):
    found = figures_of(kind, recompute(loaded(folder, part), **WAYS[way]), folder)
    assert_close(found, plain_figures(kind, part, folder), way)
    if kind == "DPO":
        assert found[0] == pytest.approx(math.log(2), abs=1e-7)  # the policy is the reference


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_first_ratios_of_grpo_are_1(folder, way):
    """Those of later steps, on the same completions, are not."""
    model = recompute(loaded(folder, "lora"), **WAYS[way])
    trainer = made_trainer("GRPO", model, folder, epsilon=1e-6, num_iterations=3, learning_rate=1e-2)
    trainer.train()
    clipped, divergence = logged(trainer, "clip_ratio/region_mean"), logged(trainer, "kl")
    assert clipped[0] == divergence[0] == 0 and clipped[2] > 0 and divergence[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["Trainer", "SFT"])
def test_a_resumed_training_is_exact(folder, tmp_path, kind, way):
    saved = {"output_dir": tmp_path, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = made_trainer(kind, recompute(loaded(folder), **WAYS[way]), folder, **saved)
    whole.train()
    resumed = made_trainer(kind, recompute(loaded(folder), **WAYS[way]), folder, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed) == logged(whole) and len(logged(whole)) == 4
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Trainer", "SFT"])
def test_bfloat16(folder, kind):
    found = figures_of(kind, recompute(loaded(folder)), folder, bf16=True)
    assert_close(found, plain_figures(kind, "whole", folder, bf16=True), "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "most"), [("checkpoint", 0), ("checkpoint8", 0.05), ("tile", 1e-5), ("chunks", 1e-5)])
def test_gradients_of_adapters_over_bitsandbytes(tmp_path, way, most):
    pytest.importorskip("bitsandbytes")
    config = transformers.LlamaConfig(**SIZES | {"hidden_size": 64})  # which it quantises in groups of 64
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    four_bits, found = transformers.BitsAndBytesConfig(load_in_4bit=True), []
    for change in (lambda model: model, lambda model: recompute(model, **WAYS[way])):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits, device_map="cpu")
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = change(peft.get_peft_model(model, adapters)).train()
        model(TOKENS[:2], labels=TOKENS[:2]).loss.backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.requires_grad]))
    plain, ours = found
    assert plain.norm() > 0 and (ours - plain).norm() <= most * plain.norm()


PLANNED = ["plain", "gradient_checkpointing", "tile", "checkpoint8, tile, the model's loss", "chunk, the model's loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tokens"), [*((method, 1024) for method in PLANNED), ("recompute", 16)])
def test_a_step_of_sft_takes_what_was_planned(folder, monkeypatch, method, tokens):
    """Counted in tensors. With few tokens and a wide model it is where the gradients of a tied weight add up."""
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import bench_trl

    shape, given = SIZES | {"vocab_size": 2048, "hidden_size": 32 if tokens > 16 else 256}, bench_trl.METHODS[method]
    planned = bench_trl.planned(shape, given, tokens)
    assert planned == pytest.approx(bench_trl.tracked(folder / "model", shape, given, tokens), rel=0.005)


@pytest.mark.long  # each process imports TRL
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes(folder, tmp_path, monkeypatch, sharded):
    """DDP, and FSDP2."""
    monkeypatch.setenv("PRETRAINED", str(folder))
    monkeypatch.setenv("SHARDED", str(sharded))
    found = found_by_processes(Path(__file__).with_name("trainer_ranks.py"), tmp_path)
    for name, figures in found.items():
        kind, _, way = name.partition(" ")
        assert_close(figures, found[f"{kind} plain"], way.replace("plain", "checkpoint"))


# Whose checkpointing, whose loss, which mode


@pytest.mark.parametrize("kind", ["Trainer", slow("SFT"), slow("DPO")])
def test_transformers_own_checkpointing_gives_way(folder, kind):
    """Each MLP runs twice for a batch, not thrice."""
    model, calls = recompute(loaded(folder), tile=16 if kind == "SFT" else None), []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    options = {"gradient_checkpointing": True, "eval_strategy": "no", "max_steps": 1}
    figures_of(kind, model, folder, **options)
    assert sum(calls) == 2 * 2  # two batches
    plain = figures_of(kind, loaded(folder), folder, **options)
    assert figures_of(kind, recompute(loaded(folder)), folder, **options) == plain


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("way", ["tile", "chunks"])
def test_a_loss_of_trl_stays_its_own_and_that_is_said(folder, way, before):
    model = loaded(folder)
    trainer = made_trainer("SFT", recompute(model, **WAYS[way]) if before else model, folder)
    with pytest.warns(UserWarning, match="not taken in") as said:
        if not before:
            recompute(model, **WAYS[way])
        trainer.train()
    assert len([each for each in said if "not taken in" in str(each.message)]) == 1
    assert logged(trainer) == pytest.approx(plain_figures("SFT", "whole", folder)[:3], rel=1e-6)


@pytest.mark.parametrize(
    ("part", "way"), [(slow if (part, way) in FEW else long)(part, way) for part, way in product(PARTS, ["tile", "chunks"])]
)
def test_a_trainer_of_trl_with_the_loss_of_the_model(folder, part, way):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not taken in")
        found = figures_of("SFT, the model's loss", recompute(loaded(folder, part), **WAYS[way]), folder)
    assert_close(found, plain_figures("SFT", part, folder), way)


def test_what_wraps_a_bound_forward_wraps_ours(folder):
    model = recompute(loaded(folder), tile=16).train()
    own = model.forward.__func__
    model.forward = MethodType(lambda module, *given, **named: own(module, *given, **named), model)
    assert model(TOKENS[:1], labels=TOKENS[:1]).logits is None


@pytest.mark.parametrize("way", [{}, {"tile": 16}])
def test_a_model_in_eval_with_gradients_says_so_once(folder, monkeypatch, way):
    """``from_pretrained`` gives it so, and Lightning keeps the mode."""
    monkeypatch.setattr(replaced_forward, "_said_in_eval", set())
    model = recompute(loaded(folder), backward="checkpoint8", **way)
    with pytest.warns(UserWarning, match=r"call model.train\(\) to train it") as said:
        model(TOKENS[:2], labels=TOKENS[:2]).loss.backward()
        model(TOKENS[:2], labels=TOKENS[:2]).loss.backward()
    assert len(said) == 1 + len(way)  # of a block, and of the loss
    with warnings.catch_warnings(action="error"):
        model.train()(TOKENS[:2], labels=TOKENS[:2]).loss.backward()
        model.eval().requires_grad_(False)(TOKENS[:2], labels=TOKENS[:2])


def test_fit_trains_what_comes_in_eval(folder, tmp_path, monkeypatch):
    """But for what does not learn, such as a teacher."""
    monkeypatch.chdir(tmp_path)
    task, modes = Tuned(recompute(loaded(folder))), []
    task.teacher = loaded(folder).requires_grad_(False)
    task.model.register_forward_hook(lambda *_: modes.append((task.model.training, task.teacher.training)))
    data = lightning.LightningDataModule.from_datasets(torch.utils.data.Subset(ROWS, [0, 1]), batch_size=2)
    holotrain.fit(model=task, data=data, overrides=["trainer.max_epochs=1", "trainer.accelerator=cpu"], quiet=True)
    assert modes == [(True, False)]

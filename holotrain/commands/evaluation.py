"""``holotrain validate``, ``test`` and ``predict``: what a checkpoint, or pretrained weights, make of data.

``fit`` tests with ``evaluate``. ``predict`` classifies images or texts, or scores texts, and writes predictions.csv.
"""

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from holotrain.callbacks.monitors import log_figure
from holotrain.commands import screen
from holotrain.commands.prepare import (
    as_exported,
    attention_for,
    described_model,
    lightning_refusals,
    load_weights,
    prepare,
    prepared_task,
)
from holotrain.commands.run import Run, write_summary
from holotrain.config import checkpointed
from holotrain.config.build import build_loggers, build_matrices, build_trainer, check_device, description, task_of
from holotrain.config.command_options import CheckpointConfig, PredictConfig, RunConfig
from holotrain.config.option_groups import CAUSAL_LM, IMAGES, TEXT, is_a
from holotrain.data.image_files import NamedImageFiles, image_files
from holotrain.data.loader import worker_count
from holotrain.data.text.sources import text_files
from holotrain.data.tokenizers import tokenizer_from_json
from holotrain.errors import UserError
from holotrain.folders import write_table
from holotrain.tasks.classification import Classifier
from holotrain.tasks.task import model_of

PARTS = {"validate": "val", "test": "test"}
"""The part of the data that a command evaluates with."""

PREDICTIONS = "predictions.csv"


def run(config: CheckpointConfig, run: Run) -> int:
    """Writes the metrics into summary.json, and to the loggers at the step of the checkpoint."""
    if isinstance(config, PredictConfig):
        return predict(config, run)
    limit = f"limit_{PARTS[run.command]}_batches"
    if getattr(config.trainer, limit) == 0:  # may come from the checkpoint's training
        raise UserError(f"trainer.{limit}=0: there is nothing to evaluate; use trainer.{limit}=1.0")
    config, data, path = prepare(config, run)
    task = prepared_task(config, run, data, path)
    screen.show_start(config, run, model_of(task), path, data)
    loggers = build_loggers(config, run.folder, given=run.loggers)
    metrics = evaluate(config, run, task, data, path, loggers)
    for logger in loggers:
        logger.finalize("success")
    summary = write_summary(run, config, model_of(task), checkpoint=path and str(path), metrics=metrics)
    screen.show_end(summary, run.folder)
    return 0


def evaluate(
    config: RunConfig,
    run: Run,
    task: pl.LightningModule,
    data: pl.LightningDataModule,
    path: Path | None,
    loggers: Iterable[Logger],
    step: int = 0,
) -> dict[str, float]:
    """Evaluates the weights of ``path`` (None: the task's own, at ``step``) and returns the metrics. The loggers get them and,
    of a classification, the confusion matrix, at the step of the weights. (Lightning would log them at step 0.)"""
    split = "validate" if run.command == "validate" else "test"
    if path is not None:
        load_weights(task, path)
        step = checkpointed.load(path).get("global_step", 0)
    matrices = build_matrices(config)
    trainer = build_trainer(config.trainer, run.folder, [*matrices, *run.callbacks], False, process=run.process)
    measure = trainer.validate if split == "validate" else trainer.test
    with lightning_refusals(split), attention_for(data):
        metrics = dict(next(iter(measure(task, datamodule=data, verbose=False)), {}))
    for logger in loggers:
        logger.log_metrics(metrics, step=step)
    for matrix in matrices:
        if matrix.figure is not None:
            log_figure(loggers, f"{PARTS[split]}/confusion_matrix", matrix.figure, step)
    return metrics


def predict(config: PredictConfig, run: Run) -> int:
    """Writes one row per sample: its file, or its number in the test set, then what the task predicts: a class and its
    probability, for causal_lm bytes and bits per byte, for a task of one's own what its ``predict_step`` returns."""
    path, files, data = config.checkpoint, config.images or config.texts, None
    if config.trainer.limit_predict_batches == 0:
        raise UserError("trainer.limit_predict_batches=0: there is nothing to predict; use trainer.limit_predict_batches=1.0")
    if files:
        check_device(config.trainer)
        model, described = described_model(path)
        task = task_of(model, config, described)
        if not is_overridden("predict_step", task):
            raise UserError(f"predict: {config.task.name} has no predict_step, which takes a batch of images or texts")
        loader = _files_loader(config, described, Path(files))
    else:
        config, data, _ = prepare(config, run)
        task = prepared_task(config, run, data, path)
        load_weights(task, path)
        described, loader = description(config, data), data.predict_dataloader()
    if isinstance(task, Classifier):
        task.predicts_all = config.probabilities
    screen.show_start(config, run, model_of(task), path)
    if config.quantised:
        as_exported(model_of(task), config.quantised)
    named_files = files or isinstance(getattr(loader, "dataset", None), NamedImageFiles)
    read = NamesRead() if named_files else None
    trainer = build_trainer(config.trainer, run.folder, [read] if read else [], False)
    with lightning_refusals("predict"), attention_for(data, texts=bool(config.texts)):
        batches = trainer.predict(task, dataloaders=loader)
    names = read.names if read else count()
    named = list(zip(names, _samples(batches or []), strict=False))  # limit_predict_batches may leave names unused
    left_out = sum(name == "" for name, _ in named)
    if left_out and left_out == len(named):
        place = f"images: there is no readable image in {files}" if files else "data: the test set has no readable image"
        raise UserError(place)
    named = [each for each in named if each[0] != ""]
    if is_a(config.task, CAUSAL_LM):
        columns, rows = ("text", "bytes", "bits_per_byte"), _scores(named)
    else:
        of = "text" if is_a(config.data, TEXT) else "image" if is_a(config.data, IMAGES) else "sample"
        columns, rows = _table(of, named, described.get("class_names"))
    write_table(run.folder / PREDICTIONS, columns, rows)

    metrics = {f"{columns[0]}s": len(rows)} | ({"unreadable": left_out} if left_out else {})
    summary = write_summary(run, config, model_of(task), checkpoint=str(path), metrics=metrics)
    screen.show_end(summary, run.folder, predictions=run.folder / PREDICTIONS)
    return 0


def _files_loader(config: RunConfig, described: dict[str, Any], path: Path) -> DataLoader:
    workers = worker_count(getattr(config.data, "num_workers", 0))
    batch_size, facts = getattr(config.data, "batch_size", None) or 32, described["facts"]
    if "tokenizer" in described:
        return text_files(
            path,
            tokenizer_from_json(described["tokenizer"]),
            facts["context"],
            packed=is_a(config.task, CAUSAL_LM),
            batch_size=batch_size,
            text=getattr(config.data, "text", "text"),
            unit=getattr(config.data, "unit", None) or "file",
            num_workers=workers,
        )
    if "statistics" not in described or "image_size" not in facts:
        raise UserError(f"images: {config.data.name} does not tell how to prepare them; without images= the test set is used")
    loading = {"interpolation": getattr(config.data, "interpolation", "bilinear"), "num_workers": workers}
    return image_files(path, facts["channels"], facts["image_size"], described["statistics"], batch_size, **loading)


class NamesRead(pl.Callback):
    """The file of each sample of the batches; empty where an image cannot be read."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.names += batch["names"] if isinstance(batch, dict) else batch[1]


def _samples(batches: list[Any]) -> list[dict[str, Any]]:
    """The prediction of each sample, in the order of the test set or of the files."""
    samples = []
    for batch in batches:
        columns = batch if isinstance(batch, dict) else {"prediction": batch}
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        samples += [dict(zip(columns, row, strict=True)) for row in rows]
    return sorted(samples, key=lambda sample: sample.get("index", 0))  # texts are sorted by length


def _table(
    of: str, named: Iterable[tuple[object, dict[str, Any]]], classes: list[str] | None
) -> tuple[tuple[str, ...], list[tuple]]:
    """One row per sample: its name, then what ``predict_step`` returned for it, classes by their names."""
    columns, rows = (of,), []
    for name, sample in named:
        shown = {key: value for key, value in sample.items() if key != "index"}
        every = shown.get("probabilities")
        if classes is not None and isinstance(every, list) and len(every) == len(classes):
            del shown["probabilities"]
            shown |= {f"p({label})": value for label, value in zip(classes, every, strict=True)}
        for key, value in shown.items():
            if isinstance(value, float):
                shown[key] = f"{value:.6f}"
            elif key == "class" and classes is not None:
                shown[key] = classes[value]
        columns = (of, *shown)
        rows.append((name, *shown.values()))
    return columns, rows


def _scores(named: Iterable[tuple[object, dict[str, float]]]) -> list[tuple[object, int, str]]:
    """One row per text, which may consist of several blocks."""
    sums: dict[object, list[float]] = {}
    for name, sample in named:
        whole = sums.setdefault(name, [0, 0])
        whole[0] += sample["bytes"]
        whole[1] += sample["bits"]
    return [(name, int(size), f"{bits / max(size, 1):.4f}") for name, (size, bits) in sums.items()]

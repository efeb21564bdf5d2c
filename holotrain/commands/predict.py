"""``holotrain predict``: classifies images or texts, or scores texts, and writes predictions.csv."""

import csv
import io
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from holotrain.commands import screen
from holotrain.commands.checkpoint import described_model, in_int8, load_weights
from holotrain.commands.evaluation import prepared
from holotrain.commands.files import write_whole
from holotrain.commands.run import Run
from holotrain.commands.summary import Summary
from holotrain.config.build import build_files_loader, description, task_of
from holotrain.config.build_trainer import build_trainer
from holotrain.config.devices import check_device
from holotrain.config.schema import PredictConfig
from holotrain.config.schema.task import of_images

PREDICTIONS = "predictions.csv"


def run(config: PredictConfig, run: Run) -> int:
    """Writes one row per sample: its file or its number in the test set, then its class and probability or, for causal_lm, its
    bytes and bits per byte."""
    started = time.monotonic()
    path, files = Path(config.ckpt_path), config.images or config.texts
    if files:
        check_device(config.trainer)
        model, described = described_model(path)
        task = task_of(model, config, described)
        loader = build_files_loader(config, described, Path(files))
    else:
        _, data, task = prepared("predict", config, run)
        load_weights(task, path)
        described, loader = description(config, data), data.predict_dataloader()
    screen.show_start("predict", config, run, task.model, path)
    in_int8(task.model, config.int8)
    trainer = build_trainer(config.trainer, run.folder, [], False)
    batches = trainer.predict(task, dataloaders=loader)
    names = [str(name) for name in loader.dataset.paths] if files else count()
    named = zip(names, _samples(batches), strict=False)  # limit_predict_batches may leave names unused
    if config.task.kind == "causal_lm":
        columns, rows = ("text", "bytes", "bits_per_byte"), _scores(named)
    else:
        columns = ("image" if of_images(config.task.kind) else "text", "class", "probability")
        rows = [(name, described["class_names"][of["class"]], f"{of['probability']:.6f}") for name, of in named]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    write_whole(run.folder / PREDICTIONS, text.getvalue())

    summary = Summary.of(run, config, task.model)
    summary.checkpoint = str(path)
    summary.metrics = {f"{columns[0]}s": len(rows)}
    summary.seconds = time.monotonic() - started
    summary.write(run.folder)
    screen.show_end(summary, run.folder)
    return 0


def _samples(batches: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The prediction of each sample, in the order of the test set or of the files."""
    samples = [
        dict(zip(batch, values, strict=True))
        for batch in batches
        for values in zip(*(column.tolist() for column in batch.values()), strict=True)
    ]
    return sorted(samples, key=lambda sample: sample.get("index", 0))  # texts are sorted by length


def _scores(named: Iterable[tuple[object, dict[str, float]]]) -> list[tuple[object, int, str]]:
    """One row per text, which may consist of several blocks."""
    sums: dict[object, list[float]] = {}
    for name, sample in named:
        whole = sums.setdefault(name, [0, 0])
        whole[0] += sample["bytes"]
        whole[1] += sample["bits"]
    return [(name, int(size), f"{bits / max(size, 1):.4f}") for name, (size, bits) in sums.items()]

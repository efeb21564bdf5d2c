"""``holotrain predict``: classifies images with a checkpoint, into predictions.csv."""

import csv
import io
import time
from pathlib import Path

from holotrain.commands import screen
from holotrain.commands.checkpoint import load_weights
from holotrain.commands.evaluation import prepared
from holotrain.commands.files import write_whole
from holotrain.commands.run import Run
from holotrain.commands.summary import Summary
from holotrain.config.build_trainer import build_trainer
from holotrain.config.schema import PredictConfig

PREDICTIONS = "predictions.csv"


def run(config: PredictConfig, run: Run) -> int:
    """Writes a row an image: its path, or its number in the test part of the data; its class; the probability of that."""
    started = time.monotonic()
    path, data, task = prepared("predict", config)
    loader = data.files_dataloader(Path(config.images)) if config.images else None
    screen.show_start("predict", config, run.choices, task.model, run.folder, path)
    load_weights(task, path)
    trainer = build_trainer(config.trainer, run.folder, [], False)
    if loader is None:
        batches, names = trainer.predict(task, datamodule=data), None
    else:
        batches, names = trainer.predict(task, dataloaders=loader), [str(name) for name in loader.dataset.paths]
    predicted = [
        (data.class_names[index], probability)
        for batch in batches
        for index, probability in zip(batch["class"].tolist(), batch["probability"].tolist(), strict=True)
    ]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["image", "class", "probability"])
    # limit_predict_batches may leave names over
    rows = zip(names or range(len(predicted)), predicted, strict=False)
    writer.writerows((name, label, f"{probability:.6f}") for name, (label, probability) in rows)
    write_whole(run.folder / PREDICTIONS, text.getvalue())

    summary = Summary.of(run, config, task.model)
    summary.checkpoint = str(path)
    summary.metrics = {"images": len(predicted)}
    summary.seconds = time.monotonic() - started
    summary.write(run.folder)
    screen.show_end(summary, run.folder)
    return 0

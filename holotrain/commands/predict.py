"""``holotrain predict``: classifies images with a checkpoint, into predictions.csv."""

import csv
import io
import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from holotrain.commands import screen
from holotrain.commands.checkpoint import load_weights
from holotrain.commands.evaluation import needed_checkpoint
from holotrain.commands.files import write_whole
from holotrain.commands.run import Run
from holotrain.config.build import build_data, build_task
from holotrain.config.build_trainer import build_progress, build_trainer, check_device
from holotrain.config.schema import PredictConfig

PREDICTIONS = "predictions.csv"

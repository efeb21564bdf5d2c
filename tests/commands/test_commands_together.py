"""What the main process finds out before it starts the others."""

import torch
from omegaconf import OmegaConf

from holotrain.commands import together
from holotrain.commands.run import Run
from holotrain.config.composition import composed, register
from holotrain.config.typed import typed
from holotrain.models.checkpoint_files import CHECKPOINT, begun

register()


def test_a_checkpoint_that_another_run_did_not_rename_is_from_before(tmp_path, monkeypatch):
    words = ["trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_restarts=1"]
    config = typed("fit", OmegaConf.to_container(composed("fit", words), resolve=True))
    run = Run("fit", tmp_path, words, {})
    folder = begun(run.last_checkpoint)
    folder.mkdir(parents=True)
    torch.save({}, folder / CHECKPOINT)
    jobs = []
    monkeypatch.setattr(together, "launch", lambda module, job, *_: jobs.append(job) or 0)
    assert together.Together(None).run("fit", config, run) == 0
    assert jobs[0]["before"] == (run.last_checkpoint / CHECKPOINT).stat().st_mtime_ns

"""log.txt: what Python's logging has written, in the folder of a run."""

from pathlib import Path

from small_run import SMALL

QUICK = [*SMALL, "test=false", "logger=none"]


def test_a_resumed_run_appends_and_a_refused_one_writes_no_log(holotrain):
    out = holotrain.done("fit", *QUICK, "hydra.run.dir=run")
    first = Path("run/log.txt").read_text()
    command, *rest = first.splitlines()
    assert command.endswith("test=false logger=none") and "  holotrain fit model.dim=16" in command
    epochs = [line for line in out.splitlines() if line.startswith("epoch")]
    assert [line.partition("  ")[2] for line in rest if "  epoch " in line] == epochs and len(epochs) == 2
    assert "already holds a run" in holotrain.refused("fit", *QUICK, "hydra.run.dir=run")
    assert "must be at least 0" in holotrain.refused("fit", *QUICK, "optimizer.lr=-1", "hydra.run.dir=other")
    assert Path("run/log.txt").read_text() == first and not Path("other").exists()
    holotrain.done("fit", "resume=true", "trainer.max_epochs=3", "hydra.run.dir=run")
    both = Path("run/log.txt").read_text()
    assert both.startswith(first) and "resume=true" in both[len(first) :] and "epoch 3/3" in both[len(first) :]


def test_the_log_of_a_job_has_the_traceback_of_its_defect(holotrain, monkeypatch):
    def break_down(summary, folder, expensive):
        if folder.name == "1":
            raise ZeroDivisionError("a defect")

    monkeypatch.setattr("holotrain.commands.screen.show_end", break_down)
    status, _, err = holotrain("fit", *QUICK, "optimizer.lr=1e-3,1e-4,-1", "-m", "hydra.sweep.dir=sweep")
    assert status == 1 and err.count("Traceback (most recent call last):") == 1 and "holotrain: optimizer.lr: must be at" in err
    good, defect = (Path("sweep", number, "log.txt").read_text() for number in "01")
    assert "Traceback" not in good and not Path("sweep/2/log.txt").exists()
    assert "optimizer.lr=0.0001" in defect and defect.endswith("ZeroDivisionError: a defect\n")

"""A training of 2,000 steps holds on to nothing: memory, open files and threads stay what they were after the first ones."""

import json
from statistics import linear_regression, median

import pytest
from small_run import fit_apart

STEPS, EVERY, BEGUN = 2000, 50, 600
WORDS = ["model.dim=16", "model.depth=2", "model.heads=2", "data.batch_size=8", f"trainer.max_steps={STEPS}", "test=false"]
WORDS += ["trainer.max_epochs=-1", "trainer.accelerator=cpu", "callbacks.progress=null"]
WATCHING = ["+callbacks.watching._target_=failures.watching.Watching", f"+callbacks.watching.every={EVERY}"]


@pytest.mark.long
def test_nothing_grows_in_2000_steps(tmp_path, record_property):
    assert fit_apart(tmp_path, *WORDS, *WATCHING).wait() == 0, (tmp_path / "errors").read_text()
    looks = [look for look in json.loads((tmp_path / "watched.json").read_text()) if look["step"] >= BEGUN]
    assert looks[-1]["step"] == STEPS
    steps = [look["step"] for look in looks]
    for what in ("files", "threads"):
        counts = [look[what] for look in looks]
        assert min(counts[-9:]) <= min(counts[:9]), (what, counts)  # a look may fall on a moment in which a file is written
    slope = linear_regression(steps, [look["memory"] for look in looks]).slope * 1000 / 2**20
    seconds = [look["seconds"] for look in looks]
    record_property("MiB in 1,000 steps", slope)
    record_property("last steps over first", slower := median(seconds[-9:]) / median(seconds[:9]))
    print(f"\n{slope:.2f} MiB in 1,000 steps; last steps over first {slower:.2f}")
    assert slope < 2, [look["memory"] for look in looks]

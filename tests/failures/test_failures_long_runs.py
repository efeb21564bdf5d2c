"""A training of 2,000 steps holds on to nothing: memory, open files and threads stay what they were after the first ones."""

import json
import random
from statistics import linear_regression, median

import pytest
from covering import long, slow
from small_run import fit_apart

STEPS, EVERY, BEGUN = 2000, 50, 600
SMALL = ["model.dim=16", "model.depth=2", "model.heads=2"]
TASKS = {
    "image_classification": [*SMALL, "data.batch_size=8", "trainer.max_epochs=-1"],
    "masked_lm": [
        *SMALL, "data=text_files", "data.files=texts/*.txt", "data.context=24", "data.max_tokens=120", "data.val_fraction=0.1",
        "data.cache_dir=tokens", "trainer.max_epochs=null", "trainer.val_check_interval=200",
    ],
}  # fmt: skip
OPTIONS = ["trainer.accelerator=cpu", "callbacks.progress=null", "test=false"]


@pytest.mark.parametrize("task", [slow("image_classification"), long("masked_lm")])
def test_nothing_grows_in_2000_steps(tmp_path, task, record_property):
    draw = random.Random(1)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_text(" ".join(draw.choices(["one", "two", "three", "four"], k=100)))
    watching = ["+callbacks.watching._target_=failures.watching.Watching", f"+callbacks.watching.every={EVERY}"]
    words = [f"task={task}", *TASKS[task], f"trainer.max_steps={STEPS}", *OPTIONS, *watching]
    assert fit_apart(tmp_path, *words).wait() == 0, (tmp_path / "errors").read_text()
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
    print(f"\n{task}: {slope:.2f} MiB in 1,000 steps; last steps over first {slower:.2f}")
    assert slope < 2, [look["memory"] for look in looks]

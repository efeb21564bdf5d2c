"""What runs leave to be looked at: TensorBoard's HParams and Custom Scalars, and the page of a report."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from left_by_runs import only, scalars, summary
from small_run import SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from holotrain.config.jobs import Job
from holotrain.dashboard.charts import CHARTS


def hparams(folder: Path):
    """The columns of a run's HParams, its session's options."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    content = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(raw.plugin_data.content)
        for tag, raw in events.summary_metadata.items()
        if raw.plugin_data.plugin_name == "hparams"
    }
    return content["_hparams_/experiment"].experiment, content["_hparams_/session_start_info"].session_start_info.hparams


def layout(folder: Path) -> dict[str, list[str]]:
    """The tags of each chart of a run's Custom Scalars."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    found = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return {
        chart.title: [tag.removesuffix("$") for tag in chart.multiline.tag] for group in found.category for chart in group.chart
    }


def assert_every_column_has_values(folder: Path) -> None:
    columns = {metric.name.tag for metric in hparams(folder)[0].metric_infos}
    assert columns <= scalars(folder).keys() and "memory/peak_bytes" in columns


@pytest.mark.slow
def test_a_sweep_in_tensorboard_and_in_a_report(holotrain):
    """Of two jobs, one of them with a synthesis."""
    words = ["optimizer=sgd", "optimizer.momentum=0", "output_dir=mine", "synthesis=none,associative", "trainer.max_epochs=1"]
    status, out, _ = holotrain("fit", "-m", *SMALL, *words)
    assert status == 0 and "synthesis" in out and "associative, fp32, not split" in out
    sweep = only(Path("mine/fit/sweeps"))
    # HParams: what varies is marked, results come in the order of their importance
    experiment, options = hparams(sweep / "1")
    assert experiment.hparam_infos[0].name == "synthesis"
    assert "output_dir" not in {info.name for info in experiment.hparam_infos}
    assert options["synthesis"].string_value == "associative"
    tags = ["val/accuracy", "val/loss", "best/val/accuracy", "test/accuracy", "test/loss"]
    tags += ["memory/peak_bytes", "throughput/samples_per_second"]
    assert [metric.name.tag for metric in experiment.metric_infos] == tags
    for job in "01":
        assert {metric.name.tag for metric in hparams(sweep / job)[0].metric_infos} <= scalars(sweep / job).keys()
    # Custom Scalars: every curve that could have a chart is in one
    for job in "01":
        charts, seen = layout(sweep / job), scalars(sweep / job).keys()
        assert charts.items() >= {chart.title: list(chart.lines) for chart in CHARTS if seen & chart.lines.keys()}.items()
        assert charts.keys().isdisjoint({"Perplexity", "Padding", "Dead cells and wrong signs"})
    assert "Synthesis time" in layout(sweep / "1") and "Synthesis time" not in layout(sweep / "0")
    # the report
    out = holotrain.done("report", str(sweep), str(sweep / "0"), "to=pages/both.html")
    assert "2 runs written to pages/both.html" in out
    page = Path("pages/both.html").read_text()
    assert "synthesis=associative" in page and "Synthesis time" in page and "holotrain:" not in page
    assert [path.name for path in Path("pages").iterdir()] == ["both.html"]
    # a job that failed before its training, one that still runs, and one that logged nothing
    Job(2, ["optimizer.lr=1"], 2, "out of memory").write(sweep / "2")
    assert f"{sweep}/2 has no scalars" in holotrain.done("report", str(sweep))
    assert "failed: out of memory" in Path("report.html").read_text()
    shutil.rmtree(sweep / "2")
    (sweep / "0" / "summary.json").unlink()
    shutil.rmtree(sweep / "1" / "tensorboard")
    assert f"{sweep}/1 has no scalars" in holotrain.done("report", f"{sweep}/*")
    assert "unfinished" in Path("report.html").read_text()
    assert holotrain.refused("report", f"{sweep}/1").startswith(f"holotrain: {sweep}/1: no scalars found")


def test_a_run_shows_what_it_learns_and_every_option_and_the_report_shows_it_too(holotrain):
    words = [*SMALL, "trainer.deterministic=true", "callbacks=histograms"]
    holotrain.done("fit", *words)
    folder = only(Path("runs/fit"))
    assert_every_column_has_values(folder)
    experiment, options = hparams(folder)
    assert options["model.dim"].number_value == 16
    assert options["optimizer._target_"].string_value == "holotrain.tasks.optimizer_functions.adamw"
    assert options["model"].string_value == "rev_vit_tiny" and options["trainer.deterministic"].string_value == "True"
    listed = [info.name for info in experiment.hparam_infos]
    assert listed[: len(words)] == [word.partition("=")[0] for word in words] and {"backward", "optimizer.lr"} <= {*listed}
    tags = EventAccumulator(str(folder / "tensorboard")).Reload().Tags()
    assert {*tags["images"]} == {"val/predictions", "val/confusion_matrix", "test/confusion_matrix"}
    assert any(tag.startswith("gradients/model.blocks") for tag in tags["histograms"])
    assert {"optimization/gradient_norm", "optimization/update_ratio"} <= set(tags["scalars"])
    holotrain("report", str(folder))
    assert Path("report.html").read_text().count('src="data:image/png;base64,') == 3
    holotrain("test", f"ckpt_path={folder / 'checkpoints/last.ckpt'}")
    assert EventAccumulator(str(only(Path("runs/test")) / "tensorboard")).Reload().Tags()["images"] == ["test/confusion_matrix"]


MISTAKES = [
    (["report", "nowhere/*"], "no folder matches nowhere/*"),
    (["report", "empty"], "empty is not the folder of a run and contains none"),
    (["report", "broken", "to=empty"], "empty is a folder"),
    (["report", "broken"], "events.out.tfevents.1 is not a readable event file"),
    (["report", "spoilt"], "spoilt/summary.json is not a readable summary"),
    (["report", "endless"], "endless/config.yaml is not a readable configuration"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes_are_answered_in_a_line(holotrain, words, expected):
    for folder, name, text in [
        ("empty", "nothing.txt", ""),
        ("broken/tensorboard", "events.out.tfevents.1", "no events"),
        ("spoilt", "summary.json", "{"),
        ("endless", "config.yaml", "# as many bytes as one likes\n" * 2**16),
    ]:
        Path(folder).mkdir(parents=True)
        (Path(folder) / name).write_text(text)
    assert expected in holotrain.refused(*words)
    assert not Path("report.html").exists()


def test_help_knows_the_report_and_does_without_torch(holotrain):
    assert "report" in holotrain("--help")[1]
    program = "import sys; from holotrain.cli import main; sys.exit(main(['report', '--help']) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "holotrain report RUN... [to=...]" in done.stdout and "to=report.html" in done.stdout


def test_a_run_that_cannot_be_read_is_left_out_of_the_others(holotrain):
    for folder in ("runs/fit/a", "runs/fit/b"):
        Path(folder, "csv/version_0").mkdir(parents=True)
        Path(folder, "csv/version_0/metrics.csv").write_text("step,train/loss\n0,1.5\n")
    Path("runs/fit/b/summary.json").write_text("{")
    for words in (["runs/fit"], ["runs/fit/b", "runs/fit/a"]):
        out = holotrain.done("report", *words)
        assert "1 run written" in out
        assert out.startswith("left out: runs/fit/b/summary.json is not a readable summary")


def test_a_name_and_tags_are_shown_and_kept_and_decide_no_folder(holotrain):
    out = holotrain.done("fit", *SMALL, "test=false", "name='a, base'", "tags=[long,old]", "hydra.run.dir=run")
    assert re.search(r"name +a, base *\n +tags +long, old *\n", out) and [path.name for path in Path().iterdir()] == ["run"]
    experiment, options = hparams(Path("run"))
    assert [info.name for info in experiment.hparam_infos[:2]] == ["name", "tags"] and options["name"].string_value == "a, base"
    assert options["tags"].string_value == "long, old"
    assert "name=a, base" in summary(Path("run"))["overrides"]
    holotrain.done("fit", "resume=true", "trainer.max_epochs=3", "hydra.run.dir=run")
    left = summary(Path("run"))
    assert (left["epochs"], left["name"], left["tags"]) == (3, "a, base", ["long", "old"])
    holotrain.done("report", "run")
    page = Path("report.html").read_text()
    assert "<h1>a, base</h1>" in page and "long, old" in page


@pytest.mark.parametrize(
    ("word", "expected"),
    [("tags=long", "tags: 'long' is not a list"), ("name='a\tb'", "name: 'a\\tb' is not one line of text")],
)
def test_what_is_no_name_and_no_tag_is_refused(holotrain, word, expected):
    assert expected in holotrain.refused("fit", word)

"""``holotrain init``: a new project trains, passes its own tests, and overwrites nothing."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from left_by_runs import assert_same_weights, only, scalars
from made_once import made_once
from small_run import fit_and_kill, run_in

import holotrain as package

NAME = "my_laboratory"
SHORT = [f"trainer.limit_{part}_batches=2" for part in ("train", "val", "test")] + ["trainer.max_epochs=1"]


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """A new project, for tests that leave its files as they are."""
    return made_once(tmp_path_factory, "a_new_project", lambda folder: run_in(folder, "init", NAME)) / NAME


def in_a_shell(folder: Path, command: str) -> str:
    """Runs a command in a process of its own, with this Python's programs and this holotrain."""
    places = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": Path(package.__file__).parents[1]}
    environment = os.environ | {name: str(place) for name, place in places.items()}
    ended = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def of_the_readme(project: Path) -> tuple[str, str, list[str]]:
    """The command that trains, the one that tests, and the others."""
    train, test, others = re.findall(r"(?ms)^```bash\n(.*?)^```", (project / "README.md").read_text())
    return train.strip(), test.strip(), others.splitlines()


@pytest.mark.long
def test_the_command_that_trains(project, tmp_path):
    train, _, _ = of_the_readme(project)
    out = in_a_shell(project, " ".join([train, *SHORT, f"hydra.run.dir={tmp_path}/run"]))
    assert "my_net" in out and "test/accuracy" in out
    assert re.fullmatch(r"epoch 1  val/accuracy 0\.\d{4}  val/loss \d\.\d{4}\n", (tmp_path / "run/diary.txt").read_text())


@pytest.mark.slow
def test_the_command_that_tests(project):
    _, test, _ = of_the_readme(project)
    assert re.search(r"\b3 passed", in_a_shell(project, test))


def test_ruff_accepts_the_files(project):
    in_a_shell(project, "ruff check . && ruff format --check .")


@pytest.fixture
def inside(holotrain, project, tmp_path, monkeypatch):
    """The command line with the project's package and configuration, in an empty folder."""
    (tmp_path / "conf").symlink_to(project / "conf")
    monkeypatch.syspath_prepend(project)
    yield holotrain
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_the_other_commands(inside, project, tmp_path):
    train, _, others = of_the_readme(project)
    assert {line.split()[3] for line in others} == {"fit", "plan", "test", "export"}
    for line in (train, *others):
        words = shlex.split(line)[3:]
        status, out, err = inside(*words, *(SHORT if words[0] == "fit" else ()))
        assert (status, err) == (0, ""), line
    assert package.load(tmp_path / "exported", trust=[NAME]).head[-1].out_features == 10


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_weights(inside, tmp_path):
    words = ["--config-dir", "conf", "experiment=my_experiment", "trainer.max_epochs=2", "trainer.limit_train_batches=6"]
    assert inside("fit", *words, "output_dir=whole")[0] == 0
    fit_and_kill(tmp_path, *words, "output_dir=killed", "callbacks.checkpoint.every_n_train_steps=4")
    assert inside("fit", "--config-dir", "conf", "resume=true", "output_dir=killed")[0] == 0
    whole, killed = only(Path("whole/fit")), only(Path("killed/fit"))
    assert_same_weights(whole / "checkpoints/last.ckpt", killed / "checkpoints/last.ckpt")
    assert scalars(whole)["val/loss"] == scalars(killed)["val/loss"]


def test_what_was_written_and_the_next_command_are_shown(holotrain, tmp_path):
    folder = tmp_path / "work/seeds_of_wheat"
    folder.mkdir(parents=True)  # an empty folder may be there
    out = holotrain.done("init", "work/seeds_of_wheat")
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    first, *files, last = out.splitlines()
    assert {line.strip() for line in files} == written
    assert {"README.md", "seeds_of_wheat/model.py", "conf/model/my_net.yaml", "tests/test_seeds_of_wheat.py"} <= written
    assert not any("my_project" in (folder / name).read_text() for name in written)
    assert last.startswith("Train: cd work/seeds_of_wheat && python -m holotrain fit")


def test_help(holotrain):
    assert "\n  init      Write a small working project" in holotrain("--help")[1]
    status, out, _ = holotrain("init", "--help")
    assert status == 0 and "Usage: holotrain init NAME\n" in out

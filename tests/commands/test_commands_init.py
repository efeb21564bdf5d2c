"""``holotrain init``: a new project trains, passes its own tests, and overwrites nothing."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from made_once import made_once
from small_run import run_in

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


@pytest.mark.slow
def test_the_command_that_tests_and_ruff(project):
    _, test, _ = of_the_readme(project)
    assert re.search(r"\b3 passed", in_a_shell(project, test))
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

"""The processes that are started run our code and no other."""

import sys
from pathlib import Path

import pytest
import torch.distributed
from covering import slow

from holotrain.errors import UserError

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Returns a function that writes the module ``its_work`` with the given ``work``; the working directory is another one."""
    modules, folder = tmp_path / "modules", tmp_path / "run"
    modules.mkdir()
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(modules), *(path for path in sys.path if path)])
    return lambda *lines: (modules / "its_work.py").write_text("\n".join(lines))


@pytest.mark.slow
def test_modules_in_the_working_directory_are_not_imported(work):
    from holotrain.parallel.launch import launch

    work("def work(job):", "    return job")
    Path("json.py").write_text("open('imported', 'w')\nraise SystemExit(1)\n")
    assert launch("its_work", 7, 1, 0, 60) == 7
    assert not Path("imported").exists()


@pytest.mark.parametrize(("error", "attempts"), [(UserError, 1), slow(ValueError, 2)])
def test_processes_do_not_start_again_after_a_mistake_of_the_user(work, error, attempts):
    from holotrain.parallel.launch import ProcessFailed, launch

    work(
        "from holotrain.errors import UserError",
        "def work(job):",
        "    print('started', file=open('attempts', 'a'))",
        f"    raise {error.__name__}('no such file')",
    )
    with pytest.raises(UserError if error is UserError else ProcessFailed, match="no such file"):
        launch("its_work", {}, 1, 1, 60)
    assert Path("attempts").read_text().count("started") == attempts

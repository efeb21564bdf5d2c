"""What the bench scripts have saved."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from covering import long, slow
from torch.utils._pytree import tree_leaves

RESULTS = Path(__file__).parents[2] / "scripts/results"


def test_results_name_no_path_of_a_machine():
    files = list(RESULTS.rglob("*.json"))
    words = [(path.name, leaf) for path in files for leaf in tree_leaves(json.loads(path.read_text())) if isinstance(leaf, str)]
    assert {name for name, _ in words} == {path.name for path in files} != set()
    assert not [(name, word) for name, word in words if Path(word).is_absolute()]


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(RESULTS.parent.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    if "def main" in script.read_text():
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(script), run_name="__main__")
        assert "usage:" in capsys.readouterr().out
    else:
        runpy.run_path(str(script), run_name="not_main")


@pytest.mark.parametrize(
    ("method", "given"),
    [
        slow("checkpoint in tiles", "tile=512"),
        slow("checkpoint8 in tiles", 'backward="checkpoint8", tile=512'),
        long("checkpoint8 in tiles and heads", 'backward="checkpoint8", tile=512, heads=1'),
    ],
)
def test_the_table_of_whole_steps_is_the_plan(method, given, monkeypatch):
    """Of GPT-2, in KiB a token."""
    monkeypatch.syspath_prepend(RESULTS.parent)
    import bench_whole_step

    text = (RESULTS.parents[1] / "holotrain/reversible/README.md").read_text()
    said = re.search(rf"\| `recompute\(model, {given}\)`[^|]*\| ([\d.]+)", text)
    assert bench_whole_step.planned("gpt2", method, 16384, "cpu", False)[1] == pytest.approx(float(said[1]), abs=0.05)

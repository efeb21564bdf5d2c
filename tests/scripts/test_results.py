"""What the bench scripts have saved."""

import json
from pathlib import Path

from torch.utils._pytree import tree_leaves

RESULTS = Path(__file__).parents[2] / "scripts/results"


def test_results_name_no_path_of_a_machine():
    files = list(RESULTS.rglob("*.json"))
    words = [(path.name, leaf) for path in files for leaf in tree_leaves(json.loads(path.read_text())) if isinstance(leaf, str)]
    assert {name for name, _ in words} == {path.name for path in files} != set()
    assert not [(name, word) for name, word in words if Path(word).is_absolute()]

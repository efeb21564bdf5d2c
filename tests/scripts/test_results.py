"""What the bench scripts have saved."""

import json
from pathlib import Path

import pytest
from torch.utils._pytree import tree_leaves

RESULTS = Path(__file__).parents[2] / "scripts/results"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_results_name_no_path_of_a_machine(path):
    words = [leaf for leaf in tree_leaves(json.loads(path.read_text())) if isinstance(leaf, str)]
    assert words and not [word for word in words if Path(word).is_absolute()]

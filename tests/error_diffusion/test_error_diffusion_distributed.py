"""Under DDP updates are averaged as gradients are."""

from pathlib import Path

from gloo_pair import found_by_processes


def test_two_processes_learn_what_one_does(tmp_path):
    found = found_by_processes(Path(__file__).with_name("diffusing_ranks.py"), tmp_path)
    assert len(found) == 6
    assert all(difference < 1e-14 for difference in found.values()), found

"""scripts/cuda_session.py: what its pieces declare."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from cuda_pieces import PIECES, QUARTER  # noqa: E402


def test_pieces_are_scripts_with_names_of_their_own_and_the_first_fit_into_a_quarter_of_an_hour():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    assert PIECES[: len(QUARTER)] == QUARTER and sum(piece.seconds for piece in QUARTER) <= 600  # others go to starting
    for piece in PIECES:
        assert (ROOT / piece.command[0]).is_file() and 0 < piece.seconds <= 300

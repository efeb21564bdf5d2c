"""The precision of float32 in a run, and what torch has set before and after it."""

from operator import attrgetter

import pytest
import torch

from holotrain.commands.multiprocess import matmul_precision

BACKENDS = torch.backends
PARTS = [BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn]


@pytest.fixture
def precisions():
    """The precision of float32 in the whole, in cuDNN and in each part; torch's own are put back."""
    each = [BACKENDS, BACKENDS.cudnn, *PARTS]
    usual = [one.fp32_precision for one in each]
    yield lambda: [one.fp32_precision for one in each]
    for one, was in zip(each, usual, strict=True):
        one.fp32_precision = was


@pytest.mark.parametrize("part", ["", "cuda.matmul", "cudnn.conv"])
def test_float32_is_as_asked_for_whichever_of_torchs_names_the_caller_has_used(part, precisions):
    """torch refuses to read its older names where the newer ones say something else."""
    cudnn, matmul = BACKENDS.cudnn, BACKENDS.cuda.matmul
    old = lambda: (torch.get_float32_matmul_precision(), cudnn.allow_tf32, matmul.allow_tf32)  # noqa: E731
    for one, fresh in zip((BACKENDS, *PARTS), ("none", "none", "none", "tf32", "tf32"), strict=True):  # as torch begins:
        one.fp32_precision = fresh  # an earlier set_float32_matmul_precision in this process has set the parts
    (attrgetter(part)(BACKENDS) if part else BACKENDS).fp32_precision = "ieee" if part == "cudnn.conv" else "tf32"
    before = precisions()
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        old()
    for precision, name in (("highest", "ieee"), ("high", "tf32")):
        with matmul_precision(precision):
            assert [matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision] == [name] * 3
            assert old() == (precision, name == "tf32", name == "tf32")
    assert precisions() == before


@pytest.mark.parametrize("whole", [BACKENDS, BACKENDS.cudnn], ids=["all", "cudnn"])
def test_after_a_run_what_followed_torchs_other_settings_of_float32_follows_them_again(whole, precisions):
    seen = []
    for one in (BACKENDS, BACKENDS.cudnn, *PARTS):
        one.fp32_precision = "none"
    whole.fp32_precision = "tf32"
    for _ in range(2):
        for precision in ("tf32", "ieee"):
            whole.fp32_precision = precision
            seen.append(precisions())
        with matmul_precision("high"):
            pass
    assert seen[:2] == seen[2:] and seen[0].count("tf32") == seen[1].count("ieee") > 1

"""Parts of bench_overlap.py: copies that replace a collective, timing, errors against a plain linear layer."""

from __future__ import annotations

import resource
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import linear

from holotrain.overlap import all_to_all_linear, column_parallel_linear, linear_all_to_all, row_parallel_linear
from holotrain.overlap.groups import Job
from holotrain.overlap.tuner import Run, median_seconds, timed


class StandIn:
    """Replaces a collective by copies in the memory of one GPU, on a separate stream.

    The copies use memory bandwidth and some SMs or a copy engine, like a collective. They do not model a link.
    """

    def __init__(self, job: Job, copies: int) -> None:
        self.ranks, self.rank, self.name = job.ranks, 0, "stand-in"
        self.copies = copies
        self.message = torch.zeros(job.rows, job.outputs, dtype=job.dtype, device=job.device)
        self._aside = torch.empty_like(self.message)
        self._stream = torch.cuda.Stream(job.device) if job.device.type == "cuda" else None

    def all_reduce(self, tensor: Tensor) -> Copied:
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.copies):
                self._aside[: len(tensor)].copy_(tensor)
            return Copied(self._stream and self._stream.record_event())

    def seconds(self, rows: int) -> float:
        return median_seconds(lambda: self.all_reduce(self.message[:rows]).wait(), self.message.device)


class Copied:
    def __init__(self, done: torch.cuda.Event | None) -> None:
        self._done = done

    def wait(self) -> None:
        if self._done:
            torch.cuda.current_stream().wait_event(self._done)


PAUSE = 0.25
"""Seconds before another try, because the interrupting process may have finished by then."""


class Undisturbed:
    """Times runs on a CPU that is shared with other processes; ``disturbed`` is the fraction of interrupted runs."""

    def __init__(self, tries: int) -> None:
        self.tries, self.asked, self.lost = tries, 0, 0

    @property
    def disturbed(self) -> float:
        return self.lost / self.asked

    def __call__(self, run: Run) -> float:
        """Seconds of a run without interruption or, after all tries, of the fastest run."""
        self.asked += 1
        taken = []
        for _ in range(self.tries):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            taken.append(timed(run, torch.device("cpu")))
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before:
                return taken[-1]
            time.sleep(PAUSE)
        self.lost += 1
        return min(taken)


def errors_against_plain(job: Job, groups: int, group: dist.ProcessGroup) -> float:
    """The largest relative error of output and gradients against the full layer in fp64, on 33 rows."""
    rank, ranks, row = dist.get_rank(group), dist.get_world_size(group), not job.covered
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (job.inputs * ranks, job.outputs) if row else (job.outputs, job.inputs * ranks)
    x, weight = (torch.randn(n, inputs, dtype=torch.float64, generator=generator) for n in (33, outputs))
    grad = torch.randn(33, outputs, dtype=torch.float64, generator=generator)
    whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear(whole_x, whole_weight)
    y.backward(grad)
    mine = (lambda t: t.chunk(ranks, 1)[rank]) if row else (lambda t: t)
    dim = 1 if row else 0
    my_x = mine(x).clone().requires_grad_()
    my_weight = weight.chunk(ranks, dim)[rank].clone().requires_grad_()
    ours = (row_parallel_linear if row else column_parallel_linear)(my_x, my_weight, group=group, groups=groups)
    theirs = (lambda t: t) if row else (lambda t: t.chunk(ranks, 1)[rank])
    ours.backward(theirs(grad))
    pairs = [(ours, theirs(y)), (my_x.grad, mine(whole_x.grad)), (my_weight.grad, whole_weight.grad.chunk(ranks, dim)[rank])]
    return worst(pairs)


def errors_against_all_to_all(job: Job, groups: int, group: dist.ProcessGroup) -> float:
    """The largest relative error of output and gradients against linear and all_to_all_single in fp64, 33 rows each way."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    rows = 33 * dist.get_world_size(group)
    own = [torch.randn(n, job.inputs, dtype=torch.float64, generator=generator) for n in (rows, job.outputs)]
    grad = torch.randn(rows, job.outputs, dtype=torch.float64, generator=generator)
    (x, weight), (my_x, my_weight) = ([tensor.clone().requires_grad_() for tensor in own] for _ in range(2))

    def exchanged(rows: Tensor) -> Tensor:
        return all_to_all_single_autograd(rows, None, None, group)

    y = linear(exchanged(x), weight) if job.before else exchanged(linear(x, weight))
    y.backward(grad)
    ours = (all_to_all_linear if job.before else linear_all_to_all)(my_x, my_weight, group=group, groups=groups)
    ours.backward(grad)
    return worst([(ours, y), (my_x.grad, x.grad), (my_weight.grad, weight.grad)])


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)

"""Language modelling, causal and masked, as LightningModules: loss, masks, perplexity."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection, SumMetric

from holotrain.numeric import require_within
from holotrain.reversible.tiled_loss import IGNORED
from holotrain.tasks.task import Task


class LanguageModelling(Task):
    """What causal and masked language modelling share. Metrics are quotients of sums over all tokens of an evaluation: batches
    differ in size, and some hold no bytes of text.

    Args:
        model: arguments of :meth:`loss` -> mean cross-entropy of the targets that are not -100; without targets -> logits
        token_bytes: (V,) bytes of text that each token stands for, 0 for special tokens; None: unknown, so no bits per byte

    Logs ``val/loss`` (nats per target) and ``val/perplexity``, and the same for ``test``.
    """

    METRICS: tuple[str, ...] = ("loss", "perplexity")
    """What is reported, best known by the first."""

    token_bytes: Tensor

    def __init__(self, model: nn.Module, token_bytes: Tensor | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        known = torch.empty(0) if token_bytes is None else token_bytes.to(torch.float32)
        self.register_buffer("token_bytes", known, persistent=False)
        if token_bytes is None:  # data of others
            self.METRICS = tuple(name for name in self.METRICS if name != "bits_per_byte")
        # In fp64: the sums of a large corpus are too large to add to in fp32.
        self.val_sums, self.test_sums = (
            MetricCollection(
                {name: SumMetric().set_dtype(torch.float64) for name in ("nats", "targets", "bytes")}, compute_groups=False
            )
            for _ in range(2)
        )

    @property
    def monitored(self) -> dict[str, str]:
        return {f"val/{name}": "min" for name in self.METRICS}

    def loss(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def terms(self, *inputs: Tensor) -> Tensor:
        return (inputs[-1] != IGNORED).sum()

    def evaluated(self, batch: dict[str, Any], batch_idx: int) -> tuple[Any, ...]:
        """The arguments of :meth:`loss` for a batch of an evaluation."""
        return self.inputs(batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._add(self.val_sums, batch, batch_idx)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._add(self.test_sums, batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._report("val", self.val_sums)

    def on_test_epoch_end(self) -> None:
        self._report("test", self.test_sums)

    def _add(self, sums: MetricCollection, batch: dict[str, Any], batch_idx: int) -> None:
        inputs = self.evaluated(batch, batch_idx)
        count = self.terms(*inputs)
        found = {"nats": self.loss(*inputs) * count, "targets": count, "bytes": self._bytes(inputs[-1]).sum()}
        for name, value in found.items():
            sums[name].update(value)

    def _report(self, split: str, sums: MetricCollection) -> None:
        found = sums.compute()
        loss, bits = found["nats"] / found["targets"], found["nats"] / found["bytes"] / math.log(2)
        values = {"loss": loss, "perplexity": loss.exp(), "bits_per_byte": bits}
        self.log_dict({f"{split}/{name}": values[name].float() for name in self.METRICS}, prog_bar=split == "val")
        sums.reset()

    def _bytes(self, targets: Tensor) -> Tensor:
        """The bytes of each target, (B, T); 0 for ignored ones, and where they are unknown."""
        if not len(self.token_bytes):
            return torch.zeros_like(targets)
        return self.token_bytes[targets.clamp_min(0)] * (targets != IGNORED)


class CausalLM(LanguageModelling):
    """Trains a model to predict the next token.

    The model takes tokens (B, T) and returns logits (B, T, V); with ``targets`` (B, T) in addition, their mean cross-entropy.

    Batches are dictionaries of ``tokens`` (B, T + 1) and optionally ``lengths`` (B,); tokens after a row's length are padding.
    With ``answers`` (B, T + 1), True for some tokens, these alone are learned and counted.

    Logs ``val/loss`` (nats per token), ``val/perplexity`` and ``val/bits_per_byte``, and the same for ``test``. A block is
    read without the text before it, so these are the figures of a context that grows from 0.
    """

    METRICS = ("bits_per_byte", "loss", "perplexity")

    def inputs(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        tokens = batch["tokens"]
        targets = tokens[:, 1:]
        if "lengths" in batch:
            place = torch.arange(1, tokens.shape[1], device=tokens.device)
            targets = targets.where(place < batch["lengths"][:, None], IGNORED)
        if "answers" in batch:
            targets = targets.where(batch["answers"][:, 1:], IGNORED)
        return tokens[:, :-1], targets

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """The cost of each text under the model: total ``bits`` (B,), and the ``bytes`` (B,) of text."""
        tokens, targets = self.inputs(batch)
        # Text by text: the logits of a batch over a long vocabulary would take gigabytes.
        nats = [
            F.cross_entropy(self(row[None])[0].float(), wanted, reduction="sum")
            for row, wanted in zip(tokens, targets, strict=True)
        ]
        found = {"bits": torch.stack(nats) / math.log(2), "bytes": self._bytes(targets).sum(1)}
        return found | ({"index": batch["index"]} if "index" in batch else {})


class MaskedLM(LanguageModelling):
    """Trains a model to predict masked words, different ones at every step.

    Args:
        model: tokens (B, T), mask (B, T), targets (B, T) -> mean cross-entropy of the targets that are not -100
        token_bytes: (V,) bytes of text that each token stands for, 0 for special tokens, which are never masked
        mask_id: the mask token
        mask_probability: probability that a word is selected; of those, 80% are masked, 10% replaced and 10% unchanged

    Batches are dictionaries of ``tokens`` (B, T) and ``lengths`` (B,).

    Logs ``val/loss`` (nats per masked word) and ``val/perplexity``, and the same for ``test``. Evaluation always uses the same
    masks.

    Raises:
        ValueError: ``mask_probability`` outside of [0.001, 1).
    """

    maskable: Tensor

    def __init__(
        self, model: nn.Module, token_bytes: Tensor, mask_id: int, mask_probability: float = 0.15, **options: Any
    ) -> None:
        super().__init__(model, token_bytes, **options)
        require_within(0.001, 1, mask_probability=mask_probability)
        self.mask_id, self.mask_probability = mask_id, mask_probability
        self.register_buffer("maskable", token_bytes.nonzero().flatten(), persistent=False)

    def loss(self, *inputs: Tensor) -> Tensor:
        shown, *mask, targets = inputs
        return self.model(shown, mask[0] if mask else None, targets)

    def inputs(self, batch: dict[str, Any], generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        tokens, mask = batch["tokens"], attended(batch, self.model)
        candidates = self.token_bytes[tokens] > 0
        for real in mask:
            candidates &= real.to(tokens.device, non_blocking=True)
        shown, targets = masked(tokens, candidates, self.mask_id, self.maskable, self.mask_probability, generator)
        return shown, *mask, targets

    def evaluated(self, batch: dict[str, Any], batch_idx: int) -> tuple[Tensor, ...]:
        return self.inputs(batch, torch.Generator(batch["tokens"].device).manual_seed(batch_idx))


def masked(
    tokens: Tensor,
    candidates: Tensor,
    mask_id: int,
    maskable: Tensor,
    probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses tokens to predict: of every ten, eight show the mask, one a random word, one the word itself (Devlin et al.,
    "BERT", 2019, section 3.1; anew at every step: Liu et al., "RoBERTa", 2019).

    Args:
        tokens: (B, T).
        candidates: (B, T), True where a token may be chosen: neither padding nor special tokens.
        mask_id: the mask token.
        maskable: (W,) the tokens that a random word is drawn from.
        probability: of choosing each candidate.
        generator: on the tokens' device; None: the global one.

    Returns:
        the tokens to show (B, T), and targets (B, T): the original word where a token was chosen, -100 elsewhere.
    """
    shape, device = tokens.shape, tokens.device
    chosen = (torch.rand(shape, generator=generator, device=device) < probability) & candidates
    way = torch.rand(shape, generator=generator, device=device)
    random = maskable[torch.randint(len(maskable), shape, generator=generator, device=device)]
    shown = tokens.where(~(chosen & (way < 0.8)), mask_id)
    shown = torch.where(chosen & (way >= 0.8) & (way < 0.9), random, shown)
    return shown, tokens.where(chosen, IGNORED)


def attended(batch: dict[str, Any], model: nn.Module | None = None) -> list[Tensor]:
    """A mask (B, T), True for tokens and False for the padding after them; none where the model needs none.

    Args:
        batch: has ``tokens`` (B, T), ``lengths`` (B,) and perhaps ``cpu_lengths``, the same on the CPU (``OnCPU``).
        model: that the mask is for. Where the batch has ``cpu_lengths``, two attributes save a wait for a GPU: with
            ``reads_masks_on_the_cpu = True`` it gets the mask there, with ``takes_no_mask = True`` none for a batch without
            padding.
    """
    lengths, width = batch["lengths"], batch["tokens"].shape[1]
    if "cpu_lengths" in batch:
        on_cpu = batch["cpu_lengths"].tensor
        if getattr(model, "takes_no_mask", False) and bool((on_cpu == width).all()):
            return []
        lengths = on_cpu if getattr(model, "reads_masks_on_the_cpu", False) else lengths
    return [torch.arange(width, device=lengths.device) < lengths[:, None]]

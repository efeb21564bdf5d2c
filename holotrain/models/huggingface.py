"""Models of Hugging Face's transformers."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.files import write_json
from holotrain.models.checkpoint_files import CONFIG, read_weights
from holotrain.models.external import ExternalModel, allocated, external_weights
from holotrain.models.huggingface_files import (
    TRANSFORMERS,
    folder_of,
    has_weights,
    network_of,
    quiet_and_offline,
    without_questions,
)
from holotrain.models.layers.patches import resized_positions
from holotrain.models.pretrained import require_floats, take_over
from holotrain.reversible.chunks import ChunkedForward
from holotrain.reversible.tiled_loss import loss_in_tiles
from holotrain.targets import blaming, needed

HEADS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
LANGUAGE = ("causal_lm", "masked_lm")

FROM_PADDING = ("camembert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
"""Types of models whose positions start after the number of the padding token, which is 1."""

SAVED = (
    "chat_template.",
    "config.",
    "generation_config.",
    "model.",
    "model-",
    "preprocessor_config.",
    "special_tokens",
    "tokenizer",
)
"""What the names of the files begin with that a model and its tokenizer are saved in."""

POSITIONS = "embeddings.position_embeddings"
"""The end of the name of a vision transformer's learned positions."""


class HuggingFace(ExternalModel):
    """A model of transformers with the head of a task. Code beside the weights is never run (``trust_remote_code=False``).

    Args:
        name: a folder with config.json and, optionally, weights; config.json itself, for random weights; or a name on the
            Hugging Face Hub, whose files are taken from its cache
        head: what the model is for: causal_lm, masked_lm, sequence_classification or image_classification; the task tells it
        config: entries that replace those of config.json, such as {attn_implementation: sdpa}; a checkpoint holds all
        classes: number of classes
        vocab: words of the data; a smaller embedding is enlarged
        context: the longest sequence, in tokens
        image_size: height and width of the images, in pixels
        channels: colour channels of the images
        pad_id: the token of padding
        download: download the files of name from the Hugging Face Hub when a training starts, if they are not in the cache

    Raises:
        ValueError: transformers is not installed, the files are missing, or the model has no such head or cannot read the data.
    """

    takes_no_mask = True

    def __init__(
        self,
        name: str,
        head: Literal["causal_lm", "masked_lm", "sequence_classification", "image_classification"],
        config: dict[str, Any] | None = None,
        classes: int | None = None,
        vocab: int | None = None,
        context: int | None = None,
        image_size: int | None = None,
        channels: int | None = None,
        pad_id: int | None = None,
        download: bool = False,
    ) -> None:
        super().__init__()
        transformers = needed(*TRANSFORMERS)
        if head not in HEADS:
            raise ValueError(f"head must be {', '.join(HEADS)}, not {head!r}")
        self.name, self.kind, self.download, self.data_vocab, self.image_size = name, head, download, vocab, image_size
        plain = network_of(name, config)
        kind = plain.pop("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(f"transformers has no model of type {kind!r}, and code beside its weights is not run")
        auto = getattr(transformers, HEADS[head])
        if transformers.CONFIG_MAPPING[kind] not in auto._model_mapping:
            raise ValueError(f"transformers has no {HEADS[head]} of type {kind}; choose another task or model")
        with blaming("config"), quiet_and_offline(transformers):
            network = transformers.AutoConfig.for_model(kind, **plain)
        self.vocab_size = getattr(network, "vocab_size", None)
        if isinstance(self.vocab_size, int) and self.vocab_size < 1:
            raise ValueError(f"config: vocab_size must be at least 1, not {self.vocab_size}")
        _fit_to_data(network, head, classes, vocab, {"image_size": image_size, "num_channels": channels}, pad_id)
        self.context, self.longest = _context(network, context), _context(network, None)
        with blaming(f"the network of {name} cannot be built"), allocated(), quiet_and_offline(transformers):
            # The Trainer's precision decides, not that of the weights.
            model = auto.from_config(network, trust_remote_code=False, dtype=torch.float32)
        self._architecture: Any = type(model)
        self.model = model

    @without_questions()
    def forward(self, inputs: Tensor, *others: Tensor | None) -> Tensor:
        """
        Args:
            inputs: tokens (B, T), or images (B, channels, image_size, image_size).
            others: of a causal model: the targets (B, T). Of a masked model: a mask (B, T), False for padding, and the targets.
                Of a classifier of texts: a mask. All may be left out. Targets of -100 are ignored.

        Returns:
            logits, (B, T, V) or (B, classes); with targets their mean cross-entropy, for which the logits are never whole.
        """
        if self.kind == "image_classification":
            return self.model(pixel_values=inputs).logits
        mask, targets = (None, *others, None)[:2] if self.kind == "causal_lm" else (*others, None, None)[:2]
        attended = {} if mask is None else {"attention_mask": mask.to(inputs.dtype)}
        arguments = {"input_ids": inputs, "use_cache": False, **attended}
        if targets is None:
            return self.model(**arguments).logits
        if ChunkedForward.of(self.model) is not None:
            return self.model(**arguments, labels=targets, shift_labels=targets).loss

        def loss() -> Tensor:
            return F.cross_entropy(self.model(**arguments).logits.flatten(0, 1).float(), targets.flatten())

        return loss_in_tiles(self.model, loss)

    @property
    def head(self) -> nn.Module | None:
        found = [getattr(self.model, name, None) for name in ("classifier", "score")] if self.kind not in LANGUAGE else []
        return next((each for each in found if isinstance(each, nn.Module)), None)

    def start_from(self, pretrained: str | None) -> str | None:
        loaded = None
        if pretrained is not None and not (Path(pretrained) / CONFIG).is_file():
            loaded = self.load_weights(external_weights(pretrained), pretrained)
        elif pretrained is not None:
            loaded = self._from_folder(Path(pretrained), pretrained)
        elif has_weights(self.name, self.download):
            loaded = self._from_folder(folder_of(self.name, self.download), self.name)
        messages = [] if loaded is None else [loaded]
        if self.data_vocab is not None and self.vocab_size is not None and self.data_vocab != self.vocab_size:
            added = self.data_vocab - self.vocab_size
            grown = f"; {added} rows are added to its embedding" if added > 0 else ""
            messages.append(
                f"the data have {self.data_vocab} words and the model has {self.vocab_size}{grown}; "
                "data.tokenizer=FOLDER/tokenizer.json is the tokenizer of a model"
            )
        return "\n".join(messages) or None

    def _from_folder(self, folder: Path, source: str) -> str:
        """Loads weights as ``from_pretrained`` does, with the sizes that they have."""
        if (folder / "adapter_config.json").is_file():
            raise ValueError(f"{folder} holds an adapter of another model; give the folder of that model, or of a merged one")
        saved, config = network_of(str(folder)), copy.deepcopy(self.model.config)
        if saved["model_type"] != config.model_type:
            raise ValueError(f"{source} is of type {saved['model_type']}, not {config.model_type}")
        for name in ("vocab_size", "image_size"):
            if name in saved and hasattr(config, name):
                setattr(config, name, saved[name])
        model, report = self._pretrained(config, read_weights(folder), source)
        new = {*report["missing_keys"], *(key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])}
        weights, own = model.state_dict(), self.model.state_dict(keep_vars=True)
        resized = []
        for name, tensor in weights.items():
            if name.endswith(POSITIONS) and tensor.shape != own[name].shape:
                weights[name] = resized_positions(tensor, own[name].detach(), True, True)
                if weights[name].shape == own[name].shape:
                    resized.append(name)
                else:
                    new.add(name)
        loaded = take_over(own, {name: x for name, x in weights.items() if name not in new}, source)
        return str(replace(loaded, unexpected=tuple(report["unexpected_keys"]), resized=tuple(resized)))

    def _pretrained(self, config: Any, weights: dict[str, Tensor], source: str) -> tuple[Any, dict[str, Any]]:
        """A model with weights under the names of any release of transformers, and what its ``from_pretrained`` reports."""
        prefix = f"{self.model.base_model_prefix}."
        named, own = ({name.removeprefix(prefix): x for name, x in each.items()} for each in (weights, self.model.state_dict()))
        require_floats(named, own, source)  # transformers would convert other numbers
        with blaming(source), quiet_and_offline(needed(*TRANSFORMERS)):
            model, report = self._architecture.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            if (rows := getattr(self.model.config, "vocab_size", None)) != getattr(config, "vocab_size", None):
                model.resize_token_embeddings(rows, mean_resizing=False)
        return model, report

    def load_saved(self, weights: dict[str, Tensor]) -> None:
        model, report = self._pretrained(copy.deepcopy(self.model.config), weights, "its weights")
        flaws = {"missing_keys": "missing", "unexpected_keys": "unknown", "mismatched_keys": "of another shape"}
        for keys, flaw in flaws.items():
            names = [key if isinstance(key, str) else key[0] for key in report[keys]]
            if names:
                raise ValueError(f"{min(names)} is {flaw}")
        self.model.load_state_dict(model.state_dict())

    def reader(self, prompts: Sequence[Tensor]) -> "TransformersReader":
        """Reads prompts for :func:`~holotrain.models.generate`."""
        if self.kind != "causal_lm":
            raise ValueError(f"a model for {self.kind} does not generate text")
        return TransformersReader(self.model, prompts)

    def save(self, folder: Path, described: Mapping[str, Any]) -> list[str]:
        """Writes the folder that ``AutoModelFor...from_pretrained(FOLDER)`` reads, with AutoTokenizer's files for text and
        AutoImageProcessor's for images."""
        if (class_names := described.get("class_names")) is not None:
            self.model.config.id2label = dict(enumerate(class_names))
            self.model.config.label2id = {name: index for index, name in enumerate(class_names)}
        with quiet_and_offline(needed(*TRANSFORMERS)):
            self.model.save_pretrained(folder)
        if (tokenizer := described.get("tokenizer")) is not None:
            _save_tokenizer(folder, tokenizer, self.context, described.get("chat"))
        if described.get("statistics") is not None:
            size = self.image_size or getattr(self.model.config, "image_size", None)
            write_json(folder / "preprocessor_config.json", _processor(described, size if isinstance(size, int) else None))
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(SAVED))


def _processor(described: Mapping[str, Any], size: int | None) -> dict[str, Any]:
    """With which AutoImageProcessor prepares images of this height and width as the evaluation did. What is not said would be
    as for CLIP: converted to RGB and cut to 224 pixels."""
    mean, std = described["statistics"]
    found: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "do_rescale": True, "rescale_factor": 1 / 255}
    found |= {"do_normalize": True, "image_mean": list(mean), "image_std": list(std)}
    found |= {"do_convert_rgb": len(mean) == 3, "do_resize": size is not None, "do_center_crop": False}
    if size is None:
        return found
    found["resample"] = 3 if described.get("interpolation") == "bicubic" else 2  # as Pillow numbers them
    whole = {"height": size, "width": size}
    if 0 < (crop_pct := described.get("crop_pct", 0)) <= 1:
        return found | {"size": {"shortest_edge": int(size / crop_pct)}, "do_center_crop": True, "crop_size": whole}
    return found | {"size": whole}


class TransformersReader:
    """Reads prompts of different lengths, and then token by token. Keys and values are kept by transformers.

    Args:
        model: causal, in eval mode.
        prompts: (T,) tokens each, padded on the left.
    """

    def __init__(self, model: nn.Module, prompts: Sequence[Tensor]) -> None:
        device, longest = next(model.parameters()).device, max(map(len, prompts))
        self._tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        self._mask = torch.zeros_like(self._tokens)
        for row, prompt in enumerate(prompts):
            self._tokens[row, longest - len(prompt) :] = prompt
            self._mask[row, longest - len(prompt) :] = 1
        self._model: nn.Module = model
        self._cache: dict[str, Any] = {}  # by its name, which is past_key_values before transformers 5.24

    def read(self, tokens: Tensor | None = None) -> Tensor:
        """The logits (B, V) of the token after ``tokens`` (B,); None: after the prompts."""
        if tokens is not None:
            self._tokens = tokens[:, None]
            self._mask = torch.cat((self._mask, torch.ones_like(self._tokens)), dim=1)
        positions = (self._mask.cumsum(1) - 1).clamp_min(0)[:, -self._tokens.shape[1] :]
        found = self._model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=positions,
            use_cache=True,
            **self._cache,
        )
        self._cache = {name: found[name] for name in found.keys() & {"cache", "past_key_values"}}
        if not self._cache:  # the next token would be read without those before it
            raise ValueError(f"a {type(self._model).__name__} keeps no keys and values, so it generates no text here")
        return found.logits[:, -1]


def _fit_to_data(
    network: Any, head: str, classes: int | None, vocab: int | None, image: dict[str, int | None], pad_id: int | None
) -> None:
    if head not in LANGUAGE:
        if not classes:
            raise ValueError("classes: the data do not tell it; give classes=...")
        network.num_labels = classes
        network.problem_type = "single_label_classification"
    both = getattr(network, "is_encoder_decoder", False)
    if head == "causal_lm" and getattr(network, "is_decoder", None) is False and not both:
        network.is_decoder = True  # an encoder would see the words that it is to predict
    if vocab is not None and vocab > (getattr(network, "vocab_size", None) or vocab):
        network.vocab_size = vocab
    if pad_id is not None and head == "sequence_classification" and network.model_type not in FROM_PADDING:
        network.pad_token_id = pad_id  # models without a first token for the class look for the last word that is not this
    for name, value in image.items():
        if value is not None and hasattr(network, name):
            setattr(network, name, value)


def _context(network: Any, wanted: int | None) -> int | None:
    """The longest sequence, in tokens."""
    limit = getattr(network, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return wanted
    if network.model_type in FROM_PADDING:
        limit -= 2
    if wanted is not None and wanted > limit:
        raise ValueError(f"it reads at most {limit} tokens, not {wanted}; use data.context={limit}")
    return wanted or limit


def _save_tokenizer(folder: Path, text: str, context: int | None, chat: Mapping[str, Any] | None) -> None:
    """Writes AutoTokenizer's files, with a chat template; none for bytes, which it does not know."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception:  # the library raises Exception itself
        return
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    roles = {
        "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
        "bos_token": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
        "eos_token": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
        "mask_token": ("<mask>", "[MASK]", "<|mask|>"),
        "cls_token": ("[CLS]",),
        "sep_token": ("[SEP]",),
    }
    found = {role: next((name for name in names if name in known), None) for role, names in roles.items()}
    more: dict[str, Any] = {} if context is None else {"model_max_length": context}
    own = {} if chat is None else chat["tokens"]
    if chat is not None and chat["template"]:
        more["chat_template"] = chat["template"]
    # The training pads with the first of these, too.
    pads = (found["pad_token"], own.get("pad_token"), found["eos_token"], own.get("eos_token"))
    found = found | own | {"pad_token": next((name for name in pads if name is not None), None)}
    tokens = {role: name for role, name in found.items() if name is not None}
    needed(*TRANSFORMERS).PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, **more).save_pretrained(folder)

"""Models of Hugging Face's transformers; the configuration and the files of one are read as data: nothing in them is run."""

import copy
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holotrain.files import read_json, read_text, write_json
from holotrain.models.checkpoint_files import CONFIG, IN_A_FOLDER, read_weights
from holotrain.models.external import LOADING_ARGUMENTS, ExternalModel, external_weights
from holotrain.models.pretrained import image_positions, require_floats, require_half, take_over
from holotrain.reversible.tiled_loss import tiled_cross_entropy
from holotrain.targets import first_line, needed, targets

HEADS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
LANGUAGE = ("causal_lm", "masked_lm")

FROM_PADDING = ("camembert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
"""Types of models whose positions start after the number of the padding token, which is 1."""

SAVED = ("config.", "generation_config.", "model.", "model-", "preprocessor_config.", "special_tokens", "tokenizer")
"""What the names of the files begin with that a model and its tokenizer are saved in."""

POSITIONS = "embeddings.position_embeddings"
"""The end of the name of a vision transformer's learned positions."""

TRANSFORMERS = ("transformers", "this model needs transformers", "huggingface")

FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
"""What is downloaded of a repository: no code, and no pickled weights."""

OF_A_FILE = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "pretrained_cfg", "torch_dtype"),
    *("transformers_version", "transformers_weights"),
)
"""What a config.json says of its own weights, or of code beside it."""

ELSEWHERE = ("backbone", "use_pretrained_backbone", *LOADING_ARGUMENTS)
"""Entries that name another model or file, which transformers or timm would download or open."""

LABELS = ("id2label", "label2id")
"""Entries whose names are those of classes."""

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Implementations of attention that are installed with their libraries; other names stand for code on the Hub."""


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
        reversible: make the blocks reversible, and keep so many bits of each number between them, more towards both ends; 4bit
            is recommended, and fewer train further from the model; null: leave them
        blocks: name of the list of blocks to make reversible, such as model.layers, or several names; null: the only one

    Raises:
        ValueError: transformers is not installed, the files are missing, or the model has no such head or cannot read the data.
    """

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
        reversible: Literal["1bit", "2bit", "3bit", "4bit"] | None = None,
        blocks: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        transformers = needed(*TRANSFORMERS)
        if head not in HEADS:
            raise ValueError(f"head must be {', '.join(HEADS)}, not {head!r}")
        self.name, self.kind, self.download, self.data_vocab = name, head, download, vocab
        plain = network_of(name, config)
        kind = plain.pop("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(f"transformers has no model of type {kind!r}, and code beside its weights is not run")
        self._auto = getattr(transformers, HEADS[head])
        if transformers.CONFIG_MAPPING[kind] not in self._auto._model_mapping:
            raise ValueError(f"transformers has no {HEADS[head]} of type {kind}; choose another task or model")
        try:
            with alone(transformers):
                network = transformers.AutoConfig.for_model(kind, **plain)
        except Exception as error:  # of many kinds
            raise ValueError(f"config: {first_line(error)}") from error
        self.vocab_size = getattr(network, "vocab_size", None)
        _fit_to_data(network, head, classes, vocab, {"image_size": image_size, "num_channels": channels}, pad_id)
        self.context, self.longest = _context(network, context), _context(network, None)
        with alone(transformers):
            # The Trainer's precision decides, not that of the weights.
            model = self._auto.from_config(network, trust_remote_code=False, dtype=torch.float32)
        self.wrap(model, reversible, blocks)

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
        given = {"input_ids": inputs, "use_cache": False, **attended}
        if targets is None:
            return self.model(**given).logits
        return tiled_cross_entropy(self.model, targets, **given)

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
        elif Path(self.name).name != CONFIG:
            folder = folder_of(self.name, self.download)
            if any((folder / name).is_file() for name in IN_A_FOLDER):
                loaded = self._from_folder(folder, self.name)
        said = [] if loaded is None else [loaded]
        if self.data_vocab is not None and self.vocab_size is not None and self.data_vocab != self.vocab_size:
            grown = (
                f"; {self.data_vocab - self.vocab_size} rows are added to its embedding"
                if self.data_vocab > self.vocab_size
                else ""
            )
            said.append(
                f"the data have {self.data_vocab} words and the model has {self.vocab_size}{grown}; "
                "data.tokenizer=FOLDER/tokenizer.json is the tokenizer of a model"
            )
        return "\n".join(said) or None

    def _require_floats(self, given: Mapping[str, Tensor], source: str) -> None:
        """Raises a ValueError for weights that transformers would convert to floating-point numbers, whatever they are."""
        prefix = f"{self.model.base_model_prefix}."
        shorter = {name.removeprefix(prefix): tensor for name, tensor in given.items()}
        longer = {prefix + name: tensor for name, tensor in shorter.items()}
        require_floats(shorter | longer, self.model.state_dict(), source)

    def _from_folder(self, folder: Path, source: str) -> str:
        """Loads weights as ``from_pretrained`` does, with the sizes that they have."""
        if (folder / "adapter_config.json").is_file():
            raise ValueError(f"{folder} holds an adapter of another model; give the folder of that model, or of a merged one")
        theirs, own = network_of(str(folder)), self.model.config
        if theirs["model_type"] != own.model_type:
            raise ValueError(f"{source} is of type {theirs['model_type']}, not {own.model_type}")
        self._require_floats(read_weights(folder), source)
        network = copy.deepcopy(own)
        for name in ("vocab_size", "image_size"):
            if name in theirs and hasattr(network, name):
                setattr(network, name, theirs[name])
        with alone(needed(*TRANSFORMERS)):
            try:
                model, report = self._auto.from_pretrained(
                    folder,
                    config=network,
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    weights_only=True,
                    output_loading_info=True,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"{source}: {first_line(error)}") from error
            if (rows := getattr(own, "vocab_size", None)) != getattr(network, "vocab_size", None):
                model.resize_token_embeddings(rows, mean_resizing=False)
        new = {*report["missing_keys"], *(key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])}
        weights, here = model.state_dict(), self.model.state_dict()
        resized = []
        for name, tensor in weights.items():
            if name.endswith(POSITIONS) and tensor.shape != here[name].shape:
                fitted = image_positions(tensor, here[name], True, True)
                (new.add if fitted.shape != here[name].shape else resized.append)(name)
                weights[name] = here[name] if name in new else fitted
        require_half(new, here, source)
        loaded = take_over(self.model.state_dict(keep_vars=True), weights, source)
        kept = tuple(name for name in loaded.loaded if name not in new)
        strange = tuple(report["unexpected_keys"])
        return str(replace(loaded, loaded=kept, missing=tuple(new), unexpected=strange, resized=tuple(resized)))

    def reader(self, prompts: Sequence[Tensor]) -> "Reader":
        """Reads prompts for :func:`~holotrain.models.generate`."""
        if self.kind != "causal_lm":
            raise ValueError(f"a model for {self.kind} does not generate text")
        return Reader(self.model, prompts)

    def save(self, folder: Path, described: Mapping[str, Any]) -> list[str]:
        """Writes the folder that ``AutoModelFor...from_pretrained(FOLDER)`` reads, with AutoTokenizer's files for text and
        AutoImageProcessor's for images."""
        if (class_names := described.get("class_names")) is not None:
            self.model.config.id2label = dict(enumerate(class_names))
            self.model.config.label2id = {name: index for index, name in enumerate(class_names)}
        with alone(needed(*TRANSFORMERS)):
            self.model.save_pretrained(folder)
        if (tokenizer := described.get("tokenizer")) is not None:
            _save_tokenizer(folder, tokenizer, self.context)
        if (statistics := described.get("statistics")) is not None:
            size = getattr(self.model.config, "image_size", None)
            processor = {
                "image_processor_type": "ViTImageProcessor",
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": list(statistics[0]),
                "image_std": list(statistics[1]),
                **({"do_resize": True, "size": {"height": size, "width": size}} if isinstance(size, int) else {}),
            }
            write_json(folder / "preprocessor_config.json", processor)
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(SAVED))


class Reader:
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
        self._model, self._cache = model, None

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
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = found.past_key_values
        return found.logits[:, -1]


def tokenizer_of(name: str, download: bool = False) -> str | None:
    """The content of the tokenizer.json of a model; None: it has none.

    Args:
        name, download: see :func:`~holotrain.models.huggingface.folder_of`.
    """
    folder, transformers = folder_of(name, download), needed(*TRANSFORMERS)
    if (path := folder / "tokenizer.json").is_file():
        try:
            return read_text(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path} ({first_line(error)})") from error
    if not any((folder / name).is_file() for name in ("vocab.txt", "vocab.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    _require_own_tokenizer(folder)
    try:
        with alone(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # tokenizers raise many kinds
        raise ValueError(f"{folder} has a tokenizer that cannot be read ({first_line(error)})") from error


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
        network.pad_token_id = pad_id  # models without a first token for the class look for the last word
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


def _save_tokenizer(folder: Path, text: str, context: int | None) -> None:
    """Writes AutoTokenizer's files; none for bytes, which it does not know."""
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
    tokens = {role: name for role, name in found.items() if name is not None}
    limit = {} if context is None else {"model_max_length": context}
    needed(*TRANSFORMERS).PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, **limit).save_pretrained(folder)


@contextmanager
def alone(transformers: ModuleType) -> Generator[None]:
    """Without the network, and without the library's warnings and progress bars: what matters is reported in one line."""
    from huggingface_hub import constants

    logging = transformers.logging
    level, bars, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def folder_of(name: str, download: bool = False) -> Path:
    """The local folder of a model.

    Args:
        name: a folder, its config.json, or the name of a repository on the Hugging Face Hub.
        download: download the repository, if it is not in the cache.

    Raises:
        ValueError: there is no such folder, and the repository is not in the cache or cannot be downloaded.
    """
    path = Path(name).expanduser()
    if path.name == CONFIG and path.is_file():
        return path.parent
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"there is no folder {name}")
    import huggingface_hub as hub

    try:
        wanted: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": ["*/*"]}
        return Path(hub.snapshot_download(name, local_files_only=not download, **wanted))
    except Exception as error:  # whatever the network says
        if not download:
            raise ValueError(
                f"there is no folder {name}, and no model of this name in the cache of Hugging Face; "
                "download=true downloads one from the Hub"
            ) from error
        raise ValueError(f"cannot download {name} ({first_line(error)})") from error


def network_of(name: str, given: dict[str, Any] | None = None, download: bool = False) -> dict[str, Any]:
    """The configuration of a network in plain containers, as its config.json has it.

    Args:
        name, download: see :func:`folder_of`. Nothing is read if ``given`` is a whole configuration.
        given: replaces entries of the file.

    Raises:
        ValueError: there is no such file, it is not the configuration of a model, or an entry would run code.
    """
    given = dict(given or {})
    if "model_type" not in given:
        given = _read(folder_of(name, download) / CONFIG) | given
    if any(True for _ in targets(given)):
        raise ValueError(f"the configuration of {name} names a class by _target_")
    try:
        _check_entries(given)
    except ValueError as error:
        raise ValueError(f"the configuration of {name}: {error}") from error
    if "quantization_config" in given:
        raise ValueError(f"{name} is quantised and cannot be trained; use the model that it was made from")
    return {key: value for key, value in given.items() if key not in OF_A_FILE}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(f"{path} is not the configuration of a model of transformers: it has no model_type")
    return found


def _check_entries(node: Any) -> None:
    """Refuses models, files and implementations elsewhere, which the libraries would download, open or run."""
    if isinstance(node, list):
        for each in node:
            _check_entries(each)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key.strip("_").startswith(("attn_implementation", "experts_implementation")):
            if value is not None and value not in ATTENTION:
                raise ValueError(f"{key}: {value!r} is not one of {', '.join(ATTENTION)}")
            if value and value.startswith("flash") and find_spec("flash_attn") is None:
                raise ValueError(f"{key}: {value} needs the package flash-attn")
        elif key in LABELS:
            continue
        elif (key in ELSEWHERE and value) or (key == "architecture" and re.search(r"[:/\\]", str(value))):
            raise ValueError(f"{key}: {value!r} names a model or a file elsewhere, which is not opened")
        else:
            _check_entries(value)


def _require_own_tokenizer(folder: Path) -> None:
    """Refuses a tokenizer whose description names a file: the library would open it in place of its own.

    Raises:
        ValueError: a text in it is the path of a file.
    """
    for path in (folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")):
        for text in _texts(read_json(path)) if path.is_file() else ():
            elsewhere = os.path.isfile(text) and Path(text).resolve().parent != folder.resolve()
            if elsewhere or (os.sep in text and os.path.isfile(folder / text)):
                raise ValueError(f"{path} names the file {text!r}, which is not opened")


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list | dict):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _texts(each)

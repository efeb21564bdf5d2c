"""``holotrain export``: writes a checkpoint's model as files for other programs."""

from pathlib import Path
from typing import Any

from holotrain.commands.prepare import as_exported, described_model
from holotrain.commands.run import Run, write_summary
from holotrain.commands.screen import show
from holotrain.config import checkpointed
from holotrain.config.command_options import ExportConfig
from holotrain.data.tokenizers import CHAT, SETTINGS, TEMPLATE, plain_json, tokenizer_from_json
from holotrain.errors import UserError, as_user_error
from holotrain.files import write_json
from holotrain.folders import refuse_links, require_no_device
from holotrain.models import saved
from holotrain.models.external import ExternalModel
from holotrain.models.huggingface import SAVED
from holotrain.models.quantised import storage_bytes


def run(config: ExportConfig, run: Run) -> int:
    """Writes model.safetensors, config.json and, for a model of text, tokenizer.json.

    A model of another library is written as that library reads it, with holotrain.json beside it.
    """
    path, folder = config.checkpoint, Path(config.to) if config.to else run.folder / "export"
    if folder.is_dir():  # a library writes through links
        refuse_links(folder, [each.name for each in folder.iterdir() if each.name.startswith((*SAVED, saved.BESIDE))])
    else:
        require_no_device("to", folder)
    model, described = described_model(path)
    model.eval()
    if config.quantised and isinstance(model, ExternalModel):
        kind = type(model).__name__
        raise UserError(
            f"quantised: a {kind} is written for its own library, which quantises in its own way; use quantised=null"
        )
    as_exported(model, config.quantised)
    described = dict(described)
    target, arguments, tokenizer = (described.pop(key, None) for key in ("target", "arguments", "tokenizer"))
    chat = None
    if tokenizer is not None:
        tokenizer_from_json(tokenizer, str(path))  # what is no tokenizer is not handed on
        tokenizer, chat = plain_json(tokenizer)
    extra = described | {checkpointed.KEY: _as_written(checkpointed.metadata(path))}
    try:
        of_others = [] if isinstance(model, ExternalModel) else [SETTINGS]  # the library of such a model writes its own
        for name in (TEMPLATE, *of_others):  # left by an earlier export
            (folder / name).unlink(missing_ok=True)
        with as_user_error("to"):
            if isinstance(model, ExternalModel):
                names = saved.save_external(folder, target, arguments, model, extra, tokenizer, chat)
            else:
                saved.save(folder, target, arguments, model, extra=extra, tokenizer=tokenizer)
                if chat is not None:
                    template = {CHAT: chat["template"]} if chat["template"] else {}
                    write_json(folder / SETTINGS, template | chat["tokens"])
                names = [saved.WEIGHTS, saved.CONFIG, saved.TOKENIZER, SETTINGS]
    except OSError as error:
        raise UserError(f"to: cannot write {error.filename or folder} ({error.strerror or error})") from error

    written = [folder / name for name in names if (folder / name).is_file()]
    weights = storage_bytes(model)
    metrics = {"bytes": sum(file.stat().st_size for file in written), "storage_bytes": weights}
    summary = write_summary(run, config, model, checkpoint=str(path), metrics=metrics)
    share = f", {weights / (4 * summary.parameters):.3f} of the fp32 size" if config.quantised else ""
    rows = {
        "model of": path,
        "weights": f"{weights / 2**20:.2f} MiB{share}",
        "written to": f"{folder}: {', '.join(file.name for file in written)}",
    }
    show(summary.status, rows)
    return 0


def _as_written(metadata: dict[str, Any]) -> dict[str, Any]:
    """What the checkpoint says of its run, for weights that are whole: layers of peft are merged, and few bits are undone."""
    model = metadata["config"]["model"]
    if model is None:
        return metadata
    merged = {"adapters": 0, "trained": "all"} if isinstance(model.get("adapters"), dict) else {}
    return metadata | {"config": metadata["config"] | {"model": model | merged | {"quantised": None}}}

"""Measures data loading: the memory of streamed text, and the speed of image folders against timm's loader.

python scripts/bench_data.py stream --json scripts/results/data_stream_cpu.json
python scripts/bench_data.py images --json scripts/results/data_images_cpu.json
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_common import alternating, arguments, begin, save
from PIL import Image


def write_texts(folder: Path, size: int, files: int) -> int:
    """Random words in files of JSON lines; returns the bytes of text."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    written = 0
    for number in range(files):
        with (folder / f"{number}.jsonl").open("w") as file:
            while written < size * (number + 1) // files:
                text = " ".join(draw.choices(words, k=800))
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text)
    return written


def resident() -> dict[str, int]:
    """Bytes of this process's memory that are resident now: all, and without the pages of files such as torch's libraries."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("all", "VmRSS"), ("anonymous", "RssAnon"))}


def stream(options: argparse.Namespace) -> dict:
    """One pass through generated text, as training reads it."""
    from holotrain.data import TextFiles

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text = write_texts(Path(folder), int(options.gib * 2**30), options.files)
        files = {"files": f"{folder}/*.jsonl", "cache_dir": f"{folder}/cache"}
        data = TextFiles(**files, streaming=True, context=1024, batch_size=16, num_workers=options.workers)
        imported = resident()
        data.setup()
        begun, tokens, seen = time.perf_counter(), 0, [resident()]
        for batch in data.train_dataloader().batches:
            tokens += batch["tokens"][:, 1:].numel()
            seen.append(resident())
            if tokens > 0.95 * text:  # of the rest, a part is held out and another does not fill a batch
                break
        seconds = time.perf_counter() - begun
        in_files = sum(path.stat().st_size for path in Path(folder).glob("*.jsonl"))
        written = sum(path.stat().st_size for path in Path(folder).glob("cache/**/*") if path.is_file())
    return {
        "text_bytes": text,
        "file_bytes": in_files,
        "cache_bytes": written,
        "tokens": tokens,
        "seconds": seconds,
        "resident_bytes": {
            "after_imports": imported,
            "after_setup": seen[0],
            "after_a_tenth": seen[len(seen) // 10],
            "at_the_end": seen[-1],
            "most": {name: max(each[name] for each in seen) for name in imported},
        },
    }


def write_images(folder: Path, count: int, side: int) -> None:
    """Smooth random photographs, in two classes."""
    draw = np.random.default_rng(0)
    for number in range(count):
        path = folder / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (side // 16, side // 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((side * 4 // 3, side), Image.Resampling.BICUBIC).save(path, quality=90)
    (folder / "val").symlink_to("train")


def images(options: argparse.Namespace) -> dict:
    """Training batches of a folder of images, by holotrain and by timm with the same crops and flips."""
    from timm.data import create_dataset, create_loader

    from holotrain.data import ImageFolder

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_images(Path(folder), options.images, options.side)
        shared = {"batch_size": 32, "num_workers": options.workers}
        ours = ImageFolder(folder, **shared)
        ours.setup()
        ours = ours.train_dataloader()
        theirs = create_loader(
            create_dataset("", root=f"{folder}/train"),
            (3, 224, 224),
            batch_size=32,
            is_training=True,
            use_prefetcher=False,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            color_jitter=None,
            interpolation="bilinear",
        )

        def epoch(loader) -> float:
            begun = time.perf_counter()
            count = sum(len(images) for images, _ in loader)
            return (time.perf_counter() - begun) / count

        seconds = alternating({"holotrain": lambda: epoch(ours), "timm": lambda: epoch(theirs)}, options.rounds)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [theirs / ours for ours, theirs in zip(seconds["holotrain"], seconds["timm"], strict=True)]
    return {
        "seconds_per_image": seconds,
        "images_per_second": {name: 1 / median for name, median in medians.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["stream", "images"])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the generated text")
    parser.add_argument("--files", type=int, default=16, help="files that hold it")
    parser.add_argument("--images", type=int, default=512, help="images in the folder")
    parser.add_argument("--side", type=int, default=375, help="height of an image, in pixels")
    parser.add_argument("--workers", type=int, default=None, help="worker processes; default: 0 for stream, 2 for images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where generated files are put while it runs")
    options = parser.parse_args()
    if options.workers is None:
        options.workers = 2 if options.what == "images" else 0
    torch.manual_seed(0)
    begun = begin(options)
    found = {"stream": stream, "images": images}[options.what](options)
    print(json.dumps({name: value for name, value in found.items() if not isinstance(value, list)}, indent=2))
    save(begun | found, options.json)


if __name__ == "__main__":
    main()

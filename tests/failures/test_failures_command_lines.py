"""Wrong command lines are answered in a line or two, and no command line ends in a traceback."""

import os
import random
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from covering import long, slow
from failures.wrong_command_lines import LONG, WRONG
from small_run import SMALL

from holotrain.commands import multiprocess

TWICE = ["model=vit_tiny seed=1 model=vit_small", "callbacks=ema +callbacks=ema", "-m seed=1,2 ++seed=2"]

OWN = Path(__file__).parents[1] / "own_classes"


@pytest.fixture
def typed(holotrain, image_run, monkeypatch):
    """Runs a command line in this process, in the folder that ``wrong_command_lines`` describes."""
    Path("run").symlink_to(image_run)
    Path("occupied").write_text("a file")
    Path("text.ckpt").write_text("no checkpoint")
    Path("empty").mkdir()
    os.mkfifo("pipe.ckpt")
    for folder, name in (("full", "mine"), ("texts", "a.txt")):
        Path(folder).mkdir()
        Path(folder, name).write_text("".join(f"{number} words\n" for number in range(400)))
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    shutil.copytree(OWN / "conf", "mine")
    monkeypatch.syspath_prepend(OWN)
    return lambda line: holotrain(*shlex.split(line))


def files() -> list[Path]:
    """But for caches of data, and what a sweep says of its jobs."""
    return sorted(path for path in Path().rglob("*") if path.is_file() and path.parts[0] not in ("data", "runs"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (slow if number % 4 else pytest.param)(line, words, id=line.replace(LONG, "long")[-60:])
        for number, (line, words) in enumerate(WRONG)
    ],
)
def test_a_wrong_command_line_is_answered_in_a_line_or_two(typed, line, words):
    before = files()
    status, out, err = typed(line)
    assert status == 2 and (out == "" or "auto" in line)  # a batch size or schedules are planned first
    assert words in err and err.startswith("holotrain: ")
    assert err.count("\n") <= 2 and "Traceback" not in err
    assert not list(Path().glob("runs/fit/20*")) and files() == before  # a run that did not begin leaves no folder


@pytest.mark.parametrize("words", TWICE)
def test_what_is_given_twice_is_refused(holotrain, words):
    status, out, err = holotrain("fit", *words.split())
    key, first, second = re.fullmatch(r"holotrain: (.*): it is given twice, as (.*) and (.*); leave one out\n", err).groups()
    assert (status, out) == (2, "") and key in first and key in second and {first, second} <= {*words.split()}


def test_of_two_values_the_last_is_taken(holotrain):
    shown = holotrain.done("fit", "--cfg", "job", "optimizer.lr=1", "optimizer.lr=2", "seed=3", "++seed=4")
    assert yaml.safe_load(shown)["optimizer"]["lr"] == 2 and yaml.safe_load(shown)["seed"] == 4


def test_a_group_that_is_left_out_first_is_replaced(holotrain):
    words = ["~data", "+data._target_=holotrain.data.Digits", "experiment=digits_vit_tiny", "model=rev_vit_tiny"]
    assert "RevViT" in holotrain.done("fit", "--cfg", "job", *words)  # what an experiment chooses is not given on the line


@pytest.mark.parametrize("limit", ["limit_train_batches", "limit_val_batches", "overfit_batches"])
def test_less_than_one_batch_is_refused_when_the_data_are_read(holotrain, limit):
    status, _, err = holotrain("fit", f"trainer.{limit}=0.0001", "logger=none")
    assert status == 2 and err.startswith("holotrain: fit: You requested to check 0.0001 of the") and err.count("\n") == 1


def test_names_in_brackets_and_interpolations_mean_what_they_say(holotrain):
    words = ["output_dir=[/red]", "optimizer.weight_decay=${optimizer.lr}", "callbacks.progress=null"]
    status, out, _ = holotrain("fit", *SMALL, *words, "optimizer.lr=0.125", "test=false", "logger=none")
    assert status == 0 and "[/red]/fit/" in out
    (kept,) = Path("[/red]/fit").glob("*/config.yaml")
    assert yaml.safe_load(kept.read_text())["optimizer"]["weight_decay"] == 0.125


VALID = [
    "fit model=rev_vit_tiny data=digits optimizer=adamw optimizer.lr=1e-3 trainer.max_epochs=3 hydra.run.dir=out",
    "fit backward=pareprop backward.store=[0,2] synthesis=associative synthesis.decay=0.9 data.batch_size=32",
    "fit model.dim=32 model.depth=2 model.heads=4 callbacks.drift=null logger=csv ~callbacks.predictions seed=7",
    "fit task=causal_lm data.context=64 model=rev_gpt_tiny optimizer.weight_decay='${optimizer.lr}' compile=false",
    "fit task=masked_lm data=text_files data.files=[a.txt,b.txt] data.tokenizer=byte memory=2GiB",
    "fit task=error_diffusion trainer.limit_train_batches=0.5 trainer.val_check_interval=0.25 output_dir=out",
    "fit experiment=digits_shared trainer.max_time=00:01:00:00 callbacks.early_stopping.patience=3 callbacks=early_stopping",
    "fit optimizer._target_=torch.optim.SGD optimizer.lr=0.1 optimizer.momentum=0.9 model.adapters=8 model.trained=adapters",
    "fit -m optimizer.lr=1e-3,1e-2 seed=range(2) hydra.sweep.dir=sweep hydra/sweeper=basic",
    "fit trainer=ddp trainer.devices=2 trainer.backend=gloo trainer.precision=bf16-mixed trainer.max_steps=9",
    "fit --cfg job --resolve data=fake data.size=100 data.num_classes=3 profiler=simple test=false",
    "fit --config-dir empty --info=defaults model=vit_tiny scheduler=cosine backward.kind=checkpoint",
    "plan model=rev_vit_tiny device=cpu memory=16GiB json=-",
    "test ckpt_path=run data.batch_size=16 trainer.limit_test_batches=3",
    "predict ckpt_path=run images=occupied int8=false",
    "export ckpt_path=run to=out format=safetensors",
    "init guest",
]

VALUES = [
    *("", "''", "null", "true", "-1", "0", "1e-320", "1e400", "nan", "9" * 25, "0x10", "[]", "[1,[2]]", "{}", "{a:1}"),
    *("{_target_:a}", "'${nope}'", "'${seed}'", "'${'", "banana", "a,b", "a b", "é", "\udcff", "[red]", ":star:"),
    *("_target_", "a" * 300, "\x1b[31m"),
]

LETTERS = "abz09.,:=+~-@_*?()[]{}$'\"\\# \t\x1bé\ud800"  # no slash, so that nothing is written elsewhere


def changed(words: list[str], values: list[str], choose: random.Random) -> list[str]:
    """A command line after one to three changes: of its words, of their values, or of their letters."""
    words = list(words)
    for _ in range(choose.randint(1, 3)):
        place = choose.randrange(len(words))
        word, at = words[place], choose.randrange(len(words[place]) + 1)
        key, equals, _ = word.partition("=")
        match choose.randrange(8):
            case 0:
                words[place] = key + equals + choose.choice(values)
            case 1:
                words[place] = f"{key}={choose.choice(VALUES)}"
            case 2 if len(words) > 1:
                del words[place]
            case 3:
                words.insert(choose.randrange(len(words) + 1), word)
            case 4:
                words[place] = word[:at] + word[at + 1 :]
            case 5:
                words[place] = word[:at] + word[at : at + 1] + word[at:]
            case 6:
                words[place] = word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
            case _:
                words[place] = word[:at] + choose.choice(LETTERS) + word[at + 1 :]
    return words


@pytest.mark.parametrize(("seed", "count"), [slow(0, 50), long(1, 500)])
def test_no_changed_command_line_ends_in_a_traceback(typed, holotrain, monkeypatch, seed, count):
    """Changes of valid command lines, which end where data would be read."""
    monkeypatch.setattr(multiprocess, "run_job", lambda *_: 0)
    lines = [shlex.split(line) for line in VALID]
    values = [word.partition("=")[2] for words in lines for word in words if "=" in word]
    for words in lines:
        assert holotrain(*words)[0] == 0, words
    choose, wrong = random.Random(seed), []
    for _ in range(count):
        words = changed(choose.choice(lines), values, choose)
        try:
            status, _, err = holotrain(*words)
        except BaseException as error:
            status, err = None, f"Traceback: {error!r}"
        if status not in (0, 2) or "Traceback" in err:
            wrong.append((words, err[-300:]))
    assert not wrong, "\n".join(map(str, wrong))

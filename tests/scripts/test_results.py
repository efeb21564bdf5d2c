"""What the bench scripts have saved."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest
from covering import long, slow
from torch.utils._pytree import tree_leaves

RESULTS = Path(__file__).parents[2] / "scripts/results"
ROOT = RESULTS.parents[1]
PAGES = [ROOT / "README.md", ROOT / "conf/README.md", *sorted((ROOT / "holotrain").rglob("README.md")), RESULTS / "README.md"]
DAY = r"20\d\d-\d\d-\d\d"
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
SIZES = {"50,257"} | {f"{2**power:,}" for power in range(10, 20)} | {"2.14", "2.15", "3.13"}
"""Numbers that stand in many places and are no results: sizes, and versions of torch and Python."""


def test_results_name_no_path_of_a_machine():
    files = list(RESULTS.rglob("*.json"))
    words = [(path.name, leaf) for path in files for leaf in tree_leaves(json.loads(path.read_text())) if isinstance(leaf, str)]
    assert {name for name, _ in words} == {path.name for path in files} != set()
    assert not [(name, word) for name, word in words if Path(word).is_absolute()]


def test_results_are_named_with_their_dates():
    """Each file in a README, with the day when it was measured behind it; those of one session on a GPU as their folder."""
    files = {path.relative_to(RESULTS): json.loads(path.read_text())["date"] for path in RESULTS.rglob("*.json")}
    dated = {(name.name if len(name.parts) == 1 else f"{name.parent}/", day) for name, day in files.items()}
    groups = [found for page in PAGES for found in re.findall(rf"((?:`[\w/]+(?:\.json|/)`,\s)+)({DAY})", page.read_text())]
    said = {(name, day) for names, day in groups for name in re.findall(r"`(.*?)`", names)}
    assert said == dated
    assert not set(re.findall(r"\w+\.json(?=`)", (RESULTS / "README.md").read_text())) - {name.name for name in files}


def test_what_is_saved_has_its_day_and_commit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    import bench_common

    bench_common.save({"found": 1}, tmp_path / "new.json")
    saved = json.loads((tmp_path / "new.json").read_text())
    assert saved.keys() == {"found", "date", "commit"}
    assert re.fullmatch(DAY, saved["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|None", str(saved["commit"]))  # none where there is no git


def sections(page: Path) -> dict[str, tuple[str, str]]:
    """The text of each section by its anchor: its own, and with that of the sections within it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    _, *parts = re.split(r"^(#+) (.*)\n", text, flags=re.MULTILINE)
    levels, titles, bodies = ([*map(len, parts[0::3])], parts[1::3], parts[2::3])
    found = {}
    for place, level in enumerate(levels):
        end = next((other for other in range(place + 1, len(levels)) if levels[other] <= level), len(levels))
        anchor = re.sub(r"[^\w\- ]", "", titles[place].lower()).replace(" ", "-")
        found[anchor] = bodies[place], "".join(bodies[place:end])
    return found


def figures(text: str) -> set[str]:
    """Numbers of three digits or more that look measured: 1.31, 1,604 and 229 MiB."""
    numbers = re.findall(r"(?<![\w.,^-])(\d[\d,]*\.\d+|\d[\d,]*,\d{3}|\d+ (?:MiB|ms))(?![\d.,]*\d)", CODE.sub("", text))
    return {number for number in numbers if len(re.sub(r"\D", "", number).lstrip("0")) > 2} - SIZES


def test_a_readme_says_of_when_its_figures_are():
    """A section that repeats figures of the results has a date, or links to sections with these figures and a date."""
    known = figures((RESULTS / "README.md").read_text())
    undated = {}
    for page in PAGES:
        for anchor, (own, _) in sections(page).items():
            repeated = figures(own) & known
            if len(repeated) < 3 or re.search(DAY, CODE.sub("", own)):  # one or two may be equal by chance
                continue
            for path, linked in re.findall(r"\]\(([\w./]*README\.md)#([\w-]+)\)", own):
                text = sections((page.parent / path).resolve()).get(linked, ("", ""))[1]
                repeated -= figures(text) if re.search(DAY, text) else set()
            if repeated:
                undated[f"{page.relative_to(ROOT)}#{anchor}"] = repeated
    assert len(known) > 500
    assert not undated


WAYS = ("plain", "checkpoint", "checkpoint, loss in tiles", "checkpoint in tiles", "offload in tiles", "checkpoint8 in tiles")
WAYS += ("checkpoint8 in tiles and heads",)


@pytest.mark.parametrize(
    ("page", "section", "left_out", "digits"),
    [
        ("README.md", "holotrain", ("checkpoint, loss in tiles", "offload in tiles"), 0),
        ("holotrain/reversible/README.md", "the-head-the-loss-and-mlps-tile", (), 1),
        ("scripts/results/README.md", "whole-steps", (), 1),
    ],
)
def test_the_tables_of_whole_steps_are_the_file(page, section, left_out, digits):
    plans = json.loads((RESULTS / "whole_step_cpu.json").read_text())
    each = {way: [plans[shape][way]["KiB a token"] for shape in ("gpt2", "qwen3")] for way in WAYS if way not in left_out}
    text = sections(ROOT / page)[section][0]
    rows = re.findall(r"^ *\|[^|]*\| ([\d,.]+) (?:\| [\d,]+ )?\| ([\d,.]+) \|", text, re.MULTILINE)
    assert rows[: len(each)] == [tuple(f"{plan:,.{digits}f}" for plan in both) for both in each.values()]


FIRST_PAGE = ("plan_cpu", "backward_cpu_12", "recompute_compiled_cpu", "recompute_compiled_vit_cpu")


def test_the_first_page_repeats_the_files():
    page = (ROOT / "README.md").read_text()
    plans, blocks, *runs = (json.loads((RESULTS / f"{name}.json").read_text()) for name in FIRST_PAGE)
    errors = [abs(row["error"]) for row in plans["plans"]]
    assert f"Over {len(errors)} steps" in page
    assert f"the median error was {statistics.median(errors):.2%} and the largest {max(errors):.1%}" in page
    plain, ours = (blocks["points"][0]["engines"][name] for name in ("autograd", "reversible"))
    needs = [f"{each['peak']['above_weights'] / 2**20:.0f} MiB" for each in (plain, ours)]
    assert f"plain autograd need {needs[0]} above weights and gradients. Reversible blocks need {needs[1]}" in page
    assert f"takes {ours['over_autograd']:.2f} times as long" in page
    compiled, again = (sorted(run["results"][way]["time_over_autograd"] for run in runs) for way in ("compiled", "recompute"))
    assert "{:.2f} to {:.2f} of the time of plain blocks, instead of {:.2f} to {:.2f}".format(*compiled, *again) in page


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(RESULTS.parent.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    if "def main" in script.read_text():
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(script), run_name="__main__")
        assert "usage:" in capsys.readouterr().out
    else:
        runpy.run_path(str(script), run_name="not_main")


@pytest.mark.parametrize(
    ("method", "given"),
    [
        slow("checkpoint in tiles", "tile=512"),
        slow("checkpoint8 in tiles", 'backward="checkpoint8", tile=512'),
        long("checkpoint8 in tiles and heads", 'backward="checkpoint8", tile=512, heads=1'),
    ],
)
def test_the_table_of_whole_steps_is_the_plan(method, given, monkeypatch):
    """Of GPT-2, in KiB a token."""
    monkeypatch.syspath_prepend(RESULTS.parent)
    import bench_whole_step

    text = (RESULTS.parents[1] / "holotrain/reversible/README.md").read_text()
    said = re.search(rf"\| `recompute\(model, {given}\)`[^|]*\| ([\d.]+)", text)
    assert bench_whole_step.planned("gpt2", method, 16384, "cpu", False)[1] == pytest.approx(float(said[1]), abs=0.05)

"""The figures in the benchmarks' text are those of the stored measurements, computed here.

docs/benchmarks/pipeline-4.json --> "7, 9 and 6 % less time" --> docs/benchmarks/README.md
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.benchmarks import reduction, single
from recipes.benchmarks.harness import table
from recipes.paper.overview import timelines
from tests.test_words import ROOT

FOLDER = ROOT / "docs" / "benchmarks"

Cell = dict[str, Any]


def data(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def text(page: Path = FOLDER / "README.md") -> str:
    """The page with single spaces, so that lines may break anywhere."""
    return " ".join(page.read_text(encoding="utf-8").split())


def cases(name: str, key: str = "num_microbatches") -> dict[int, dict[str, Cell]]:
    """Each case's results by label."""
    return {one["case"][key]: {result["label"]: result for result in one["results"]} for one in data(name)["cases"]}


def step(result: Cell) -> float:
    return float(result["step"]["median"])


def fastest_of_torch(results: dict[str, Cell]) -> float:
    """With the schedules that torch has; `torch hanayo-zb` is our table in torch's runtime."""
    return min(step(one) for label, one in results.items() if label.startswith("torch ") and "hanayo" not in label)


def less(part: float, digits: int = 0) -> str:
    """0.93 -> "7": percent less."""
    return f"{100 * (1 - part):.{digits}f}"


def test_our_runtime_and_our_schedules() -> None:
    four = list(cases("pipeline-4").values())
    same = [less(step(one["hanayo-zb W=2"]) / step(one["torch hanayo-zb W=2"])) for one in four]
    assert f"a step takes {same[0]}, {same[1]} and {same[2]} % less time at B = 4, 8, 16" in text()
    best = [less(step(one["hanayo-zb W=1"]) / fastest_of_torch(one), 1) for one in four]
    assert f"beats torch's fastest** by {best[0]}, {best[1]} and {best[2]} %" in text()
    waves = [f"{100 * (step(one['hanayo-zb W=2']) / step(one['hanayo-zb W=1']) - 1):.1f}" for one in four]
    assert f"W=2 takes {waves[0]}, {waves[1]} and {waves[2]} % more time" in text()
    bare = four[0]["bare hanayo-zb W=2"]
    found = f"{bare['bubble']['median']:.1%} at P = 4 and B = 4, where the ideal is {bare['ideal_bubble']:.1%}"
    assert f"it has {found.replace('%', ' %')}, and takes {step(bare) / fastest_of_torch(four[0]):.2f}" in text()


def test_other_numbers_of_ranks() -> None:
    eight, two = cases("pipeline-8"), cases("pipeline-2")[8]
    ours, torchs = ([1e3 * time(one) for one in eight.values()] for time in (_zb, fastest_of_torch))
    assert f"{ours[0]:.0f} against {torchs[0]:.0f} ms at B = 8 ({ours[0] / torchs[0]:.3f} of torch's best)" in text()
    assert f"{ours[1]:.0f} against {torchs[1]:.0f} at B = 16" in text()
    assert f"**P = 2**: {_zb(two) / fastest_of_torch(two):.2f} at B = 8" in text()


def _zb(results: dict[str, Cell]) -> float:
    return step(results["hanayo-zb W=2"])


def test_overheads() -> None:
    pages = [one for name in ("pipeline-2", "pipeline-4", "pipeline-8") for one in cases(name).values()]
    waves = [(one, f"hanayo-zb W={count}") for one in pages for count in (1, 2) if f"hanayo-zb W={count}" in one]
    ours = [(one[label]["overhead_us"] - one[f"bare {label}"]["overhead_us"]) / 1e3 for one, label in waves]
    assert f"**Our own overhead is {min(ours):.1f} to {max(ours):.1f} ms per action**" in text()
    single_f = [step(one["1f1b"]) / step(one["torch 1f1b"]) - 1 for one in pages]
    assert f"steps differ by {100 * max(map(abs, single_f)):.1f} % at most" in text()
    assert min(single_f) < 0 < max(single_f)
    two, four = (
        [round(results[label]["overhead_us"]) for label in ("hanayo-zb W=2", "torch hanayo-zb W=2")]
        for results in cases("action", "num_ranks").values()
    )
    alone = cases("action", "num_ranks")[2]["bare hanayo-zb W=2"]["overhead_us"]
    assert f"{two[0]} and {two[1]} us at P = 2, of which {alone:.0f} us" in text()
    assert f"{four[0]} and {four[1]} us at P = 4" in text()
    assert f"costs {four[0] / four[1]:.1f} to {two[0] / two[1]:.1f} of its cost in torch's runtime" in text()


def test_what_the_runtime_takes_besides_autograd() -> None:
    found = list(cases("runtime").values())
    ours, autograd, bare = ([one[f"{name}hanayo-zb W=2"] for one in found] for name in ("", "autograd ", "bare "))
    own, graphs = (
        [(one["overhead_us"] - other["overhead_us"]) / 1e3 for one, other in zip(*both, strict=True)]
        for both in ((ours, autograd), (autograd, bare))
    )
    assert f"{min(own):.1f} to {max(own):.1f} ms are the runtime's" in text()
    assert f"{min(graphs):.1f}" == f"{max(graphs):.1f}" and f"Autograd takes another {min(graphs):.1f} ms" in text()
    behind = [
        [(step(one) - step(least)) / fastest_of_torch(case) for one, least, case in zip(some, bare, found, strict=True)]
        for some in (autograd, ours)
    ]
    assert f"that loop, too, is {min(behind[0]):.2f} to {max(behind[0]):.2f} of torch's best step" in text()
    assert f"our runtime {min(behind[1]):.2f} to {max(behind[1]):.2f}" in text()


def test_steps_and_messages() -> None:
    (steps,) = cases("steps").values()
    ours, torchs = steps["hanayo-zb W=2"], steps["torch zbv"]
    assert f"a bubble of {_bubble(ours)} % per step, torch's `zbv` {_bubble(torchs)} %" in text()
    assert f"it is {100 * (step(ours) / step(torchs) - 1):.1f} % faster" in text()
    assert f"With the planned one wave ours has {_bubble(steps['hanayo-zb W=1, planned'])} %" in text()
    torchs, bare = steps["torch interleaved-zb V=4"], steps["bare hanayo-zb W=2"]
    assert f"`interleaved-zb` has {_bubble(torchs)} %; sleeps and messages alone have {_bubble(bare)} %" in text()
    for label in ("hanayo-zb W=2", "hanayo-zb W=1, planned"):
        messages = cases("messages", "message_bytes").values()
        sizes = [step(one[label]) / fastest_of_torch(one) for one in messages]
        large = f"{sizes[1]:.2f} with 1 MB and {sizes[2]:.2f} with 4 MB"
        assert f"its step is {sizes[0]:.2f} of torch's best with 64 KB, {large}" in text()


def _bubble(result: Cell) -> str:
    return f"{100 * result['bubble']['median']:.1f}"


def test_host_time() -> None:
    blocks = data("cube_host")["blocks"]
    cube, compiled = blocks["cube (2, 2, 2)"], blocks["cube (2, 2, 2), compiled"]
    to = {name: step(cube) / step(blocks[name]) for name in ("DTensor", "plain")}
    assert f"{to['DTensor']:.2f} of that of torch's own tensor-parallel block (DTensor) and {to['plain']:.2f}" in text()
    assert f"with {cube['collectives'][0]} collectives per pass" in text()
    plain = step(blocks["plain"])
    assert f"{step(compiled) / plain:.2f} of the plain block's, where the plain" in text()
    assert f"block's own is {step(blocks['plain, compiled']) / plain:.2f}" in text()


def test_gradient_reduction() -> None:
    rows = {one["label"]: one for one in data("reduction")["results"]}
    two, four, split = (rows[label] for label in ("hanayo W=2", "hanayo W=4", "hanayo-zb W=2"))
    shares = f"{100 * two['exposed']:.0f} % (W=2) and {100 * four['exposed']:.0f} % (W=4) are exposed"
    ideal = f"{100 * two['ideal']:.0f} and {100 * four['ideal']:.0f} %"
    assert f"{shares} (in simulation {ideal})" in text()
    share = f"{100 * split['at_the_end'] / split['step']:.0f} % of a step"
    assert f"exposes {100 * split['exposed']:.0f} % of the reduction with W=2** where sums take {share}" in text()
    assert f"as in its simulation ({100 * split['ideal']:.0f} %)" in text()
    ours = [one for one in data("reduction-4")["results"] if one["num_ranks"] == 4 and "zb" in one["label"]]
    found = [f"{100 * one['exposed']:.0f} %" for one in ours]
    assert "P = 4 {} (W=2) and {} (W=4) at B = 4, and {} and {} at B = 8".format(*found) in text()


def test_pairs() -> None:
    page = text(FOLDER / "pairs.md")
    eight, two = (_steady_times(case["results"]) for case in data("pairs")["cases"])
    cube, mesh, pieces, whole_x = (eight[f"3-d {name}", "F+B"] for name in ("2,2,2", "4,2,1", "4,2,1 in 4", "8,1,1"))
    cubes, apart = ([times["3-d 2,2,2 in 4", way] for times in (eight, two)] for way in ("F+B", "one by one"))
    assert f"the whole cube takes {cube:.2f} (one by one {eight['3-d 2,2,2', 'one by one']:.2f})" in page
    assert f"and {cubes[0]:.2f} in four pieces ({apart[0]:.2f}); mesh 4,2,1 takes {mesh:.2f} whole and" in page
    assert f"and {pieces:.2f} in four pieces" in page
    assert f"8,1,1 takes {whole_x:.2f}" in page
    whole = [two[f"3-d {name}", "F+B"] for name in ("2,2,2", "4,2,1", "8,1,1")]
    assert f"whole meshes take {min(whole):.2f} to {max(whole):.2f}, those in four pieces {cubes[1]:.2f}" in page
    assert f"{two['3-d 4,2,1 in 4', 'F+B']:.2f}" == f"{cubes[1]:.2f}"


def _steady_times(results: list[Cell]) -> dict[tuple[str, str], float]:
    """What a further micro-batch adds, by scheme and way, compared with the bound; with the queue if there are both."""
    return {(one["scheme"], one["way"]): (one["steps"]["8"] - one["steps"]["4"]) / 4 / one["bound"] for one in results}


def test_checkpoints() -> None:
    saves = [{save["name"]: save for save in one["saves"]} for one in data("checkpoints")["cases"]]
    loads = [{load["name"]: load for load in one["loads"]} for one in data("checkpoints")["cases"]]
    faster = [_median(one["torch"]["blocked"]) / _median(one["ours"]["blocked"]) for one in saves]
    assert f"{faster[0]:.1f} and {faster[1]:.1f} times as fast" in text()
    assert all(_median(one["ours"]["blocked"]) <= _median(one["bytes alone"]["blocked"]) for one in saves)
    verified, torchs, sizes = (
        sorted(_median(one[name]["cold"]) for one in loads) for name in ("ours, verified", "torch", "ours, sizes only")
    )
    assert f"takes {verified[0]:.1f} to {verified[1]:.1f} s for 2 GB from the disk" in text()
    assert f"which verifies none, {torchs[0]:.1f} to {torchs[1]:.1f} s" in text()
    assert f"Without hashes it takes {sizes[0]:.1f} to {sizes[1]:.1f} s" in text()


def _median(figure: Cell) -> float:
    return float(figure["median"])


def test_real_computation_and_one_process() -> None:
    results = [one for one in data("real")["real"]["results"] if one["name"] == "hanayo W=2"]
    gains = [100 * one["gain"]["median"] for one in results]
    reached = [one["gain"]["median"] / one["predicted_gain"] for one in results]
    assert f"`hanayo` W=2 needs {gains[0]:.1f} and {gains[1]:.1f} % less time than 1f1b at B = 4 and 8" in text()
    assert f"{100 * reached[0]:.0f} and {100 * reached[1]:.0f} % of the gain" in text()
    least, most = (100 * pick(one["gain"][key] for one in results) for pick, key in ((min, "least"), (max, "most")))
    assert f"from {-least:.1f} % more time to {most:.1f} % less" in text()
    (case,) = data("single")["cases"]
    assert f"**One process**: {case['ratio']['median']:.3f} of the plain Trainer's step" in text()
    assert case["equal"]


def test_memory() -> None:
    errors = [max(one["planned"]) / max(one["measured"]) - 1 for one in data("memory")["cases"]]
    assert len(errors) == 18 and max(map(abs, errors)) < 0.05
    assert "within 5 % of the measured one on all 18 layouts" in text()
    rows = [line for line in (ROOT / "docs/guides/large-models.md").read_text().splitlines() if line.endswith(" % |")]
    cut = [float(row.rsplit("|", 2)[1].strip(" %")) for row in rows if "H100 |" in row or "B200 |" in row]
    assert f"from {-min(cut)} % less to {max(cut)} % more" in text(ROOT / "README.md")


def test_the_readmes_figures() -> None:
    readme = text(ROOT / "README.md")
    steps = {
        case["tokens"]: one["of_plain"]["median"]  # of a micro-batch
        for case in data("gpu")["steps"]
        if case["kind"] == "llama"
        for one in case["candidates"]
        if one["label"] == "strategy, P=1"
    }
    few, some, many = (f"{steps[tokens]:.2f}" for tokens in (1024, 4096, 16384))
    assert f"{some} at 4,096 tokens per micro-batch, {many} at 16,384; {few} at 1,024" in readme
    four = list(cases("pipeline-4").values())
    best = [less(step(one["hanayo-zb W=1"]) / fastest_of_torch(one), 1) for one in four]
    assert f"{best[0]}, {best[1]} and {best[2]} % less time with 4, 8 and 16 micro-batches" in readme
    habits = re.search(r"(\d+) habits on (\d) layouts .*?: (.+?)\.", text(ROOT / "docs" / "supported" / "habits.md"))
    assert habits is not None
    exact, refused, depend = re.findall(r"\d+", habits[3])
    assert f"{habits[1]} coding habits on {habits[2]} layouts" in readme
    assert f"{exact} exact, {refused} rejected with advice, {depend} depend on micro-batches" in readme
    (all_faults, *_) = re.findall(r"\| \*\*all\*\* \| (.+?) \|$", (FOLDER / "faults.md").read_text(), re.MULTILINE)
    assert all_faults == "108 | 108 | 108 | 108 | 0" and "| 108 faults injected" in readme


def test_the_readmes_picture() -> None:
    idle = [f"{100 * one.bubble_ratio:.1f} %" for one in timelines()]
    assert f"pipeline is idle for {idle[0]}, waves for {idle[1]}, hanayo-zb for {idle[2]}]" in text(ROOT / "README.md")


@pytest.mark.parametrize("module, name, rows", [(single, "single", "cases"), (reduction, "reduction", "results")])
def test_a_page_has_the_rows_of_its_figures(module: Any, name: str, rows: str) -> None:
    page = (FOLDER / f"{name}.md").read_text()

    def found(name: str) -> Any:
        return json.loads((FOLDER / f"{name}.json").read_text(), object_hook=lambda one: SimpleNamespace(**one))

    stored = found(name)
    shown = list(getattr(stored, rows))
    if name == "reduction":  # a second table
        shown += [row for row in found("reduction-4").results if row.num_ranks == 4]
    made = table(module.COLUMNS, shown).splitlines()[2:]
    assert re.findall(r"^\| (?!schedule|precision).*\|$", page, re.MULTILINE) == made
    assert all(f"- {line}\n" in page for line in stored.machine)


def test_tensor_parallelism_on_emulated_hosts() -> None:
    found, page = data("tensor3d"), text(FOLDER / "tensor3d.md")
    shapes = [{one["name"]: one for one in case["results"]} for case in found["cases"]]
    names = ("3-d 2,2,2", "3-d 4,2,1", "3-d 8,1,1")
    gains = [f"{shapes[0][name]['gain']:.2f}" for name in names]
    assert f"the cube runs at {gains[0]} of 1-D's speed" in page
    assert f"4,2,1, at {gains[1]} (" in page and f"8,1,1, at {gains[2]} (" in page
    gains = [f"{shapes[2][name]['gain']:.2f}" for name in names]
    assert f"M = 8h with h = 256: {', '.join(gains)}; M = 2h: cube {shapes[1]['3-d 2,2,2']['gain']:.2f}" in page
    results = [one for case in found["cases"] for one in case["results"] if one["volume"]]
    assert all(one["moved"] == one["volume"] for one in results)
    wire = [100 * (one["on_the_wire"] / one["volume"] - 1) for one in results]
    assert f"The interfaces count {min(wire):.1f} to {max(wire):.1f} % more" in page
    small = [100 * (one["ours"] / one["ideal"] - 1) for one in found["transfers"] if one["kind"] != "all-reduce"]
    eight = small[6:9]  # 8 hosts with 2 MB; before them 2 and 4 hosts, after them 8 MB
    assert f"need {min(eight):.0f} to {max(eight):.0f} % more than the ideal" in page
    assert max({*small} - {*eight}) < 8


def test_steps_on_a_gpu() -> None:
    found = {
        (case["kind"], case["tokens"] * case["samples"], one["label"]): f"{one['of_plain']['median']:.3f}"
        for case in data("gpu")["steps"]
        for one in case["candidates"]
    }
    stage, pipe, cube = "strategy, P=1", "strategy, P=1 W=2", "3-D layers, (1,1,1)"
    block = [found["llama", 4096, f"{label}{compiled}"] for compiled in ("", ", compiled") for label in (stage, cube)]
    assert (
        f"P=1 runs at {block[0]} of the plain Trainer's speed, the 3-D layers at {block[1]}; "
        f"compiled at {block[2]} and {block[3]}." in text()
    )
    small = [
        found["llama", 1024, stage],
        found["llama", 1024, pipe],
        found["gpt", 1024, pipe],
        found["gpt", 4096, pipe],
    ]
    assert (
        f"the Llama-7B block runs at {small[0]} of the plain Trainer's speed, cut into stages by a named schedule (P=1 "
        f"W=2) at {small[1]}, and a GPT of width 2,048 so cut at {small[2]} with 1,024 tokens and {small[3]} with "
        f"4,096 (compiled {found['gpt', 4096, f'{pipe}, compiled']})" in text()
    )

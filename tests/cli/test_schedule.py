"""`hanayo schedule`: what it prints and writes, its exit codes, and one message for a mistake."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo import cli
from lightning_hanayo.cli import schedule
from lightning_hanayo.cli.schedule import SUBCOMMANDS
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.schedule import Schedule, build, schedule_names, simulate
from tests.harness import limits

Captured = pytest.CaptureFixture[str]
LARGE = ["torch", "lightning", "jsonargparse", "wandb", "matplotlib", "numpy", "rich"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(line: str) -> int:
    """Run one command line and return its exit code."""
    try:
        return cli.run(["schedule", *line.split()])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def refused(line: str, capsys: Captured) -> str:
    """The error message of a command line that fails."""
    assert run(line) == 2
    output = capsys.readouterr()
    assert output.err.startswith("hanayo: error: ")
    assert "Traceback" not in output.err
    return output.err.removeprefix("hanayo: error: ").rstrip("\n")


def printed(line: str, capsys: Captured) -> Any:
    """The JSON that a command line prints."""
    assert run(line) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("line", ["--help", *(f"{name} --help" for name in SUBCOMMANDS)])
def test_help_imports_nothing_large(line: str) -> None:
    code = f"""
import sys
from lightning_hanayo.cli import run
try:
    run({["schedule", *line.split()]!r})
except SystemExit as end:
    assert end.code == 0
print(sorted(set({LARGE}) & set(sys.modules)))
"""
    done = limits.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "usage: hanayo schedule" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_drawing_imports_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from lightning_hanayo.cli import run
assert run(["schedule", "compare", "-P", "2", "-o", "a.png", "-o", "a.html", "-o", "a.json"]) == 0
print([name for name in ("torch", "lightning") if name in sys.modules])
"""
    done = limits.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# show


def test_show_draws_in_the_terminal(capsys: Captured) -> None:
    assert run("show 1f1b -P 2 -B 2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 2 ranks, 1 stage per rank, 2 micro-batches",
        "makespan 9; bubble 33.3%; peak activations 2 M_a (rank 0); 2 messages per micro-batch",
        "",
        "rank 0  F0 F1 ......B0    ...B1",
        "rank 1  ...F0 B0    F1 B1    ......",
    ]


def test_show_breaks_lines_at_the_columns_given(capsys: Captured) -> None:
    assert run("show hanayo -P 4 -B 8 -W 2 --columns 60") == 0
    drawn = capsys.readouterr().out.partition("\n\n")[2]
    assert max(map(len, drawn.splitlines())) <= 60
    assert len(drawn.split("\n\n")) > 1


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="needs a terminal")
def test_show_has_colours_in_a_terminal() -> None:
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "100"}
    command = [sys.executable, "-m", "lightning_hanayo", "schedule", "show", "hanayo", "-P", "2"]
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=inner, env=environment) as process:
        os.close(inner)
        output = b""
        while piece := _read(outer):
            output += piece
    assert process.returncode == 0
    assert b"\x1b[38;2;28;28;28;48;2;68;132;198mF0 " in output
    assert b"backward, leg 1" in output


def _read(end: int) -> bytes:
    try:
        return os.read(end, 1 << 16)
    except OSError:  # the other end has been closed
        return b""


def test_the_suffix_chooses_the_format(capsys: Captured) -> None:
    files = ["a.png", "a.svg", "a.pdf", "a.html", "a.json"]
    assert run("show hanayo -P 2 --message 0.1 --unit ms --follow 0 " + " ".join(f"-o {file}" for file in files)) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [f"wrote {file}" for file in files]
    begins = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.pdf": b"%PDF", "a.html": b"<!DOCTYPE html>", "a.json": b"{"}
    for file, begin in begins.items():
        assert Path(file).read_bytes().startswith(begin)


@pytest.mark.parametrize("unit, factor", [("ms", 1e3), ("s", 1e6), ("", 1e3), ("us", 1.0)])
def test_a_trace_converts_the_unit_of_time(unit: str, factor: float) -> None:
    assert run(f"show gpipe -P 1 -B 1 -o a.json{f' --unit {unit}' if unit else ''}") == 0
    slices = [event for event in json.loads(Path("a.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert slices[-1]["ts"] + slices[-1]["dur"] == 3 * factor


def test_a_profile_gives_costs_and_sizes(capsys: Captured) -> None:
    measured = schedule.CostModel((0.001,) * 8, (0.002,) * 8, (0.001,) * 8, message=0.0005)
    Profile("hanayo", 2, 2, 6, (1,) * 8, measured).save("profile.json")
    shown = printed("show hanayo --costs profile.json --json", capsys)
    wave = build("hanayo", num_ranks=2, num_microbatches=6, num_waves=2, costs=measured)
    assert shown["makespan"] == pytest.approx(1e3 * simulate(wave, measured).makespan)
    free = printed("compare hanayo --costs profile.json -B 2 --message 0 --json", capsys)["schedules"][0]
    assert (free["num_microbatches"], free["makespan"]) == (2, pytest.approx(38.0))
    assert run("show hanayo --costs profile.json") == 0
    assert " ms; bubble" in capsys.readouterr().out
    assert "nowhere.json can't be read" in refused("show hanayo --costs nowhere.json", capsys)


def test_show_as_json(capsys: Captured) -> None:
    shown = printed("show hanayo -P 2 -B 3 -W 2 --message 0.1 --steps 2 --json", capsys)
    timeline = simulate(
        build("hanayo", num_ranks=2, num_microbatches=3, num_waves=2), schedule.CostModel(message=0.1), 2
    )
    assert shown["makespan"] == timeline.makespan
    assert shown["bubble_ratio"] == timeline.bubble_ratio
    assert shown["peak_activations"] == list(timeline.peak_activations)
    assert shown["step_times"] == list(timeline.step_times)
    assert (shown["num_ranks"], shown["num_stages"], shown["messages_per_microbatch"]) == (2, 8, 8)
    assert [(s["action"], s["start"]) for s in shown["spans"]] == [(str(s.action), s.start) for s in timeline.spans]


def test_costs_are_used(capsys: Captured) -> None:
    line = "show gpipe -P 2 -B 1 --forward 1,2 --backward-input 0.5 --backward-weight 0.25 --message 0.125 --json"
    assert printed(line, capsys)["makespan"] == 3 + 2 * 0.75 + 2 * 0.125


def test_message_costs_between_nodes_are_used(capsys: Captured) -> None:
    line = "show gpipe -P 4 -B 1 --message 0 --message-between-nodes 5 --ranks-per-node 2 --json"
    assert printed(line, capsys)["makespan"] == 12 + 2 * 5


def test_the_loss_stage_adds_two_messages(capsys: Captured) -> None:
    without, with_ = (printed(f"show 1f1b -P 3 --json{more}", capsys) for more in ("", " --loss-stage"))
    assert with_["num_stages"] == without["num_stages"] + 1
    assert with_["messages_per_microbatch"] == without["messages_per_microbatch"] + 2


def test_show_reads_a_table(capsys: Captured) -> None:
    build("hanayo", num_ranks=2, num_microbatches=2).to_csv("mine.csv")
    shown = printed("show mine.csv --json", capsys)
    assert (shown["schedule"], shown["stage_ranks"], shown["backward"]) == ("mine", [0, 1, 1, 0], "whole")
    assert "leave out --ranks, --waves" in refused("show mine.csv -P 2 -W 1", capsys)


@pytest.mark.parametrize(
    "line, message",
    [
        ("show hanyo", "there is no schedule 'hanyo': did you mean 'hanayo'?"),
        ("show hanayo --wave 2", "unknown option 'wave'; did you mean 'waves'?"),
        ("show hanayo 2", "unexpected: '2'"),
        ("show", "missing: NAME|FILE.csv"),
        ("show hanayo -P 0", "num_ranks must be a whole number of at least 1, got 0"),
        ("show hanayo -B 0", "num_microbatches must be a whole number of at least 1, got 0"),
        ("show hanayo -W 0", "num_waves must be a whole number of at least 1, got 0"),
        ("show hanayo -P -3", "num_ranks must be a whole number of at least 1, got -3"),
        ("show hanayo -P two", "-P/--ranks: expected a whole number, got 'two'"),
        ("show hanayo --forward 1,x", "--forward: expected a number of at least 0, got 'x'"),
        ("show hanayo --forward=-1", "--forward: expected a number of at least 0, got '-1'"),
        ("show hanayo --message nan", "--message: expected a number of at least 0, got 'nan'"),
        ("show hanayo --message inf", "--message: expected a number of at least 0, got 'inf'"),
        ("show hanayo --forward 1,2", "forward has 2 values, schedule 'hanayo' 8 stages"),
        ("show hanayo --steps 0", "steps=0, expected at least 1"),
        ("show hanayo --follow 4", "there is no micro-batch 4, micro-batches are 0 to 3"),
        ("show gpipe --activation-budget 1", "more than activation_budget=1"),
        ("show hanayo -P 1000 -B 100000", "more than 1,000,000; 166 micro-batches would do"),
        ("show interleaved -P 1000 -V 100000", "more than 1,000,000; fewer stages would do"),
        ("show hanayo -o a.gif", "a.gif is no image: its suffix must be one of png, svg, pdf"),
        ("show hanayo -o nowhere/a.png", "nowhere/a.png can't be written: No such file"),
        ("show nothing.csv", "nothing.csv can't be read"),
        ("sho", "unknown subcommand 'sho'; did you mean 'show'?"),
        ("", "a subcommand is missing"),
        ("compare 1f1c", "there is no schedule '1f1c': did you mean '1f1b'?"),
        ("compare mine.csv", "the schedule table mine.csv can't be read"),
        ("compare -P 0", "num_ranks must be a whole number of at least 1, got 0"),
        ("compare -B 0", "num_microbatches must be a whole number of at least 1, got 0"),
        ("compare -W 0", "num_waves must be a whole number of at least 1, got 0"),
        ("compare --steps 0", "steps=0, expected at least 1"),
        ("compare --activation-budget 0", "--activation-budget: expected a number above 0, got '0'"),
        ("compare zbv -W 2", "'zbv' has two stages per rank"),
        ("export gpipe a.txt", "a.txt: the name of a table must end in .csv"),
        ("export gpipe", "missing: OUT.csv"),
    ],
)
def test_mistakes_are_one_message(line: str, message: str, capsys: Captured) -> None:
    output = refused(line, capsys)
    assert message in output
    assert "\n" not in output
    assert output.count("expected") < 2
    assert output.count("must be") < 2


@pytest.mark.parametrize(
    "line", [*(f"show hanayo -o a.{kind}" for kind in ("png", "html", "json")), "export gpipe a.csv"]
)
def test_a_file_that_cannot_be_written_is_one_message(line: str, capsys: Captured) -> None:
    name = line.split()[-1]
    Path(name).mkdir()
    assert refused(line, capsys) == f"{name} can't be written: Is a directory"


def test_a_long_drawing_is_cut_with_a_note(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_LINES", 6)
    assert run("show 1f1b -P 4 -B 8 --columns 20") == 0
    *drawing, note = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[:2] for line in drawing] == [["rank", str(rank)] for rank in range(4)] + [[], ["rank", "0"]]
    assert note.startswith("... cut after 6 lines; to see all: --output schedule.png")


# compare


def test_compare_prints_a_table_of_all_schedules(capsys: Captured) -> None:
    assert run("compare -P 4 -B 8 -W 2 --activation-budget 4") == 0
    output = capsys.readouterr().out
    assert output.startswith("P = 4, W = 2, B = 8, activation budget 4 M_a\n")
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.split()}
    assert set(schedule_names()) - {"zbv", "v-half", "v-min"} <= rows.keys()
    assert rows["hanayo"] == ["hanayo", "27", "11.1%", "4", "24", "yes"]
    assert rows["hanayo-zb"] == ["hanayo-zb", "24.75", "3.0%", "4", "24", "yes"]
    assert rows["gpipe"] == ["gpipe", "33", "27.3%", "8", "6", "no"]
    assert "zbv is left out: 'zbv' has two stages per rank" in output


def test_compare_as_json(capsys: Captured) -> None:
    shown = printed("compare -P 2 -B 4 --activation-budget 2 --json gpipe hanayo", capsys)
    first, second = shown["schedules"]
    assert (first["schedule"], first["inside_budget"]) == ("hanayo", True)
    assert (second["schedule"], second["inside_budget"]) == ("gpipe", False)
    assert first["makespan"] < second["makespan"]


def test_compare_over_several_steps(capsys: Captured) -> None:
    assert run("compare -P 2 --steps 3 hanayo") == 0
    assert "last step's bubble" in capsys.readouterr().out


def test_compare_takes_tables_and_their_sizes(capsys: Captured) -> None:
    assert run("export 1f1b mine.csv -P 2 -B 6") == 0
    capsys.readouterr()
    shown = printed("compare mine.csv hanayo 1f1b --forward 2 --json", capsys)["schedules"]
    times = {one["schedule"]: one["makespan"] for one in shown}
    assert times["mine"] == times["1f1b"] > times["hanayo"]
    assert run("compare mine.csv -P 0") == 2
    assert "mine.csv is a table of 2 ranks and 6 micro-batches" in capsys.readouterr().err
    assert run("compare mine.csv") == 0
    output = capsys.readouterr().out
    assert output.startswith("P = 2, W = 1, B = 6\n") and "mine.csv" in output and "interleaved" in output


def test_compare_writes_an_image_a_page_and_a_trace(capsys: Captured) -> None:
    assert run("compare -P 2 gpipe hanayo -o a.svg -o a.html -o a.json") == 0
    assert "<!-- hanayo: makespan 8, bubble 25.0%; 2 M_a, 4 messages -->" in Path("a.svg").read_text()
    events = json.loads(Path("a.json").read_text())["traceEvents"]
    assert {"gpipe", "hanayo"} == {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert '"name":"gpipe"' in Path("a.html").read_text()


# check and export


@pytest.mark.parametrize("more", ["", " --communication"])
@pytest.mark.parametrize("name", schedule_names())
def test_an_exported_table_is_valid(name: str, more: str, capsys: Captured) -> None:
    assert run(f"export {name} mine.csv -P 4 -B 8{more}") == 0
    read, built = Schedule.from_csv("mine.csv"), build(name, num_ranks=4, num_microbatches=8)
    assert (read.actions, read.pairs) == (built.actions, built.pairs)
    capsys.readouterr()
    assert run("check mine.csv") == 0
    assert capsys.readouterr().out.startswith("mine.csv is a schedule: 4 ranks, ")


def test_export_adds_communication_to_a_table(capsys: Captured) -> None:
    Path("bare.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert printed("export bare.csv whole.csv --communication --json", capsys)["communication"] is True
    assert Path("whole.csv").read_text().splitlines()[0] == "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD"


def test_check_as_json(capsys: Captured) -> None:
    Path("good.csv").write_text("0F0,0I0,0W0\n")
    shown = printed("check good.csv --json", capsys)
    assert (shown["valid"], shown["backward"], shown["bubble_ratio"]) == (True, "split", 0.0)
    Path("bad.csv").write_text("0F0\n1F0,1B0\n")
    assert run("check bad.csv --json") == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["valid"] is False
    assert json.loads(output.out)["error"] in output.err


def test_check_compares_activations_with_the_budget(capsys: Captured) -> None:
    run("export gpipe mine.csv -P 2 -B 4")
    assert "holds 4 M_a of activations, more than --activation-budget 2" in refused(
        "check mine.csv --activation-budget 2", capsys
    )
    assert printed("check mine.csv --activation-budget 4 --json", capsys)["inside_budget"] is True
    assert run("check mine.csv --activation-budget 2 --json") == 2
    shown = json.loads(capsys.readouterr().out)
    assert (shown["valid"], shown["inside_budget"]) == (True, False)


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0B0\n1F0\n", "bad.csv, row 2, cell 1: schedule 'bad', rank 1, position 0: stage 1 has no whole backward"),
        ("0F0,,,0B0\n,,1B0,1F0\n", "bad.csv, row 2, cell 3: schedule 'bad', rank 1, position 0: these wait"),
        (
            "0F0,0SEND_F0,,0B0,0F0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            "bad.csv, row 1, cell 5: schedule 'bad', rank 0",
        ),
        ("0F0,0I0\n", "expected 0B0, or 0I0 and 0W0, got I"),
        ("0F0,0B0,1B0\n1F0\n", "both claim stage 1"),
        ("0F0,0B0\n1B0,1F0\n", "these wait for each other and can never run"),
        ("0F0,0B0,0F0\n", "0F0 appears twice on rank 0"),
        ("0F0,0X0\n", "row 1, cell 2: '0X0' is no action"),
        ("", "holds no action"),
        ("\x00\x01\x02", "no action"),
    ],
)
def test_the_error_of_an_invalid_table_names_the_cell(text: str, message: str, capsys: Captured) -> None:
    Path("bad.csv").write_text(text)
    assert message in refused("check bad.csv", capsys)


def test_a_huge_file_is_refused(capsys: Captured) -> None:
    with open("huge.csv", "wb") as file:
        file.truncate(100_000_000)
    assert "huge.csv has more than 64 MiB" in refused("check huge.csv", capsys)


def test_a_folder_is_refused(capsys: Captured) -> None:
    Path("folder.csv").mkdir()
    assert "folder.csv can't be read" in refused("check folder.csv", capsys)


def test_a_closed_pipe_is_no_error() -> None:
    line = f"{sys.executable} -m lightning_hanayo schedule show hanayo -P 8 -B 64 -W 4 | head -n 1"
    done = limits.run(line, shell=True)
    assert done.stdout.startswith("hanayo: 8 ranks")
    assert done.stderr == ""


def test_pairs(capsys: Captured) -> None:
    alone, paired, slow = (
        printed(f"show hanayo-zb -P 2 -B 8 {pairs} --json", capsys)["makespan"]
        for pairs in ("", "--pairs", "--pairs 0.2")
    )
    assert paired < slow < alone
    assert run("export hanayo-zb pairs.csv -P 2 -B 8 --pairs") == 0
    assert "OVERLAP_F_B" in Path("pairs.csv").read_text()
    capsys.readouterr()
    assert printed("show pairs.csv --pairs --json", capsys)["makespan"] == pytest.approx(paired)
    compared = printed("compare hanayo-zb 1f1b -P 2 -B 8 --pairs --json", capsys)
    assert compared["schedules"][0]["makespan"] == pytest.approx(paired)


def test_pairs_need_a_number_above_0(capsys: Captured) -> None:
    assert "--pairs: expected a number above 0, got '0'" in refused("show 1f1b --pairs 0", capsys)

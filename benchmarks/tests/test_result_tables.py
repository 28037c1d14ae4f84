"""The tables of `benchmarks/results` are those of its JSON files, by commands that exist."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from benchmarks.cli import app
from benchmarks.open import choice, library, report, stream
from benchmarks.rehearsal.run import _report
from benchmarks.speed import method_shares, waits
from benchmarks.speed.results import write_overview

RESULTS = Path(__file__).parents[1] / "results"
TABLES = {
    "choice": choice.page,
    "library": library.page,
    "methods-cpu": method_shares.page,
    "stream": stream.page,
    "waits": waits.page,
}


def read(name):
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_of_its_figures(name):
    page = TABLES[name](read(f"{name}.json"))
    assert page == (RESULTS / f"{name}.md").read_text()


def test_the_tables_of_the_open_world_are_of_its_seeds():
    seeds = [read(f"open/seed{number}.json") for number in "012"]
    paper = [read(f"open/paper{number}.json") for number in "01"]
    assert report.page(seeds, paper) == (RESULTS / "open.md").read_text()


def test_the_summary_is_of_the_speeds(tmp_path):
    copy = shutil.copytree(RESULTS, tmp_path / "results")
    write_overview(copy)
    assert (copy / "summary.md").read_text() == (RESULTS / "summary.md").read_text()


def test_the_rehearsal_is_of_its_steps():
    table = (RESULTS / "rehearsal-cpu.md").read_text()
    for line in _report(read("rehearsal-cpu.json"), "").splitlines():
        assert not line.startswith("|") or line in table


def test_commands_of_the_figures_exist():
    commands = typer.main.get_command(app).commands
    for path in RESULTS.glob("*.json"):
        _, begins, words = read(path).get("command", "").partition("python -m benchmarks ")
        if begins:
            name, *options = shlex.split(words)
            commands[name].make_context(name, options)

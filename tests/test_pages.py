"""What the pages show runs as pasted, in a folder where `make demo` ran, and what they point to exists."""

import ast
import asyncio
import json
import pkgutil
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import qtsplus
from clips import write_mp4
from qtsplus import QTSplusConfig, Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app
from qtsplus.cli.demonstration import run_demo
from qtsplus.hub.files import hub_configs
from qtsplus.model.video_qtsplus import AboutVideo
from qtsplus.video.forecast import forecast

ROOT = Path(__file__).resolve().parents[1]
HUB_FILES = ROOT / "src" / "qtsplus" / "model"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "notebook.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
RUN_AS_PASTED = (
    "CONTRIBUTING.md",
    "README.md",
    "long_videos.md",
    "notebook.md",
    "training.md",
    "use.md",
)
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Pages whose other snippets go on where the first one ends.
BEGUN_BY_THE_FIRST = {"long_videos.md", "training.md", "use.md"}
OPTIONAL = {
    "from trl": "trl",
    "torchao": "torchao",
    "BitsAndBytesConfig": "bitsandbytes",
}


def read(name: str | Path) -> str:
    """The text of a file, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The blocks of code of a page in `docs` that are in a language."""
    return [block for kind, block in BLOCK.findall(read(f"docs/{name}")) if kind == language]


def typed(*words) -> str:
    """The output of a command line."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (words, result.output)
    return result.output


def snippets():
    for page in PAGES:
        if page.name not in RUN_AS_PASTED:
            continue
        prelude = ""
        for snippet in SNIPPET.finditer(read(page)):
            before = snippet.string[: snippet.start()]
            line = before.count("\n") + 2
            code = snippet[1]
            yield pytest.param(prelude, code, id=f"{page.name}:{line}")
            if page.name in BEGUN_BY_THE_FIRST and not prelude:
                prelude = code


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    run_demo(folder / "demo")
    return folder


@pytest.mark.parametrize(("prelude", "snippet"), list(snippets()))
def test_snippets_run(prelude, snippet, after_demo, monkeypatch, capsys):
    for words, package in OPTIONAL.items():
        if words in snippet:
            pytest.importorskip(package)
    monkeypatch.chdir(after_demo)
    monkeypatch.setattr("transformers.processing_utils.logger.warning", pytest.fail)
    names: dict = {}
    exec(prelude, names)
    capsys.readouterr()
    exec(snippet, names)
    assert capsys.readouterr().out, "a snippet shows what it got"


def test_the_notebook_runs(after_demo, monkeypatch, capsys):
    monkeypatch.chdir(after_demo)
    matplotlib.use("Agg")
    notebook = json.loads(read("docs/notebook.ipynb"))
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "it is kept without outputs"
            exec("".join(cell["source"]), names)
    assert capsys.readouterr().out.startswith("ball - ")


def test_many_videos_in_order(after_demo, monkeypatch, capsys):
    monkeypatch.chdir(after_demo)
    for language, block in BLOCK.findall(read("docs/many_videos.md")):
        if language == "python":
            exec(block, {})
            assert capsys.readouterr().out, "a snippet shows what it got"
        if language == "bash":
            for line in block.splitlines():
                typed(*shlex.split(line)[1:])


def test_an_agent_gets_a_library_as_the_page_says(after_demo, monkeypatch):
    """What is typed, and what agents start, serves the four tools of the table; who calls them is the SDK's client."""
    client = pytest.importorskip("mcp").Client
    agents = pytest.importorskip("qtsplus.serve.agents")
    monkeypatch.chdir(after_demo)
    served: list = []

    def record(*shelf_and_place):
        served.append(shelf_and_place)

    monkeypatch.setattr(agents, "serve_shelf", record)
    typed_lines = "".join(blocks("agents.md", "bash"))
    for line in typed_lines.splitlines()[1:]:
        typed(*shlex.split(line)[1:])
    (settings,) = blocks("agents.md", "json")
    (server,) = json.loads(settings)["mcpServers"].values()
    assert server["command"] == "qtsplus"
    typed(*server["args"])
    (over_http, place, *_), (shelf, *stdio) = served
    assert place == ("127.0.0.1", 8765)
    assert stdio == [None]
    assert over_http.names == shelf.names

    async def moments():
        async with client(shelf) as agent:
            listed = await agent.list_tools()
            question = {"question": "What is in the yellow ring?"}
            found = await agent.call_tool("find_moments", question)
            names = [tool.name for tool in listed.tools]
            return names, found

    names, found = asyncio.run(moments())
    assert names == re.findall(r"^\| `(\w+)` \|", read("docs/agents.md"), re.MULTILINE)
    assert found.structured_content["moments"]


NUMBER = re.compile(r"(\d[\d,.]*|\bN\b)( [kMGT]?B\b| minutes\b| s\b)?")


def without_numbers(text: str) -> list[str]:
    """The lines of a text, with a sign for each number."""
    lines = [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]
    return lines


def test_the_first_page_runs_and_prints_what_it_says(after_demo, tiny_stock, monkeypatch):
    """With the tiny model in place of the 7B, and a clip that it understands in place of the video."""
    monkeypatch.chdir(after_demo)
    folder = after_demo / "videos"
    folder.mkdir()
    shutil.copyfile(after_demo / "demo" / "clip.mp4", folder / "video.mp4")
    write_mp4(folder / "night.mp4", np.zeros((16, 112, 112, 3), np.uint8), 8)
    monkeypatch.setenv("COLUMNS", "200")
    (after_demo / "stock").symlink_to(tiny_stock)
    printed: list[str] = []
    for language, block in BLOCK.findall(read("docs/start.md")):
        block = block.replace("Qwen/Qwen2.5-VL-7B-Instruct", "stock")
        block = block.replace("video.mp4", "videos/video.mp4")
        if language == "":
            assert set(without_numbers(block)) <= set(printed), printed
            continue
        block = block.replace("Who knocks at the door?", "What is in the yellow ring?")
        printed = []
        for line in block.splitlines():
            if line.startswith(("pip ", "qtsplus app", "qtsplus serve")):
                continue
            output = typed(*shlex.split(line)[1:])
            output = output.replace(str(after_demo), "/home/you")
            printed += without_numbers(output)


def test_the_first_page_says_what_a_forecast_of_a_7b_says():
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / "qtsplus-7b")
    # `convert` makes such a selector.
    config.qtsplus_config = QTSplusConfig(selection="lm_attention", reencode_layers=0)
    with torch.device("meta"):
        model = Qwen2_5_VLQTSplusForConditionalGeneration(config)
        model = model.to(torch.bfloat16)
    metadata = SimpleNamespace(frames_indices=range(600), total_num_frames=600, fps=2, duration=None)

    class Pieces(list):
        video_grid_thw = torch.tensor([[300, 40, 72]])  # of 1920 x 1080 pixels, at most 768 x 28 x 28 of them
        shape = (600, 1080, 1920)

    pieces = Pieces([None] * 53)
    pieces.about = AboutVideo(metadata)
    assert str(forecast(model, pieces)) in read("docs/start.md")


def command_lines():
    """Every `qtsplus` command line of a block of code; a synopsis, with brackets or dots, is none."""
    for page in PAGES:
        for language, block in BLOCK.findall(read(page)):
            if language not in ("", "bash", "console", "sh"):
                continue
            for name, value in re.findall(r'^(\w+)="([^"\n]*)"$', block, re.MULTILINE):
                block = block.replace(f"${name}", value)
            block = block.replace("\\\n", " ")
            for line in block.splitlines():
                is_ours = re.match(r"\s*(\w+=\S+ )*qtsplus ", line)
                is_synopsis = re.search(r"\[|\.\.\.|\|", line)
                if is_ours and not is_synopsis:
                    short = " ".join(line.split())[:70]
                    yield pytest.param(line, id=f"{page.name}: {short}")


@pytest.mark.parametrize("line", list(command_lines()))
def test_commands_are_what_the_command_line_takes(line):
    command_line, _, _ = line.partition(" > ")  # what follows is the shell's
    _, _, typed_words = command_line.partition("qtsplus ")
    words = shlex.split(typed_words, comments=True)
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    values, rest, _ = command.make_parser(command.context_class(command)).parse_args(words)
    assert not rest, f"{rest} is more than the command takes"
    if "--help" in words:
        return
    for parameter in command.params:
        if parameter.required:
            assert values.get(parameter.name) is not None, f"the command needs {parameter.name}"


def test_there_are_snippets():
    lines = list(command_lines())
    assert len(lines) > 20
    pages = {parameters.id.partition(":")[0] for parameters in snippets()}
    assert pages == set(RUN_AS_PASTED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_it_names_exist(page):
    text = read(page)
    for path in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / path).exists(), path
    for path in re.findall(r"`((?:tests|docs|src|hub_configs|recipes|benchmarks)/[^`\s:*<]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(\w+_qtsplus(?:_\w+)?\.py)`", text):
        assert (HUB_FILES / path).exists(), path


def test_the_reference_has_all_that_the_package_gives():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    described = []
    for page in pages:
        names = re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)
        described += map(pkgutil.resolve_name, names)
    for name in qtsplus.__all__:
        if name == "__version__":
            continue
        given = getattr(qtsplus, name)
        module = sys.modules[given.__module__]
        assert given in described or module in described, name


MAPS = [("docs/design.md", "## The package"), ("CONTRIBUTING.md", "## Where is it decided?")]
PLACE = re.compile(r"`([\w/]+/[\w.]*)`(?: \(([^)]*)\))?")  # a path in the package, and names in that file


@pytest.mark.parametrize("page, heading", MAPS)
def test_the_maps_of_the_package_name_what_is_there(page, heading):
    section = read(page).partition(heading)[2].partition("\n## ")[0]
    table = section[section.index("\n|") : section.rindex("|\n")]
    places = PLACE.findall(table)
    assert len(places) > 10
    for path, names in places:
        place = ROOT / "src" / "qtsplus" / path
        assert place.exists(), path
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", read(place)), f"{name} of {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_it_names_exist(page):
    for file, name in re.findall(r"`(tests/\S+\.py)::(\w+)`", read(page)):
        definition = rf"^\s*(def|class) {name}\b"
        assert re.search(definition, read(file), re.MULTILINE), name


@cache
def texts_of(folder: str, files: str) -> list[str]:
    """The texts in Python files, without line breaks; of a text with values in it what stands between these."""
    texts = []
    for path in (ROOT / folder).rglob(files):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(" ".join(node.value.split()))
    return texts


def quoted_messages() -> list[str]:
    """The messages of which the page on troubleshooting says what to do."""
    quotes = re.findall(r'"([^"\n]+)"', read("docs/troubleshooting.md"))
    return [quote for quote in quotes if " " in quote]


@pytest.mark.parametrize("message", quoted_messages())
def test_messages_that_it_explains_are_the_products(message):
    """Part by part around the dots, and a test has seen that one of the parts is said."""
    stripped = [part.strip(" ,") for part in message.split("...")]
    parts = [part for part in stripped if part]
    of_product = "\n".join(texts_of("src", "*.py"))
    of_tests = "\n".join(texts_of("tests", "test_*.py"))
    for part in parts:
        assert part in of_product
    assert any(part in of_tests for part in parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_it_names_exist(page):
    makefile = read("Makefile")
    code = re.findall(r"`([^`\n]+)`|^    ?([^\n]+)$|^(make [^\n]+)$", read(page), re.MULTILINE)
    text = "\n".join("".join(groups) for groups in code)
    for target in re.findall(r"(?<!benchmarks )\bmake ([a-z][a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

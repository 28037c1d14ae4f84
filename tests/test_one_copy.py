"""Where the package is installed its own classes load every folder, and no Hub file is in memory twice."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.hub import loading
from qtsplus.model.fields_qtsplus import VERSION

COMMANDS = """
import gc, json, sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typer.testing import CliRunner
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor
from qtsplus import load
from qtsplus.cli import app

folder, model, video = sys.argv[1:]
for trust in (True, None):
    for kind in (AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor):
        assert type(kind.from_pretrained(model, trust_remote_code=trust)).__module__.startswith("qtsplus."), kind
record = {"video": video, "question": "What moves?", "answer": "ball", "kind": "mark"}
record["evidence"] = [[{"start": 0, "end": 2, "box": [0.2, 0.2, 0.6, 0.6]}]]
records = [record, {**record, "video": f"{folder}/model/other.mp4"}]
Path(folder, "records.jsonl").write_text("\\n".join(map(json.dumps, records)))
data = f"data: {{train_files: [{folder}/records.jsonl], processor_kwargs: {{fps: 1}}}}"
training = f"{{output_dir: {folder}/run, max_steps: 1, use_cpu: true, save_strategy: 'no', report_to: none}}"
Path(folder, "recipe.yaml").write_text(f"model: {{weights: {model}}}\\n{data}\\ntraining: {training}\\n")
named = ["--model", model, "--max-new-tokens", "2"]
for line, text in (
    (["ask", video, "What moves?", *named], None),
    (["index", folder, "--out", f"{folder}/library", "--model", model], None),
    (["find", f"{folder}/library", "What moves?", "--moments", "3", "--model", model], None),
    (["ask", f"{folder}/library", "What moves?", *named], None),
    (["chat", video, *named], "What moves?\\nAnd then?\\n"),
    (["watch", video, "What moves?", *named, "--every", "2"], None),
    (["batch", f"{folder}/records.jsonl", "--out", f"{folder}/answers.jsonl", *named], None),
    (["eval", f"{folder}/records.jsonl", "--model", model], None),
    (["calibrate", model, f"{folder}/records.jsonl"], None),
    (["train", f"{folder}/recipe.yaml", "--dry-run"], None),
    (["train", f"{folder}/recipe.yaml"], None),
    (["ask", video, "What moves?", "--model", f"{folder}/run", "--max-new-tokens", "2"], None),
    (["publish", f"{folder}/run", "--to", f"{folder}/published"], None),
):
    result = CliRunner().invoke(app, line, input=text)
    assert result.exit_code == 0, (line, result.output, result.exception)
    if line[0] == "publish" and find_spec("gradio"):
        from qtsplus import app as page
        page.build_page(*load(model), [])
    assert not [name for name in sys.modules if name.startswith("transformers_modules.")], line
    files = Counter(Path(file).name for file in {name: getattr(one, "__file__", None) or "" for name, one in
                    sys.modules.items() if "_qtsplus" in name}.values())
    classes = Counter((str(one.__module__).rpartition(".")[2], one.__qualname__) for one in gc.get_objects()
                      if issubclass(type(one), type) and "_qtsplus" in str(one.__module__))
    twice = [one for counter in (files, classes) for one, count in counter.items() if count > 1]
    assert len(files) > 10 and not twice, (line, twice)
"""


def run_python(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_after_auto_classes_and_every_command_no_hub_file_is_in_memory_twice(tiny_published, tiny_mp4, tmp_path):
    model = shutil.copytree(tiny_published, tmp_path / "model")
    video = shutil.copy(tiny_mp4, tmp_path)
    shutil.copy(tiny_mp4, model / "other.mp4")
    result = run_python(COMMANDS, tmp_path, model, video)
    assert result.returncode == 0, result.stderr[-3000:]


HOSTILE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
raise SystemExit("the folder's code ran")
"""


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


AUTO_CLASSES = ("Config", "Model", "ModelForImageTextToText", "Processor", "ImageProcessor", "VideoProcessor")


EVIL_CLASSES = {f"Auto{kind}": "evil.Evil" for kind in AUTO_CLASSES}


EVIL = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]} | EVIL_CLASSES}


def write_hostile_code(folder):
    (folder / "custom_generate").mkdir(exist_ok=True)
    files = list(folder.glob("*.py"))
    files.append(folder / "evil.py")
    files.append(folder / "custom_generate" / "generate.py")
    for file in files:
        file.write_text(HOSTILE)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json", "generate.py"])
def test_no_code_of_a_folder_runs(tiny_published, tiny_mp4, tmp_path, name):
    """Whichever of its files names the code."""
    folder = shutil.copytree(tiny_published, tmp_path / "model")
    write_hostile_code(folder)
    file = folder / name
    if file.suffix == ".json":
        fields = json.loads(file.read_text())
        for part in ("image_processor", "video_processor"):
            if part in fields:
                fields[part] |= EVIL
        file.write_text(json.dumps(fields | EVIL))
    line = ["ask", str(tiny_mp4), "What?", "--model", str(folder), "--max-new-tokens", "1"]
    result = CliRunner().invoke(app, line)
    if result.exit_code != 0:
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("qtsplus: "), result.output
    assert not list(tmp_path.rglob("ran"))


def test_the_package_and_its_help_need_no_torch():
    script = """
import sys, qtsplus
from typer.testing import CliRunner
from qtsplus.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert not {"torch", "transformers"} & {*sys.modules}
"""
    assert run_python(script).returncode == 0


def test_what_a_user_needs_stands_at_the_top():
    from qtsplus import Library, Stream, VideoSession, ask, encode, load

    rooms = [one.__module__.split(".")[1] for one in (Library, Stream, VideoSession, ask, encode, load)]
    assert rooms == ["library", "live", "asking", "asking", "video", "hub"]


# The version that wrote a folder --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_published, tmp_path):
    return shutil.copytree(tiny_published, tmp_path / "model")


def stored(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_folder_says_which_version_wrote_it(folder, tmp_path):
    assert stored(folder)["qtsplus_version"] == VERSION
    change(folder / "config.json", qtsplus_version="0.0.1")
    model, processor = loading.load(folder)
    model.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again")["qtsplus_version"] == VERSION


def test_a_folder_of_no_version_and_of_an_older_one_load(folder):
    loading.load(folder)
    for version in (None, "0.0.1"):
        change(folder / "config.json", qtsplus_version=version)
        loading.load(folder)


def test_a_field_of_a_later_version_is_refused(folder, tiny_mp4):
    fields = {**stored(folder)["qtsplus_config"], "patience": 3}
    change(folder / "config.json", qtsplus_version="99.1", qtsplus_config=fields)
    result = CliRunner().invoke(app, ["ask", str(tiny_mp4), "What?", "--model", str(folder)])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2
    assert "no field 'patience'" in line
    assert "install that version" in line


def test_the_package_and_the_hub_files_are_of_one_version():
    import qtsplus

    assert qtsplus.__version__ == VERSION

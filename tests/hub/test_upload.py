"""Uploads against a real HTTP server: one commit or none, again from where it stopped, and every way in the same."""

import json
import os
import subprocess
import sys

import huggingface_hub.constants
import pytest
import transformers.utils.hub
from safetensors.torch import load
from typer.testing import CliRunner

from loopback import loopback_hub
from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app
from qtsplus.generation_qtsplus import auto_map, code_of
from qtsplus.hub.folder import WRITTEN
from qtsplus.loading import processor_of
from qtsplus.training import QTSplusTrainer, QTSplusTrainingArguments

REPOSITORY = "lab/QTSplus-tiny"


@pytest.fixture
def hub(monkeypatch):
    with loopback_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # remembers its address
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_loopback")
        yield hub


def publish(folder, *arguments):
    return CliRunner().invoke(app, ["publish", str(folder), "--repo", REPOSITORY, *arguments])


def assert_refused(result, *words):
    assert result.exit_code == 2, result.output
    error = result.stderr.strip().splitlines()[-1]
    for word in ("qtsplus: ", *words):
        assert word in error


def without_dtype(values):
    return {name: value for name, value in values.items() if name != "dtype"}


def assert_same_file(name, mine, theirs):
    if name.endswith("config.json"):
        # A loaded model notes its dtype in every part of its configuration.
        mine, theirs = (json.loads(content, object_hook=without_dtype) for content in (mine, theirs))
        if name == "tokenizer_config.json":  # Transformers notes how it was loaded
            for noted in ("is_local", "local_files_only"):
                mine.pop(noted, None)
    if name.endswith(".safetensors"):
        mine, theirs = ({key: tensor.tolist() for key, tensor in load(content).items()} for content in (mine, theirs))
    assert mine == theirs, name


def test_publish_uploads_a_repository_in_one_commit(hub, tiny_published):
    result = publish(tiny_published, "--private")
    assert result.exit_code == 0, result.output
    assert f"{hub.url}/{REPOSITORY}/commit/" in result.stdout
    files = hub.repositories[REPOSITORY]
    assert hub.commits == 1 and hub.private[REPOSITORY]
    assert files.keys() == {path.name for path in tiny_published.iterdir()} - {WRITTEN}
    for name in files.keys() - {"README.md"}:
        assert_same_file(name, files[name], (tiny_published / name).read_bytes())
    assert f'repository = "{REPOSITORY}"'.encode() in files["README.md"]


def test_errors_that_pass_are_survived(hub, tiny_published):
    hub.fail = {"preupload": [503], "batch": [502], "put": [500]}
    assert publish(tiny_published).exit_code == 0
    assert hub.commits == 1 and "model.safetensors" in hub.repositories[REPOSITORY]


@pytest.mark.parametrize("fail", [{"put": [200, 403]}, {"commit": [500]}, {"preupload": [401]}])
def test_a_server_that_fails_halfway_leaves_the_repository_as_it_was(hub, fail, tiny_published):
    hub.fail = fail
    assert_refused(publish(tiny_published), "did not finish", REPOSITORY, "Run it again")
    assert hub.repositories[REPOSITORY] == {} and hub.commits == 0
    sent = set(hub.objects)
    hub.calls.clear()
    assert publish(tiny_published).exit_code == 0
    assert hub.commits == 1 and "config.json" in hub.repositories[REPOSITORY]
    again = {call.rpartition("/")[2] for call in hub.calls if call.startswith("put")}
    assert not sent & again, "what was uploaded is not sent twice"
    assert "preupload" in fail or sent


def test_what_an_earlier_upload_left_goes_in_the_same_commit(hub, tiny_published):
    left = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}", "old_qtsplus.py": b""}
    hub.repositories[REPOSITORY] = {**left, "notes.md": b"mine", "runs/model.safetensors": b""}
    result = publish(tiny_published)
    assert result.exit_code == 0 and "model.safetensors.index.json" in result.stderr
    files = hub.repositories[REPOSITORY]
    assert not left.keys() & files.keys() and {"notes.md", "runs/model.safetensors"} < files.keys()
    assert hub.commits == 1


def test_a_public_repository_is_not_taken_for_a_private_one(hub, tiny_published):
    hub.repositories[REPOSITORY], hub.private[REPOSITORY] = {}, False
    assert_refused(publish(tiny_published, "--private"), "public", "--private")
    assert hub.repositories[REPOSITORY] == {}


def test_a_hub_that_is_not_there_is_one_line(hub, tiny_published, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert_refused(publish(tiny_published), "did not finish")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_refused(publish(tiny_published), "offline")


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_a_model_and_its_processor_push_what_publish_does(hub, tiny_published, way):
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tiny_published)
    if way == "push_to_hub":
        model.push_to_hub(REPOSITORY, private=True)
    else:
        folder = tiny_published.parent / "saved"
        model.save_pretrained(folder, push_to_hub=True, repo_id=REPOSITORY, private=True)
    assert hub.private[REPOSITORY]
    processor_of(tiny_published, model.config).push_to_hub(REPOSITORY)
    pushed = dict(hub.repositories[REPOSITORY])
    assert publish(tiny_published).exit_code == 0
    published = hub.repositories[REPOSITORY]
    for name in published.keys() - {"README.md", "processor_config.json", "tokenizer_config.json"}:
        assert_same_file(name, pushed[name], published[name])


def test_the_trainer_pushes_the_same_repository(hub, tiny_published, tiny_processor, tmp_path):
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tiny_published)
    args = QTSplusTrainingArguments(
        str(tmp_path / "run"), push_to_hub=True, hub_model_id=REPOSITORY, use_cpu=True, report_to=[]
    )
    QTSplusTrainer(model, args, processing_class=tiny_processor).push_to_hub()
    pushed = hub.repositories[REPOSITORY]
    own = {"training_args.bin"}
    assert pushed.keys() - own == {path.name for path in tiny_published.iterdir()} - {WRITTEN}
    for name in pushed.keys() - own - {"README.md", "config.json", "model.safetensors"}:
        assert_same_file(name, pushed[name], (tiny_published / name).read_bytes())
    assert json.loads(pushed["config.json"])["auto_map"] == auto_map(Qwen2_5_VLQTSplusForConditionalGeneration)
    assert f'repository = "{REPOSITORY}"' in pushed["README.md"].decode()


def test_save_pretrained_brings_the_code(tiny_published, tmp_path):
    Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tiny_published).save_pretrained(tmp_path)
    saved = {path.name for path in tmp_path.glob("*.py")}
    assert saved == {path.name for path in code_of("qtsplus.modeling_qtsplus")}
    assert not saved & {"processing_qtsplus.py", "video_qtsplus.py", "decoding_qtsplus.py"}
    auto_map = json.loads((tiny_published / "config.json").read_text())["auto_map"]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == auto_map


def test_the_command_as_a_user_runs_it(tiny_published):
    with loopback_hub() as hub:
        result = subprocess.run(
            [sys.executable, "-m", "qtsplus.cli", "publish", str(tiny_published), "--repo", REPOSITORY],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                **{"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
            },
        )
        assert result.returncode == 0, result.stderr
        assert "%" not in result.stderr, "bars are drawn on terminals alone"
        assert hub.repositories[REPOSITORY].keys() == {path.name for path in tiny_published.iterdir()} - {WRITTEN}

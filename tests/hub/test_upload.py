"""Uploads against a real HTTP server: what is published arrives in one commit, and every way pushes the same."""

import json

import huggingface_hub.constants
import pytest
import transformers.utils.hub
from huggingface_hub import HfApi
from safetensors.torch import load
from typer.testing import CliRunner

from loopback import loopback_hub
from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app
from qtsplus.common.folders import WRITTEN
from qtsplus.hub.loading import processor_of
from qtsplus.model.generation_qtsplus import auto_map, code_of
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


def publish(folder, out):
    """As the page says: assembled by us, uploaded by `hf`."""
    result = CliRunner().invoke(app, ["publish", str(folder), "--to", str(out), "--repo", REPOSITORY])
    assert result.exit_code == 0, result.output
    HfApi(token="hf_x").upload_folder(
        repo_id=REPOSITORY, folder_path=out, ignore_patterns=[".*"], delete_patterns=["*.safetensors*", "*_qtsplus*.py"]
    )


def without_dtype(values):
    return {name: value for name, value in values.items() if name != "dtype"}


def assert_same_file(name, mine, theirs):
    if name.endswith("config.json"):
        # A loaded model notes its dtype in every part of its configuration.
        mine, theirs = (json.loads(content, object_hook=without_dtype) for content in (mine, theirs))
        if name == "tokenizer_config.json":  # Transformers notes how it was loaded
            for noted in ("is_local", "local_files_only"):
                mine.pop(noted, None)
                theirs.pop(noted, None)
    if name.endswith(".safetensors"):
        mine, theirs = ({key: tensor.tolist() for key, tensor in load(content).items()} for content in (mine, theirs))
    assert mine == theirs, name


def test_what_is_published_arrives_and_replaces_an_earlier_upload(hub, tiny_published, tmp_path):
    left = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}", "old_qtsplus.py": b""}
    hub.repositories[REPOSITORY] = {**left, "notes.md": b"mine"}
    publish(tiny_published, tmp_path / "out")
    files = hub.repositories[REPOSITORY]
    names = {path.name for path in tiny_published.iterdir()} - {WRITTEN}
    assert hub.commits == 1 and files.keys() == names | {"notes.md"}
    for name in files.keys() - {"README.md", "notes.md"}:
        assert_same_file(name, files[name], (tiny_published / name).read_bytes())
    assert f'repository = "{REPOSITORY}"'.encode() in files["README.md"]


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_a_model_and_its_processor_push_what_publish_does(hub, tiny_published, tmp_path, way):
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tiny_published)
    if way == "push_to_hub":
        model.push_to_hub(REPOSITORY, private=True)
    else:
        model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id=REPOSITORY, private=True)
    assert hub.private[REPOSITORY]
    processor_of(tiny_published, model.config).push_to_hub(REPOSITORY)
    pushed = dict(hub.repositories[REPOSITORY])
    publish(tiny_published, tmp_path / "out")
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


def test_save_pretrained_brings_the_code(tiny_published, tmp_path):
    Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tiny_published).save_pretrained(tmp_path)
    saved = {path.name for path in tmp_path.glob("*.py")}
    assert saved == {path.name for path in code_of("qtsplus.model.modeling_qtsplus")}
    assert not saved & {"processing_qtsplus.py", "video_qtsplus.py", "decoding_qtsplus.py"}
    auto_map = json.loads((tiny_published / "config.json").read_text())["auto_map"]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == auto_map

"""Stock models get a selector, whatever the backbone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from qtsplus.hub.convert import convert
from qtsplus.training.models import make_model, make_processor


@pytest.fixture(scope="module")
def saved(backbone, processor, stock, tmp_path_factory):
    """The stock model with the processor, as Transformers saves them."""
    folder = tmp_path_factory.mktemp("stock")
    stock.save_pretrained(folder, save_original_format=False)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(saved, tmp_path_factory):
    options = {"selector": {"selection": "all", "reencode_layers": 0}}
    return convert(saved, tmp_path_factory.mktemp("converted") / "hub", **options)


def test_a_stock_model_gets_a_selector(backbone, stock, converted, prepare):
    model = backbone.model.from_pretrained(converted)
    # A tiny LLaVA-Video is saved as a LLaVA-OneVision, which is what it is apart from its newlines.
    model.config.video_newline = getattr(backbone.processor(), "video_newline", None)
    inputs = prepare("video")
    with torch.no_grad():
        expected = stock(**backbone.stock_inputs(model, inputs)).logits
        assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_frames_of_a_film_have_a_largest_size(backbone, saved, tmp_path):
    """Qwen3-VL's own processor leaves it open, and a short clip then costs as many tokens as a long one."""
    if backbone.name not in ("qwen3_vl", "qwen3_5"):
        pytest.skip("its processor sizes frames otherwise")
    shutil.copytree(saved, tmp_path / "open")
    file = tmp_path / "open" / "processor_config.json"
    content = json.loads(file.read_text())
    content["video_processor"].pop("cap_pixels_per_frame", None)
    file.write_text(json.dumps(content))
    made = json.loads((convert(tmp_path / "open", tmp_path / "hub") / "processor_config.json").read_text())
    assert made["video_processor"]["cap_pixels_per_frame"] is True


def _older(name):
    """What InternVL and LLaVA-OneVision called a weight before Transformers 4.52."""
    for new, old in (("lm_head.", "language_model.lm_head."), ("model.language_model.", "language_model.model.")):
        name = old + name.removeprefix(new) if name.startswith(new) else name
    return name.removeprefix("model.")


def test_the_names_of_older_checkpoints(backbone, saved, tmp_path):
    if backbone.name not in ("internvl", "llava_onevision"):
        pytest.skip("its checkpoints have other names")
    for path in saved.iterdir():
        if path.suffix == ".safetensors":
            renamed = {_older(name): tensor for name, tensor in load_file(path).items()}
            assert any(name.startswith("language_model.model.") for name in renamed)
            save_file(renamed, tmp_path / path.name, metadata={"format": "pt"})
        else:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    model = backbone.model.from_pretrained(convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-hub"))
    expected = load_file(saved / "model.safetensors")
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_weights_that_the_stock_model_leaves_out_are_left_out(backbone, saved, tmp_path):
    if backbone.name != "qwen3_5":
        pytest.skip("its checkpoints hold what it loads")
    copy = shutil.copytree(saved, tmp_path / "with_mtp")
    (path,) = copy.glob("*.safetensors")
    save_file({**load_file(path), "mtp.norm.weight": torch.ones(64)}, path, metadata={"format": "pt"})
    model = backbone.model.from_pretrained(convert(copy, tmp_path / "hub"))
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_file(saved / path.name).items())


def test_training_starts_from_a_stock_model(backbone, saved, prepare):
    """As a recipe names it: the stock model's weights with a fresh selector, and a processor that fits."""
    model = make_model(None, str(saved), {"rho_max": 0.25}, dtype="float32")
    assert isinstance(model, backbone.model)
    assert model.config.qtsplus_config.rho_max == 0.25
    processor = make_processor(None, str(saved), model.config)
    assert isinstance(processor, type(backbone.processor()))
    assert torch.isfinite(model(**prepare("text")).logits).all()


def test_a_format_that_is_not_known_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qts_plus_internvl2_5_causal_lm"}')
    with pytest.raises(ValueError, match="a reference QTSplus on Qwen2.5-VL"):
        convert(tmp_path, tmp_path / "out")

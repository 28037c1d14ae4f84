"""Stock models get a selector, whatever the backbone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from qtsplus.hub.convert import convert
from qtsplus.training.models import make_model, make_processor
from tiny import assert_same, run


@pytest.fixture(scope="module")
def saved(backbone, processor, stock, tmp_path_factory):
    """The stock model with the processor, as Transformers saves them."""
    folder = tmp_path_factory.mktemp("stock")
    stock.save_pretrained(folder, save_original_format=False)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """The same, which a test may change."""
    return shutil.copytree(saved, tmp_path / "copied")


def converted(backbone, source, **options):
    """The model of the converted folder."""
    return backbone.model.from_pretrained(convert(source, source.with_name("hub"), **options))


def check_weights(model, saved):
    """The stock model's are the model's."""
    expected = load_file(saved / "model.safetensors")
    weights = model.state_dict()
    assert_same({name: weights[name] for name in expected}, expected)


def test_a_stock_model_gets_a_selector(backbone, stock, copied, prepare):
    model = converted(backbone, copied, selector={"selection": "all", "reencode_layers": 0})
    # A tiny LLaVA-Video is saved as a LLaVA-OneVision, which is what it is apart from its newlines.
    model.config.video_newline = getattr(backbone.processor(), "video_newline", None)
    inputs = prepare("video")
    expected = run(stock, backbone.stock_inputs(model, inputs)).logits
    assert_close(run(model, inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_frames_of_a_video_have_a_largest_size(backbone, copied, tmp_path):
    """Qwen3-VL's own processor leaves it open, and a short clip then costs as many tokens as a long one."""
    if backbone.name not in ("qwen3_vl", "qwen3_5"):
        pytest.skip("its processor sizes frames otherwise")
    file = copied / "processor_config.json"
    content = json.loads(file.read_text())
    content["video_processor"].pop("cap_pixels_per_frame", None)
    file.write_text(json.dumps(content))
    folder = convert(copied, tmp_path / "hub")
    made = json.loads((folder / "processor_config.json").read_text())
    assert made["video_processor"]["cap_pixels_per_frame"] is True


def older(name):
    """What InternVL and LLaVA-OneVision called a weight before Transformers 4.52."""
    if name.startswith("lm_head."):
        return "language_model." + name
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return name.removeprefix("model.")


def test_the_names_of_older_checkpoints(backbone, saved, copied):
    if backbone.name not in ("internvl", "llava_onevision"):
        pytest.skip("its checkpoints have other names")
    weights = load_file(saved / "model.safetensors")
    renamed = {older(name): weight for name, weight in weights.items()}
    assert any(name.startswith("language_model.model.") for name in renamed)
    save_file(renamed, copied / "model.safetensors", metadata={"format": "pt"})
    check_weights(converted(backbone, copied), saved)


def test_weights_that_the_stock_model_leaves_out_are_left_out(backbone, saved, copied):
    if backbone.name != "qwen3_5":
        pytest.skip("its checkpoints hold what it loads")
    weights = load_file(saved / "model.safetensors")
    weights["mtp.norm.weight"] = torch.ones(64)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    check_weights(converted(backbone, copied), saved)


def test_training_starts_from_a_stock_model(backbone, saved, prepare):
    """As a recipe names it: the stock model's weights with a fresh selector, and a processor that fits."""
    model = make_model(None, str(saved), {"rho_max": 0.25}, dtype="float32")
    assert isinstance(model, backbone.model)
    assert model.config.qtsplus_config.rho_max == 0.25
    processor = make_processor(None, str(saved), model.config)
    assert isinstance(processor, type(backbone.processor()))
    assert torch.isfinite(run(model, prepare("text")).logits).all()


def test_a_format_that_is_not_known_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qts_plus_internvl2_5_causal_lm"}')
    with pytest.raises(ValueError, match="a reference QTSplus on Qwen2.5-VL"):
        convert(tmp_path, tmp_path.with_suffix(".out"))

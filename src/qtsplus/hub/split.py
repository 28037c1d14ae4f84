"""`qtsplus split`: the paper's decomposition into a vision head and a language model, each a checkpoint of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from ..configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from ..modeling_qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from .checkpoint import StoredTensor, write_checkpoint
from .folder import read_json, whole_folder
from .saved import load_config, load_generation_config, load_processor
from .weights import SELECTOR, read_weights

VISION_HEAD, LANGUAGE_MODEL, SELECTOR_FOLDER = "vision_head", "language_model", "selector"
_VISUAL = "model.visual."


def split(
    model: str | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """
    Writes the parts of a QTSplus model to folders of their own, and compares them with the whole before they appear.

    - `vision_head`: the vision encoder with its merger, a stock `qwen2_5_vl_vision`.
    - `language_model`: a stock `qwen2`, for `AutoModelForCausalLM`. What it lacks of Qwen2.5-VL's is positions with
      three axes; `Qwen2_5_VLTextModel` loads the same folder and has them.
    - `selector`: what stands between the two, so that the three together are the whole. Transformers has no class for
      it; `QTSplusSelector` takes its weights.

    Args:
        model: a folder with one of our models.
        out: the folder for the three; beside the model's, with "-split" behind its name, when absent.
        overwrite: write also into a folder that holds other files.
        say: takes a line with what was compared.

    Returns:
        the three folders.

    Raises:
        ValueError: another kind of model, weights that do not fit, or a part that does not compute what the whole does.
    """
    source = Path(model).resolve()
    if not source.is_dir():
        raise ValueError(f"There is no folder {model}.")
    model_type = read_json(source / "config.json").get("model_type")
    if model_type != Qwen2_5_VLQTSplusConfig.model_type:
        raise ValueError(
            f"{source} holds a model of type {model_type!r}; expected {Qwen2_5_VLQTSplusConfig.model_type!r}, which "
            "qtsplus convert makes."
        )
    out = source.with_name(source.name + "-split") if out is None else Path(out).resolve()
    if out == source:
        raise ValueError(f"{out} is the model itself; choose another folder to write to.")
    config = load_config(source)
    tensors = read_weights(source, config)
    parts = [VISION_HEAD, LANGUAGE_MODEL, SELECTOR_FOLDER]
    with whole_folder(out, overwrite, own=tuple(parts)) as staging:
        for part in parts:
            (staging / part).mkdir()
        _write_vision_head(config, tensors, staging / VISION_HEAD)
        _write_language_model(config, tensors, source, staging / LANGUAGE_MODEL)
        _write_selector(config, tensors, staging / SELECTOR_FOLDER)
        if (source / "processor_config.json").exists():
            processor: Any = load_processor(source, config)
            processor.image_processor.save_pretrained(staging / VISION_HEAD)
            processor.video_processor.save_pretrained(staging / VISION_HEAD)
            processor.tokenizer.save_pretrained(staging / LANGUAGE_MODEL)
        _compare(source, staging, say)
    return [out / part for part in parts]


def _write_vision_head(config: Any, tensors: dict[str, StoredTensor], folder: Path) -> None:
    write_checkpoint(_part(tensors, _VISUAL, ""), folder)
    vision = Qwen2_5_VLVisionConfig(**_plain(config.vision_config))
    vision.architectures = ["Qwen2_5_VisionTransformerPretrainedModel"]
    vision.dtype = config.dtype
    vision.save_pretrained(folder)


def _write_language_model(config: Any, tensors: dict[str, StoredTensor], source: Path, folder: Path) -> None:
    weights = _part(tensors, "model.language_model.", "model.")
    weights.update({name: tensor for name, tensor in tensors.items() if name.startswith("lm_head.")})
    write_checkpoint(weights, folder)
    language_model = Qwen2Config(**_plain(config.text_config), tie_word_embeddings=config.tie_word_embeddings)
    language_model.architectures = ["Qwen2ForCausalLM"]
    language_model.dtype = config.dtype
    language_model.save_pretrained(folder)
    generation_config = load_generation_config(source)
    if generation_config is not None:
        generation_config.save_pretrained(folder)


def _write_selector(config: Any, tensors: dict[str, StoredTensor], folder: Path) -> None:
    write_checkpoint(_part(tensors, SELECTOR, ""), folder)
    config.qtsplus_config.save_pretrained(folder)


def _part(tensors: dict[str, StoredTensor], prefix: str, replacement: str) -> dict[str, StoredTensor]:
    return {
        replacement + name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
    }


def _plain(config: Any) -> dict[str, Any]:
    """The settings of a part's configuration, without what says of which model it is."""
    dropped = {"model_type", "architectures", "transformers_version", "dtype", "tie_word_embeddings", "_name_or_path"}
    return {name: value for name, value in config.to_dict().items() if name not in dropped}


@torch.no_grad()
def _compare(source: Path, parts: Path, say: Callable[[str], object]) -> None:
    """The parts' features of noise and logits of a row of ids, against the whole's; one model at a time."""
    whole: Any = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(source, dtype="auto").eval()
    vision, text = whole.config.vision_config, whole.config.text_config
    generator = torch.Generator().manual_seed(0)
    # Wider than one attention window, and not a whole number of them.
    side = vision.spatial_merge_size * (vision.window_size // (vision.patch_size * vision.spatial_merge_size) + 1)
    grid = torch.tensor([[2, side, side]])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(2 * side * side, values, generator=generator).to(whole.dtype)
    ids = torch.randint(text.vocab_size, (1, 16), generator=generator)
    # No placeholder among them: those would ask for pixels.
    ids[(ids == whole.config.image_token_id) | (ids == whole.config.video_token_id)] = 0
    features = whole.model.visual(pixels, grid_thw=grid, return_dict=True).pooler_output
    logits = whole(input_ids=ids).logits
    del whole

    head: Any = Qwen2_5_VisionTransformerPretrainedModel.from_pretrained(parts / VISION_HEAD, dtype="auto").eval()
    _require_close("features", head(pixels, grid_thw=grid, return_dict=True).pooler_output, features, say)
    del head
    language_model: Any = AutoModelForCausalLM.from_pretrained(parts / LANGUAGE_MODEL, dtype="auto").eval()
    _require_close("logits", language_model(input_ids=ids).logits, logits, say)


def _require_close(what: str, mine: torch.Tensor, whole: torch.Tensor, say: Callable[[str], object]) -> None:
    difference = float((mine.float() - whole.float()).abs().max())
    # One rounding of the weights' dtype at the largest value.
    allowed = 4 * torch.finfo(whole.dtype).eps * float(whole.float().abs().max())
    if not difference <= allowed:
        raise ValueError(f"The {what} of the part differ from the whole model's by {difference:.3g}.")
    say(f"The {what} of the part are the whole model's: largest difference {difference:.3g}.")


__all__ = ["LANGUAGE_MODEL", "SELECTOR_FOLDER", "VISION_HEAD", "split"]

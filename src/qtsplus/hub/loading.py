"""Loads a model and its processor with this package's classes, and says beforehand what cannot be one.

No folder's own Python runs: that is for Transformers without this package. Its Auto classes too give ours from here on.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file, find_adapter_config_file

from ..common.files import first_line
from ..common.folders import read_json, reading, within_memory
from ..common.validation import check_path, show
from ..model.question_qtsplus import find_query_mask, question_token_ids
from ..model.sampling_qtsplus import DEFAULT_FPS, VideoRequest, frame_choice
from ..model.video_qtsplus import Chunk
from .backbones import backbone_of, register_backbones
from .checkpoint import INDEX, weight_map

register_backbones()

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # legacy ones without an owner hold none of our models

_KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_A_QUESTION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Who?"}]},
]
_SIDE = 56  # pixels of a frame
_VIDEO_BYTES = 2**30  # that a question and two such frames may take while they are prepared


def load(
    model: str | Path,
    device: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
) -> tuple[Any, Any]:
    """
    Loads a model and its processor.

    Args:
        model: a folder or a Hub id.
        device: such as `"cuda"` or `"cpu"`; a GPU where there is one when absent.
        dtype: of the weights, such as `"bfloat16"`; `"auto"` is the checkpoint's.
        revision: of a model on the Hub: a branch, a tag or a commit.

    Raises:
        ValueError: no such folder or repository; one without a QTSplus model or its processor, with a broken file, or
            of a later version that this one cannot read; a device that cannot be used; a revision of a folder.
    """
    device = find_device(device)
    processor = load_processor(model, revision)
    backbone = backbone_of(stored_config(model, revision).get("model_type"))
    index = Path(model, INDEX)
    if index.is_file():
        weight_map(index)  # raises for an index that leads out of its folder
    with reading(f"The model {str(model)!r}"):
        loaded = backbone.model.from_pretrained(model, dtype=dtype, revision=revision)
    loaded = loaded.to(device).eval()
    check_values(str(model), loaded.generation_config.to_dict())
    # Two tokens and a black video show whether the values fit each other, before any video is decoded.
    tokens = torch.zeros(1, 2, dtype=torch.long, device=loaded.device)
    with reading(f"The model {str(model)!r}"), torch.inference_mode():
        loaded(input_ids=tokens)
        loaded.encode_videos(*_black_video(processor))
    return loaded, processor


def check_values(what: str, values, name: str = "") -> None:
    """
    Raises `ValueError` for values of a configuration that Transformers takes, but no model can use: numbers that are
    not finite, and ids of tokens that are not whole numbers; and for attention that is called like a repository, since
    Transformers fetches it and runs its code. `name` is the field's.
    """
    if name.endswith("_token_id"):
        ids = values if isinstance(values, list) else [values]
        is_fit = values is None or (ids != [] and all(type(token) is int for token in ids))
    elif isinstance(values, list):
        for value in values:
            check_values(what, value, name)
        return
    elif isinstance(values, dict):
        for key, value in values.items():
            if key in _KERNELS and "/" in json.dumps(value):
                raise ValueError(f"{what} names the kernel {json.dumps(value)}, whose code does not run here.")
            check_values(what, value, str(key))
        return
    else:
        is_fit = not isinstance(values, (int, float)) or abs(values) < 2**63  # which NaN is not
    if not is_fit:
        raise ValueError(f"{what} has {name}={show(values)}, which no model can use.")


def load_processor(model: str | Path, revision: str | None = None):
    """The processor alone, see [`load`]."""
    config = load_config(model, revision)
    processor = processor_of(model, config, revision)
    if processor.tokenizer.pad_token is None:
        raise ValueError(f"{model} has a tokenizer without a padding token; expected one in tokenizer_config.json.")
    with reading(f"The processor of {str(model)!r}"), within_memory(_VIDEO_BYTES):
        # Where the chat template marks questions in another way, neither finds one.
        expected = processor.query_token_ids
        question = _question_in_prompt(processor, expected)
        if not torch.equal(question, _question_in_prompt(processor, question_token_ids(config))):
            raise ValueError(
                "The token ids in config.json do not find the question that the chat template writes; expected "
                f"user_turn_token_ids={expected['user_turn_token_ids']}, "
                f"turn_end_token_id={expected['turn_end_token_id']} and the special_token_ids of this tokenizer."
            )
        _black_video(processor)
    return processor


def _black_video(processor) -> Chunk:
    """Pixel values and grid of two black frames, made as those of a file are."""
    chosen = frame_choice(processor.video_processor, VideoRequest(None))(2, DEFAULT_FPS)
    height, width = processor.frame_size(len(chosen), _SIDE, _SIDE)
    grid = processor.grid_of(len(chosen), height, width, do_resize=not processor.native_resolution)
    return processor.preprocess_frames(np.zeros((2, _SIDE, _SIDE, 3), np.uint8), grid)


def adopt_tokenizer(config, processor) -> None:
    """
    Has a configuration find questions by the ids of a processor's tokenizer; a `ValueError` where these ids find no
    question in what its chat template writes.
    """
    token_ids = processor.query_token_ids
    for name, value in token_ids.items():
        setattr(config, name, value)
    if not _question_in_prompt(processor, token_ids).any():
        raise ValueError(
            f"The chat template of this tokenizer writes no question that begins with {processor.user_turn!r} and ends "
            f"with {processor.turn_end!r}, by which a question is found: give it a template that does."
        )


def _question_in_prompt(processor, token_ids: dict) -> torch.Tensor:
    """The mask of the question in what the chat template writes, by these ids."""
    prompt = processor.apply_chat_template(_A_QUESTION, add_generation_prompt=True)
    input_ids = torch.tensor([processor.prompt_ids(prompt)])
    return find_query_mask(input_ids, None, **token_ids)


def load_config(model: str | Path, revision: str | None = None):
    """The configuration of one of our models; `ValueError` for another, and for a broken one."""
    stored = stored_config(model, revision)
    model_type = stored.get("model_type")
    if "qtsplus_config" not in stored:
        name = str(model)
        raise ValueError(
            f"{name!r} is no QTSplus model: its model_type is {model_type!r}. Make one of it with "
            f"`qtsplus convert {name} --out FOLDER`."
        )
    backbone = backbone_of(model_type)
    with reading(Path(model, "config.json")):
        return backbone.config.from_pretrained(model, revision=revision)


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation configuration, where there is one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    with reading(path):
        return GenerationConfig.from_pretrained(folder)


def processor_of(model: str | Path, config, revision: str | None = None):
    """
    The processor of a folder or a Hub repository, with the class for a model's configuration, ours or the stock one.
    A `ValueError` where a file is broken, the tokenizer has no words, or its placeholders are not the configuration's.
    """
    for path in Path(model).glob("*.json"):
        if path.is_file():
            read_json(path)
    backbone = backbone_of(config.model_type)
    with reading(f"The processor of {model}"):
        processor = backbone.processor.from_pretrained(model, config=config, revision=revision, trust_remote_code=False)
    # Transformers makes a tokenizer of only the special tokens where the file is missing.
    if len(processor.tokenizer) <= len(processor.tokenizer.added_tokens_decoder):
        raise ValueError(f"{model} has a tokenizer without words; expected a tokenizer.json, or vocab and merges.")
    if isinstance(config, backbone.config):  # and not a stock one, which does not say
        processor.follow(config)
        stated = [config.image_token_id, config.video_token_id]
        if stated != processor.placeholder_ids:
            raise ValueError(
                f"The config.json of {model} has [image_token_id, video_token_id]={stated}, but the placeholders of "
                f"its tokenizer, {processor.image_token!r} and {processor.video_token!r}, are "
                f"{processor.placeholder_ids}."
            )
    return processor


def stored_config(model: str | Path, revision: str | None = None) -> dict:
    """
    What the config.json of a folder or a Hub repository holds.

    Raises:
        ValueError: no such folder or repository, or none with a config.json; an adapter; a revision of a folder.
    """
    name = str(check_path("model", model))
    folder = Path(model)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{name!r} is a folder, and revision={revision!r} is about a repository on the Hub.")
        refuse_adapter(model)
        if not (folder / "config.json").is_file():
            raise ValueError(f"There is no config.json in {name!r}; expected the folder of a model.")
        config = read_json(folder / "config.json")
    elif _HUB_ID.fullmatch(name):
        try:
            refuse_adapter(model, revision)
            config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        except OSError as error:
            raise ValueError(
                f"There is no folder {name!r}, and the Hub did not give it: {first_line(error)}"
            ) from error
    else:
        raise ValueError(f"There is no folder {name!r}; expected one, or a Hub id such as ORG/NAME.")
    check_values(f"The config.json of {name!r}", config)
    return config


def find_device(device: str | None) -> str:
    """The device that was asked for, or else a GPU where there is one; `ValueError` if it cannot be used."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"The device {device!r} cannot be used: {first_line(error)}") from error
    return device


def check_served_adapter(adapter: str) -> None:
    """
    Raises `ValueError` for a PEFT adapter that is not of the language model alone: vLLM leaves out in silence what
    adapts the selector or the vision tower.

    Args:
        adapter: a folder or a Hub id.
    """
    try:
        weights = cached_file(os.path.expanduser(adapter), "adapter_model.safetensors")
        with safe_open(weights, "pt") as file:
            names = sorted(file.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{adapter!r} is no adapter: {first_line(error)} Expected a folder, or a Hub id, with its "
            "adapter_model.safetensors."
        ) from error
    others = [name for name in names if not re.search(r"\.(language_model|lm_head)\..*lora_", name)]
    if others:
        raise ValueError(
            f"The adapter {adapter!r} also trained {others[0]!r}, and vLLM takes only adapters of the language "
            "model. Merge it into the model with qtsplus.training.lora.merge_lora, save the model and its processor "
            "(docs/use.md, LoRA), and serve that folder."
        )


def refuse_adapter(model: str | Path, revision: str | None = None) -> None:
    """Raises `ValueError` for a PEFT adapter: it has the weights of no whole model, and names any other as its base."""
    if find_adapter_config_file(str(model), revision=revision) is not None:
        raise ValueError(f"{model} holds a PEFT adapter; merge it (docs/use.md, LoRA) and save the whole model first.")

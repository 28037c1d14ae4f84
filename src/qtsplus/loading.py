"""Loads a model and its processor, and says beforehand what cannot be one."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedConfig

from .hub.folder import reading
from .output import first_line

_PROCESSOR = (("tokenizer.json", "tokenizer_config.json"), ("processor_config.json", "preprocessor_config.json"))
_A_QUESTION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]},
]


def load(
    model: str | Path, device: str | None = None, dtype: str = "auto", revision: str | None = None
) -> tuple[Any, Any]:
    """
    Loads a model and its processor as any Transformers user does, with `trust_remote_code=True`.

    Args:
        model: a folder or a Hub id.
        device: such as `"cuda"` or `"cpu"`; a GPU where there is one when absent.
        dtype: of the weights, such as `"bfloat16"`; `"auto"` is the checkpoint's.
        revision: of a model on the Hub: a branch, a tag or a commit.

    Raises:
        OSError: no such repository.
        ValueError: no such folder; one without a QTSplus model or its processor, or with a broken file; a device that
            cannot be used; a revision of a folder.
    """
    device = find_device(device)
    processor = load_processor(model, revision)
    with reading(f"The model {str(model)!r}"):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            model, trust_remote_code=True, dtype=dtype, revision=revision
        )
    return loaded.to(device).eval(), processor


def load_processor(model: str | Path, revision: str | None = None) -> Any:
    """The processor alone, see [`load`]."""
    check_model(model, revision)
    with reading(f"The processor of {str(model)!r}"):
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=True, revision=revision)
        processor.apply_chat_template(_A_QUESTION, add_generation_prompt=True)
    return processor


def stored_dtype(model: str | Path, revision: str | None = None) -> str:
    """What a model's configuration says of its weights, for vLLM: its own "auto" shortens float32."""
    config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    return config.get("dtype") or config.get("torch_dtype") or "auto"


def find_device(device: str | None) -> str:
    """The device that was asked for, or else a GPU where there is one; `ValueError` if it cannot be used."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {device!r} cannot be used: {first_line(error)}") from error
    if torch.device(device).type == "meta":
        raise ValueError("The device 'meta' holds no values and cannot answer; expected one such as 'cpu' or 'cuda'.")
    return device


def check_model(model: str | Path, revision: str | None) -> None:
    """A `ValueError` for what cannot be a model with a selector; see [`load`]."""
    name = str(model)
    if revision is not None and Path(model).is_dir():
        raise ValueError(f"{name!r} is a folder, and revision={revision!r} is about a repository on the Hub.")
    if not name.strip():
        raise ValueError("The model's name is empty; expected a folder or a Hub id, such as ORG/NAME.")
    if not Path(model).is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ValueError(f"There is no folder {name!r}; expected one, or a Hub id such as ORG/NAME.") from error
    config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    if not config:
        raise ValueError(f"There is no config.json in {name!r}; expected the folder or repository of a QTSplus model.")
    if "qtsplus_config" not in config:
        raise ValueError(
            f"{name!r} is no QTSplus model: its model_type is {config.get('model_type')!r}. Make one of it with "
            f"`qtsplus convert {name} --out FOLDER`."
        )
    for names in _PROCESSOR:
        if Path(model).is_dir() and not any(Path(model, file).is_file() for file in names):
            raise ValueError(
                f"The folder {name!r} holds no processor; expected {names[0]} beside the weights. Save it there with "
                "`processor.save_pretrained`."
            )

"""`qtsplus convert`: from a stock model and from the reference implementation to QTSplus.

A conversion renames tensors and writes them elsewhere, byte by byte: nothing is loaded, whatever the model's size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from transformers import GenerationConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

from ..common.folders import check_own, read_json, reading, whole_folder
from ..model.configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from ..model.lm_attention_qtsplus import check_attention
from ..model.methods_qtsplus import add_method
from .backbones import STOCK_TYPES, backbone_of
from .card import ORIGIN, card_data, matching_variant
from .checkpoint import (
    EMBEDDINGS,
    HEAD,
    REFERENCE,
    RHO_HISTORY,
    SELECTOR,
    Weights,
    check_weights,
    on_meta,
    read_checkpoint,
)
from .files import hub_configs
from .loading import adopt_tokenizer, load_generation_config, processor_of, stored_config
from .publish import write_repository

# What a checkpoint's folder may hold that a conversion reads, as patterns for a download.
_DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.jinja")

# --- Checkpoints of the reference implementation (github Siyou-Li/QTSplus) ---

REFERENCE_TYPE = "qts_plus_qwen2_5_vl_causal_lm"

# A checkpoint carries no configuration of its vision tower. These variants have it, by the language model's width.
_KNOWN_VISION = {2048: "qtsplus-3b", 3584: "qtsplus-7b"}

# The reference's name of each of our fields, and the value that its code takes where a configuration has none.
_SELECTOR_FIELDS = {
    "rho_min": ("qts_plus_rho_min", 0.05),
    "rho_max": ("qts_plus_rho_max", 0.5),
    "n_max": ("qts_plus_nmax", 2560),
    "tau_s": ("qts_plus_tau_s", 0.1),
    "dropout": ("qts_plus_block_dropout", 0.0),
    "scoring_layers": ("qts_plus_scoring_layers", 1),
    "reencode_layers": ("qts_plus_reencode_layers", 1),
    "lambda_t": ("lambda_t", 1.0),
    "lambda_m": ("lambda_m", 1.7),
    "lambda_s": ("lambda_s", 0.05),
}
_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_NOT_TEXT = {"model_type", "architectures", "auto_map", "transformers_version", "_name_or_path"}
_NOT_VISION = _NOT_TEXT | {"dtype", "torch_dtype"}

_UNTRAINED = """\
> **Nothing is trained:** {source} that selects by its own attention (`selection="lm_attention"`). Its first layers read
> the video in groups of frames with the question, and what they attend to stays. The selector's own weights are random
> and not used; they are there for whoever wants to train them."""
_FRESH = """\
> **The selector is new and untrained**: {source} with a selector that does not yet know what to keep. Train it first,
> for example with `qtsplus train`."""
_UNUSED = """\
> **Nothing is trained:** {source} that selects by `selection="{selection}"`. The selector's own weights are new and
> untrained; `selection="qtsplus"` would choose by them."""
_CONVERTED = (
    "The weights are those of a checkpoint of the reference implementation (github Siyou-Li/QTSplus), converted with "
    "`qtsplus convert`."
)


@dataclass
class _Conversion:
    """A model that is to be written: its configuration, tensors under their new names, and the facts for its card."""

    config: Any
    tensors: Weights
    about: dict[str, Any]
    variant: str | None


def convert(
    source: str | Path,
    out: str | Path,
    *,
    selector: Mapping | None = None,
    processor: str | Path | None = None,
    revision: str | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Path:
    """
    Writes a Hub folder made from a checkpoint; which way it goes follows from the checkpoint's `model_type`.

    A stock model (Qwen2.5-VL or another backbone) gets a fresh selector, and `selector` is about that; a reference
    QTSplus becomes one of ours.

    Args:
        source: a folder, or a Hub repository's id, at a `revision`. A reference checkpoint lacks the configuration of
            its vision tower; one of another size than 3B and 7B needs it beside its own, as `vision_config.json`.
        out: the folder to write, see [`whole_folder`]; not in a folder that is read.
        selector: fields of `qtsplus_config` to set.
        processor: a folder or Hub id to take the processor from, where the source has none.
        say: takes a line for every choice that was made.

    Raises:
        ValueError: another kind of model; weights that are missing, unexpected or of another shape, each listed; an
            argument that has no meaning for this kind; a vision tower that is not known.
        FileExistsError: the folder holds other files.
    """
    out = check_own(out, source, processor or source)
    stated = stored_config(source, revision)
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=list(_DOWNLOADED)))
    model_type = stated.get("model_type")
    from_stock = model_type in STOCK_TYPES
    if not from_stock and selector is not None:
        raise ValueError(f"--set is about a new selector, and {folder} is of type {model_type!r}.")
    if from_stock:
        made = _from_base(stated, folder, str(source), selector or {}, say)
    elif model_type == REFERENCE_TYPE:
        made = _from_reference(stated, folder)
    else:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; expected a stock model, of type "
            f"{', '.join(map(repr, STOCK_TYPES))}, or a reference QTSplus on Qwen2.5-VL, {REFERENCE_TYPE!r}."
        )

    with whole_folder(out) as staging:
        loaded = None
        if processor is not None or (folder / "tokenizer_config.json").is_file():
            loaded = processor_of(processor or folder, made.config)
            if from_stock:
                _take_over(loaded, made)
        else:
            say(f"{folder} has no tokenizer, so the result has no processor: give one with --processor.")
        save_torch_state_dict(made.tensors, staging)
        # The source's comes first, then the one of the variant of this size, then an empty one.
        generation = load_generation_config(folder) or load_generation_config(hub_configs() / str(made.variant))
        generation = generation or GenerationConfig.from_model_config(made.config)
        generation.save_pretrained(staging)
        write_repository(staging, on_meta(made.config), loaded, f"org/{out.name}", made.about)
    return out


def _from_base(
    stated: Mapping,
    folder: Path,
    source: str,
    selector: Mapping,
    say: Callable[[str], object],
) -> _Conversion:
    """A stock model with a fresh selector."""
    backbone = backbone_of(stated["model_type"])
    with reading(folder / "config.json"):
        stock = backbone.stock_model.config_class.from_pretrained(folder)
    settings = dict(selector)
    selection = settings.get("selection", "qtsplus")
    if selection == "lm_attention":
        settings.setdefault("reencode_layers", 0)  # they would have to be trained
    add_method(selection)
    config = backbone.config(**stock.to_dict() | {"qtsplus_config": settings})
    check_attention(config.text_config, config.qtsplus_config)
    known = matching_variant(config)
    tensors = check_weights(read_checkpoint(folder), config, folder, without=SELECTOR)
    config.dtype = tensors[EMBEDDINGS].dtype
    tensors.update(fresh_selector(config, config.dtype))
    text = _FRESH if selection == "qtsplus" else _UNUSED
    if selection == "lm_attention":
        text = _UNTRAINED
        say("Nothing needs training: the model's own attention selects. `qtsplus calibrate` seeks a better layer.")
    else:
        say('The selector is new: until it is trained, selection="qtsplus" chooses nearly at random.')
    about = card_data(known, *ORIGIN, "recipe")
    if not Path(source).is_dir():
        about["base_model"] = source
    name = about.get("base_model") or f"a {backbone.model.backbone_name}"
    about["weights"] = text.format(source=name, selection=selection)
    return _Conversion(config, tensors, about, known)


def _from_reference(stated: dict, folder: Path) -> _Conversion:
    """A reference checkpoint under our names."""
    stored = read_checkpoint(folder)
    vision = find_vision_config(folder, stated)
    stated.setdefault("tie_word_embeddings", HEAD not in stored)
    with reading(folder / "config.json"):
        config = convert_reference_config(stated, vision)
    tensors = check_weights(stored, config, folder, REFERENCE, without=RHO_HISTORY)
    config.dtype = tensors[EMBEDDINGS].dtype
    tensors[RHO_HISTORY] = torch.zeros(2, dtype=torch.int64)
    known = matching_variant(config)
    about = card_data(known, *ORIGIN)
    about["weights"] = _CONVERTED
    return _Conversion(config, tensors, about, known)


def convert_reference_config(
    config: Mapping,
    vision_config: Mapping,
) -> Qwen2_5_VLQTSplusConfig:
    """
    Our configuration for a reference checkpoint, from its config.json (a flat text configuration with `qts_plus_*`
    fields) and the configuration of its vision tower. It has the reference's gate, its sequential positions and its
    re-encoder without time.
    """
    selector: dict = {
        "gate": "gumbel",
        "query_states": "embeddings",
        "reduction": "max",
        "budget": "rho",
        "null_token": False,
        "position_ids": "sequential",
        "reencode_rope": False,
    }
    # The reference never reads its qts_plus_n_heads: its selector has the language model's heads, as ours has.
    for name, (source, default) in _SELECTOR_FIELDS.items():
        selector[name] = config.get(source, default)
    for name in ("scoring_layers", "reencode_layers"):
        selector[name] = max(selector[name], 1)
    if not config.get("qts_plus_reencode", True):
        selector["reencode_layers"] = 0
    known = set(Qwen2_5_VLTextConfig().to_dict()) - _NOT_TEXT | {"rope_scaling", "rope_theta", "head_dim"}
    text = {name: value for name, value in config.items() if name in known}
    token_ids = {name: config[name] for name in _TOKEN_IDS if name in config}
    return Qwen2_5_VLQTSplusConfig(
        text_config=text,
        vision_config={name: value for name, value in vision_config.items() if name not in _NOT_VISION},
        qtsplus_config=selector,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **token_ids,
    )


def find_vision_config(folder: Path, config: Mapping) -> dict:
    """
    The configuration of the vision tower of a reference checkpoint, by its folder's `vision_config.json` (such a
    configuration, or a whole Qwen2.5-VL one), or else by the width of its language model, in its config.json; a
    `ValueError` for an unknown width. Whether it fits its weights is checked with them.
    """
    path = folder / "vision_config.json"
    if not path.is_file():
        variant = _KNOWN_VISION.get(config.get("hidden_size", 0))
        if variant is None:
            raise ValueError(
                f"The checkpoint carries no configuration of its vision tower, and its width is none of "
                f"{', '.join(map(str, _KNOWN_VISION))}: put one there, as {path}."
            )
        path = hub_configs() / variant / "config.json"
    content = read_json(path)
    return content.get("vision_config", content)


def fresh_selector(config, dtype: torch.dtype, seed: int = 0) -> Weights:
    """A new selector's tensors: tokens are scored by likeness to the question's words, and re-encoded as they are."""
    model = on_meta(config)
    selector = model.model.qtsplus
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        selector.to_empty(device="cpu").apply(model._init_weights)
        last = selector.scoring_layers[-1]
        queries = last.q_proj.weight
        keys = last.k_proj.weight
        torch.nn.init.orthogonal_(keys)
        heads = keys.unflatten(0, (-1, selector.head_dim))
        shared = heads.repeat_interleave(len(queries) // len(keys), 0)
        queries.copy_(shared.flatten(0, 1))
    return {SELECTOR + name: tensor for name, tensor in selector.to(dtype).state_dict().items()}


def _take_over(processor, made: _Conversion) -> None:
    """The tokenizer says which ids open and close a question; a variant of this size says how to sample frames."""
    adopt_tokenizer(made.config, processor)
    if made.variant is not None:
        settings = hub_configs() / made.variant / "processor_config.json"
        if settings.exists():
            video_processor = read_json(settings)["video_processor"]
            processor.video_processor = type(processor.video_processor)(**video_processor)
    # Without a cap, frames of any size would become as many tokens as they have patches.
    if getattr(processor.video_processor, "cap_pixels_per_frame", True) is None:
        processor.video_processor.cap_pixels_per_frame = True

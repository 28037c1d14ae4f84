"""What a run will train and take, before any weight is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import create_model
from torch import nn
from transformers import AutoVideoProcessor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..common.files import size
from ..common.folders import reading
from ..common.validation import STRICT, build
from ..hub.checkpoint import on_meta
from ..hub.files import require_variant
from ..hub.loading import adopt_tokenizer
from ..model.budget_qtsplus import kept_count
from ..model.sampling_qtsplus import VIDEO_KEYS, read_keys
from .attention import check_relevance
from .freezing import prepare_parts, trained_and_all, vision_modules
from .models import make_config, make_processor
from .recipe import Recipe

CLIP = 10_000  # visual tokens of the clip for which a step's memory is stated
_TEXT = 512  # text tokens of an example, if the recipe sets no limit
_PATCHES = 4  # patches in the vision tower for each visual token
_INPUT = 1 / 20  # The input of a block has this share of the values that the block's linear layers read and write.


@dataclass(frozen=True)
class Plan:
    # Bytes of the checkpoints: a new one is written before the oldest is removed, so that there is one more than
    # `save_total_limit`. Without a limit two are counted. The model itself, written last, is smaller than one of them.
    disk: int
    lines: list[str]  # all that it takes, for a person


def make_plan(recipe: Recipe) -> Plan:
    """
    What a recipe trains and takes, from its model on the meta device; a `ValueError` for settings that do not fit it.
    Memory is that of weights, gradients and AdamW, and of a step, see [`step_memory`].
    """
    args = recipe.model
    training = recipe.training
    config = make_config(args.variant, args.weights, args.selector)
    is_folder = Path(str(args.weights)).is_dir()
    if is_folder:
        stored = make_config(None, args.weights).text_config.hidden_size
        expected = config.text_config.hidden_size
        if stored != expected:
            raise ValueError(
                f"{args.weights} has a hidden size of {stored}, but the variant {args.variant} one of {expected}: add "
                "--set model.variant=null, so that the configuration is that of the weights."
            )
    if is_folder or args.variant is None:
        processor = make_processor(None, args.weights, config)
        adopt_tokenizer(config, processor)  # raises where its tokenizer finds no question
        video_processor = processor.video_processor
    else:
        video_processor = AutoVideoProcessor.from_pretrained(require_variant(args.variant), trust_remote_code=False)
    _check_processor_kwargs(video_processor, recipe.data.processor_kwargs)
    with torch.device("meta"):
        model = on_meta(config)
        check_relevance(model, training)
        trained, total = trained_and_all(prepare_parts(model, training))
    saved = getattr(torch, args.dtype).itemsize * (total - trained) + 4 * trained
    checkpoint = saved + 8 * trained
    memory = checkpoint + 4 * trained
    disk = saved
    if training.save_strategy != "no":
        disk = checkpoint * (1 + (training.save_total_limit or 1))
    lines = [
        f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})",
        f"{size(memory)} of memory for weights, gradients and optimizer, and for a step with a clip of {CLIP:,} visual "
        f"tokens about {size(step_memory(model, recipe, CLIP))}",
        f"{size(saved)} of disk for the model in {recipe.output_dir}, and {size(checkpoint)} for each checkpoint",
    ]
    return Plan(disk, lines)


def _check_processor_kwargs(video_processor, settings: Mapping) -> None:
    """
    Raises `ValueError` for unknown settings, for values that no video can have, and for settings that the video
    processor refuses: it is tried on a video of the meta device, which has a size and no pixels.
    """
    known = ["min_frames", "max_frames", *video_processor.valid_kwargs.__annotations__]
    types: dict = dict.fromkeys(known, (object, None))
    build("data.processor_kwargs.", create_model("Settings", __config__=STRICT, **types), settings)
    read_keys({name: settings.get(name) for name in VIDEO_KEYS})
    if settings.keys() >= {"fps", "num_frames"}:
        raise ValueError("data.processor_kwargs has both fps and num_frames; expected one of them.")
    options = {name: value for name, value in settings.items() if name not in VIDEO_KEYS}
    options |= {"do_sample_frames": False, "device": "meta"}
    blank = torch.empty(2, 3, 56, 56, dtype=torch.uint8, device="meta")
    with reading("data.processor_kwargs"):
        video_processor(videos=[blank], **options)


def step_memory(model, recipe: Recipe, visual_tokens: int) -> int:
    """
    About the most bytes that a device holds in a step beside weights, gradients and optimizer, if the clip of each of
    its records has so many visual tokens. Steps of small models on a CPU took 0.7 to 1.2 times as much. What linear
    layers read and write is counted:

    - by the language model for the kept tokens and the text, with gradient checkpointing the inputs of all blocks and
      one block; and the logits with their gradient;
    - by the re-encoder for the kept tokens;
    - by one block of the language model for all tokens, where its attention teaches;
    - without stored features, by one block of the vision tower, or as by the language model where it is trained.
    """
    training = recipe.training
    selector = model.config.qtsplus_config
    fraction = selector.rho_max
    if training.retention_range is not None and training.retention_share == 1:
        fraction = training.retention_range[1]
    kept = kept_count(fraction, visual_tokens, selector.n_max)
    text = recipe.data.model_max_length or _TEXT
    recomputed = training.gradient_checkpointing
    held, block = _linear_values(model.model.language_model, recomputed)
    values = (kept + text) * (held + 2 * model.lm_head.out_features)
    values += kept * _linear_values(model.model.qtsplus.reencode_layers, False)[0]
    if training.relevance_weight > 0:
        values += visual_tokens * block
    if recipe.data.features is None:
        held, block = _linear_values(nn.ModuleList(vision_modules(model).values()), recomputed)
        values += _PATCHES * visual_tokens * (block if training.freeze_vision_model else held)
    bytes_of_value = 2 if training.bf16 or training.fp16 else 4
    return int(training.train_batch_size * bytes_of_value * values)


def _linear_values(part: nn.Module, recomputed: bool | None) -> tuple[float, float]:
    """
    The values that the linear layers of a part read and write for a token: those that are held until its gradients are
    computed, and those of one block. With gradient checkpointing they are `recomputed`, and fewer are held.
    """
    values = 0
    blocks = 0
    for module in part.modules():
        if isinstance(module, nn.Linear):
            values += module.in_features + module.out_features
        blocks += isinstance(module, GradientCheckpointingLayer)
    block = values / max(blocks, 1)
    if recomputed:
        return _INPUT * values + block, block
    return values, block

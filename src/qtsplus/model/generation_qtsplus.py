"""What stock's models do, as ours do it: load, save with their code, and generate."""

import copy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.generation.streamers import BaseStreamer

from .columns_qtsplus import CachedPrompt, check_cache
from .encoding_qtsplus import device_of, stored_parts
from .methods_qtsplus import is_finite
from .prompt_qtsplus import (
    CACHE,
    CompactPrompt,
    SelectedFeatures,
    VisualInputs,
    alone_with_ids,
    check_no_padding,
    take_inputs,
)
from .selector_qtsplus import QTSplusSelector

_SPLITS_FEATURES = Version(transformers.__version__) >= Version("5.23")  # along with the chunks of a prompt
# AutoModel too gives the class with the head, as published video models do.
MODEL_AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_OF_A_PUSH = ("commit_message", "private", "create_pr", "revision", "token")


# --- Loading and saving ---


def auto_map(model_class) -> dict[str, str]:
    """The whole `auto_map` of a config.json, for a class with a head."""
    target = _place_of(model_class)
    config_target = _place_of(model_class.config_class)
    return {"AutoConfig": config_target, **dict.fromkeys(MODEL_AUTO_CLASSES, target)}


def _place_of(kind: type) -> str:
    """Where a Hub repository has a class, as `module.Class`."""
    module = kind.__module__.rpartition(".")[2]
    return f"{module}.{kind.__name__}"


def code_of(module_name: str) -> list[Path]:
    """The Python file of a module and of all that it imports from beside it, sorted."""
    entry = str(sys.modules[module_name].__file__)
    return sorted(map(Path, {entry, *get_relative_import_files(entry)}))


def check_finite(model: torch.nn.Module, name: Any) -> None:
    """Raises `ValueError` for weights with NaN or infinity; those that are not in memory yet are not read."""
    for weight_name, weight in model.named_parameters():
        for part in stored_parts(weight):
            if not part.is_meta and not is_finite(part):
                raise ValueError(
                    f"The weights of {str(name)!r} hold NaN or infinity, such as {weight_name}; copy or train the "
                    "model again."
                )


class QTSplusPreTrainedMixin:
    """
    Initialises the selector, refuses checkpoints that would leave a part of the model random, and saves a model with a
    head as a Hub repository: with the whole `auto_map`, its code, and the names it loads by.
    """

    config: PreTrainedConfig
    can_generate: Callable[[], bool]
    parameters: Callable
    push_to_hub: Callable
    _supports_context_parallel = False  # ranks that each hold a part of a prompt cannot select from all of it
    device = property(device_of)  # stock's is "meta" while weights are offloaded

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, QTSplusSelector):
            # A fresh re-encoder and a fresh layer over the question change nothing, so that they do not wreck a
            # trained language model.
            layers = [*module.reencode_layers, *module.question_layers]
            for layer in layers:
                last = layer.ffn[-1]
                for weight in (layer.o_proj.weight, last.weight, last.bias):
                    init.zeros_(weight)
            init.zeros_(module.rho_history)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """
        As stock, but a `ValueError` where weights are missing, as in a checkpoint of the base model, or are not finite.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing and pretrained_model_name_or_path is not None:
            lacks = f"{len(missing)} of the weights of {cls.__name__} ({missing[0]}, ...)"
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {lacks}, which would stay random. If it is a base checkpoint "
                "without a selector, make a QTSplus model of it first: qtsplus convert."
            )
        for module in model.modules():
            if isinstance(module, QTSplusSelector):
                module.freeze_unused()
        check_finite(model, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """
        As stock, with the code that runs the model beside its weights. A `ValueError` for a model that was offloaded
        after it was loaded.
        """
        is_offloaded = any(weight.is_meta for weight in self.parameters())
        if is_offloaded and not hasattr(self, "hf_device_map") and "state_dict" not in kwargs:
            raise ValueError(
                "The weights are offloaded: bring them back before you save the model, for example by "
                "accelerate.hooks.remove_hook_from_submodules(model)."
            )
        # The default goes back to the names of a stock checkpoint where one was loaded, and that does not load again.
        kwargs["save_original_format"] = False
        if self.can_generate() and kwargs.get("is_main_process", True):
            # A class that somebody derived elsewhere is saved as the one of ours that it derives from.
            ours = next(parent for parent in type(self).__mro__ if "stock_class" in vars(parent))
            self.config.auto_map = auto_map(ours)
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for path in code_of(ours.__module__):
                shutil.copyfile(path, Path(save_directory, path.name))
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub:  # stock uploads only what it has written itself
            repo_id = kwargs.pop("repo_id", Path(save_directory).name)
            options = {name: kwargs[name] for name in _OF_A_PUSH if name in kwargs}
            self.push_to_hub(repo_id, **options)


# --- Generating ---


class _PromptStreamer(BaseStreamer):
    """Shows a streamer the caller's prompt where `generate` would show the shortened one."""

    def __init__(self, streamer: BaseStreamer, prompt: Tensor):
        self.streamer = streamer
        self.prompt: Tensor | None = prompt

    def put(self, value):
        if self.prompt is not None:
            value = self.prompt.to(value.device)
            self.prompt = None
        self.streamer.put(value)

    def end(self):
        self.streamer.end()


class QTSplusGenerationMixin:
    """`generate` from the shortened prompt, for a class whose `model` is a [`QTSplusModelMixin`]."""

    model: Any  # a [`QTSplusModelMixin`]
    generation_config: GenerationConfig

    def init_continuous_batching(self, *args, **kwargs):
        """Raises `ValueError`: the scheduler of Transformers takes nothing but ids."""
        raise ValueError("Continuous batching has no place for images and videos: call generate, or use qtsplus serve.")

    @torch.no_grad()
    def generate(self, inputs=None, generation_config=None, streamer=None, **kwargs):
        """
        As [`~GenerationMixin.generate`], from the shortened prompt, which logits processors, stopping criteria, the
        cache and attentions see. The returned sequences begin with the caller's own `input_ids`.

        Args:
            cache (`Cache`, *optional*): an empty one to fill, or `past_key_values`.
            kwargs: as stock, and the fields of [`VisualInputs`] and [`SelectionInputs`], such as `retention`.

        Returns:
            as stock; with `return_dict_in_generate=True` the output carries `qtsplus`, a [`QTSplusOutput`].
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        self.model.check_arguments(kwargs)
        visual, selection = take_inputs(kwargs)
        cache = kwargs.pop("cache", None)
        past_key_values = kwargs.pop("past_key_values", None)
        cache = past_key_values if cache is None else cache
        check_cache(cache)
        if cache is not None:
            kwargs[CACHE] = cache
        embeds = kwargs.get("inputs_embeds")
        is_shortened = "mm_encoder_outputs" in kwargs
        if input_ids is None or embeds is not None or is_shortened:
            # Nothing to shorten: embeddings, an empty prompt, or a prompt that this method has shortened already.
            if visual.given and (visual.videos_given or embeds is None or is_shortened):
                raise alone_with_ids()
            self.model.check_selected(kwargs.get("mm_encoder_outputs"))
            if visual.given:
                kwargs["image_grid_thw"] = visual.image_grid_thw
                kwargs["mm_encoder_outputs"] = self.model.encode_images(self.model.image_ids(embeds), visual)
            return super().generate(input_ids, generation_config, streamer=streamer, **kwargs)
        kwargs.pop("mm_token_type_ids", None)  # found in input_ids
        if cache is not None and cache.get_seq_length() > 0:
            self._go_on_from(cache, input_ids, visual)
            return super().generate(input_ids, generation_config, streamer=streamer, **kwargs)
        attention_mask = kwargs.pop("attention_mask", None)
        position_ids = kwargs.pop("position_ids", None)
        if attention_mask is None:
            check_no_padding(input_ids, self.generation_config.pad_token_id)
        shortened = self.model.shorten(
            input_ids, attention_mask, position_ids, visual, selection, sample_gate=False, pad_left=True
        )
        return self.generate_from(shortened, generation_config, streamer, **kwargs)

    def _go_on_from(
        self,
        cache,
        input_ids: Tensor,
        visual: VisualInputs,
    ) -> None:
        """Prepares for a prompt whose beginning is cached, if nothing of that was dropped."""
        length = cache.get_seq_length()
        cached_prompt = getattr(cache, "qtsplus_prompt", None)
        if visual.given or (cached_prompt is not None and not cached_prompt.is_whole):
            raise ValueError(
                f"The cache holds {length} columns of an earlier prompt: expected an empty one. Each question chooses "
                "its own visual tokens; give encoded videos as video_features=, and they wait for it."
            )
        is_whole_conversation = input_ids.shape[1] > length
        self.model.check_no_placeholders(input_ids[:, length:] if is_whole_conversation else input_ids)
        # Stock reads it from the model, where another conversation may have left its own.
        self.model.rope_deltas = None if cached_prompt is None else cached_prompt.rope_deltas

    @torch.no_grad()
    def generate_from(self, prompt: CompactPrompt, generation_config=None, streamer=None, **kwargs):
        """[`generate`] from a prompt that has been shortened already, padded on the left."""
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError('cache_implementation="paged" cannot take a prompt with selected visual tokens.')
        settings = self._settings(generation_config, kwargs)
        chunk_size = settings.get("prefill_chunk_size")
        if chunk_size is not None and prompt.features and not _SPLITS_FEATURES:
            raise ValueError(f"prefill_chunk_size={chunk_size} needs Transformers 5.23 or later beside videos.")
        prompt_length = prompt.source_ids.shape[1]
        generation_config = self._count_new_tokens(generation_config, kwargs, settings, prompt_length)
        if streamer is not None:
            streamer = _PromptStreamer(streamer, prompt.source_ids)
        result = super().generate(
            prompt.input_ids,
            generation_config,
            streamer=streamer,
            attention_mask=prompt.attention_mask,
            position_ids=prompt.position_ids,
            mm_encoder_outputs=prompt.selected,
            **kwargs,
        )
        cached = CachedPrompt.of(prompt)
        cached.keep_with(kwargs.get(CACHE))
        if isinstance(result, Tensor):
            return self._with_prompt(result, prompt)
        result.sequences = self._with_prompt(result.sequences, prompt)
        result.qtsplus = prompt.qtsplus
        cached.keep_with(result.get(CACHE))
        return result

    @staticmethod
    def _with_prompt(sequences: Tensor, prompt: CompactPrompt) -> Tensor:
        """The sequences with the caller's prompt in place of the shortened one."""
        generated = sequences[:, prompt.input_ids.shape[1] :]
        repeats = len(sequences) // len(prompt.source_ids)
        source_ids = prompt.source_ids.repeat_interleave(repeats, dim=0)
        return torch.cat([source_ids.to(generated.device), generated], dim=1)

    def _settings(self, generation_config: GenerationConfig | None, kwargs: dict) -> dict:
        """As stock finds them: in the call, in the configuration passed with it, or in the model's own."""
        settings: dict = {}
        for config in filter(None, (self.generation_config, generation_config)):
            settings |= {name: value for name, value in vars(config).items() if value is not None}
        return settings | kwargs  # where a None is said, and counts

    def _count_new_tokens(
        self, generation_config: GenerationConfig | None, kwargs: dict, settings: dict, prompt_length: int
    ) -> GenerationConfig | None:
        """
        Says lengths in new tokens, in `kwargs`, because those that count the prompt would count the shortened one;
        returns the configuration without these.
        """
        config = copy.deepcopy(generation_config)
        for bound, least in (("max", 1), ("min", 0)):
            length = settings.get(f"{bound}_length")
            if length and settings.get(f"{bound}_new_tokens") is None:
                new = length - prompt_length
                if bound == "max" and new < least:
                    raise ValueError(f"max_length={length}, the prompt has {prompt_length} tokens: set max_new_tokens.")
                kwargs[f"{bound}_new_tokens"] = max(new, least)
            kwargs.pop(f"{bound}_length", None)
            if config is not None:
                setattr(config, f"{bound}_length", None)
        return config

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        outputs = model_kwargs.pop("mm_encoder_outputs", None)
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        if outputs is not None:
            expanded = {}
            for name, selected in outputs.items():
                rows = [row for row in selected.pooler_output for _ in range(expand_size)]
                expanded[name] = SelectedFeatures(pooler_output=tuple(rows))
            model_kwargs["mm_encoder_outputs"] = expanded
        return input_ids, model_kwargs

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, is_first_iteration=False, **kwargs):
        # Transformers looks for `inputs_embeds` in this signature.
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        cache = kwargs.get(CACHE) if kwargs.get("use_cache", True) else None
        selected = kwargs.get("mm_encoder_outputs")
        if not is_first_iteration and cache is not None and cache.get_seq_length():
            inputs.pop("mm_encoder_outputs", None)  # Transformers below 5.18 does not know that these belong to prefill
        elif selected:  # an assistant's prefill is not called the first
            inputs["mm_encoder_outputs"] = selected
        return inputs

"""What stock's models do, as ours do it: load, save with their code, and generate."""

import copy
import shutil
import sys
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.generation.streamers import BaseStreamer

from .layout_qtsplus import check_no_padding
from .prompt_qtsplus import CACHE, TEXT, CompactPrompt, SelectedFeatures, alone_with_ids, take_cache, take_inputs
from .selector_qtsplus import QTSplusSelector

_SPLITS_FEATURES = Version(transformers.__version__) >= Version("5.23")  # along with the chunks of a prompt
# AutoModel too gives the class with the head, as published video models do.
MODEL_AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_OF_A_PUSH = ("commit_message", "private", "create_pr", "revision", "token")


# --- Loading and saving ---


def auto_map(model_class: Any) -> dict[str, str]:
    """The whole `auto_map` of a config.json, for a class with a head."""
    config_class = model_class.config_class
    target = f"{model_class.__module__.rpartition('.')[2]}.{model_class.__name__}"
    config_target = f"{config_class.__module__.rpartition('.')[2]}.{config_class.__name__}"
    return {"AutoConfig": config_target, **dict.fromkeys(MODEL_AUTO_CLASSES, target)}


def code_of(module_name: str) -> list[Path]:
    """The Python file of a module and of all that it imports from beside it, sorted."""
    entry = Path(str(sys.modules[module_name].__file__))
    return sorted({entry, *map(Path, get_relative_import_files(entry))})


class QTSplusPreTrainedMixin:
    """
    Initialises the selector, refuses checkpoints that would leave a part of the model random, and saves a model with a
    head as a Hub repository: with the whole `auto_map`, its code, and the names it loads by.
    """

    config: Any
    can_generate: Any
    push_to_hub: Any
    _supports_context_parallel = False  # ranks that each hold a part of a prompt cannot select from all of it

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, QTSplusSelector):
            # A fresh re-encoder and a fresh layer over the question change nothing, so that they do not wreck a
            # trained language model.
            layers: Any = [*module.reencode_layers, *module.question_layers]
            for layer in layers:
                for weight in (layer.o_proj.weight, layer.ffn[-1].weight, layer.ffn[-1].bias):
                    init.zeros_(weight)
            init.zeros_(module.rho_history)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """As stock, but a `ValueError` where weights are missing, as in a checkpoint of the base model."""
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} of the weights of {cls.__name__} ({missing[0]}, "
                "...), which would stay random. If it is a base checkpoint without a selector, make a QTSplus model of "
                "it first: qtsplus convert."
            )
        for module in model.modules():
            if isinstance(module, QTSplusSelector):
                module.freeze_unused()
        return (model, info) if output_loading_info else model

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        """As stock. The selector's configuration gets the name too, which its own attention does not read."""
        if not isinstance(attn_implementation, str):
            super().set_attn_implementation(attn_implementation, *args, **kwargs)
            return
        # Stock would warn that no Transformers model has the selector's configuration.
        parts = [name for name in self.config.sub_configs if name != "qtsplus_config"]
        implementations = {"": attn_implementation, **dict.fromkeys(parts, attn_implementation)}
        super().set_attn_implementation(implementations, *args, **kwargs)
        if "qtsplus_config" in self.config.sub_configs:
            self.config.qtsplus_config._attn_implementation = self.config._attn_implementation

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """As stock, with the code that runs the model beside its weights."""
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
            self.push_to_hub(repo_id, **{name: kwargs[name] for name in _OF_A_PUSH if name in kwargs})


# --- Decoding behind a shortened prompt ---


@dataclass(frozen=True)
class CachedPrompt:
    """
    What a key/value cache holds of a prompt with images or videos. It is kept with the cache, so that a caller who
    decodes may go on with a mask and positions of the full prompt's width.
    """

    columns: torch.Tensor  # [B, S'], the caller's column behind each that is cached; -1 on padding
    length: int  # S, the columns of the caller's prompt
    rope_deltas: torch.Tensor  # [B, 1], how far decoding stands from the count of the tokens

    @classmethod
    def of(cls, prompt: CompactPrompt) -> "CachedPrompt":
        columns: Any = prompt.qtsplus.columns
        rope_deltas = prompt.next_position - prompt.attention_mask.sum(-1)
        return cls(columns, prompt.source_ids.shape[1], rope_deltas[:, None])

    @staticmethod
    def kept_with(cache: Any) -> "CachedPrompt | None":
        return getattr(cache, "qtsplus_prompt", None)

    def keep_with(self, cache: Any) -> None:
        """Keeps it with a cache, whose rows are selected and repeated together with it from then on."""
        if cache is None:
            return
        cache.qtsplus_prompt = self
        if not isinstance(cache, _CacheWithPrompt):
            cache.__class__ = _with_prompt(cache.__class__)

    def of_rows(self, rows: int) -> "CachedPrompt":
        """The same for a batch of so many rows, several for each of the prompt's where they are repeated as beams."""
        if rows % len(self.columns):
            raise ValueError(
                f"{rows} rows behind a cache of {len(self.columns)} prompts: expected as many, or each repeated."
            )
        repeats = rows // len(self.columns)
        columns = self.columns.repeat_interleave(repeats, dim=0)
        return CachedPrompt(columns, self.length, self.rope_deltas.repeat_interleave(repeats, dim=0))

    def select(self, indices: torch.Tensor) -> "CachedPrompt":
        """The same for these rows, `[R]`."""
        indices = torch.as_tensor(indices, device=self.columns.device)
        return CachedPrompt(self.columns[indices], self.length, self.rope_deltas[indices])

    def shorten_mask(self, mask: Any, past_length: int, rows: int, new: int) -> Any:
        """
        The mask `[B, cached + new]` of the columns that are cached and of `new` ones behind them.

        Args:
            mask: the caller's, of that width or of the full prompt's and all after it; `None` hides padding alone. A
                mask of another kind, such as a 4-dimensional one, is left as it is.
            past_length: the columns that are cached.
            rows: of the batch; several for each of the prompt's where the caller repeated them, as beams are.
        """
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            return mask
        columns = self.of_rows(rows).columns[:, :past_length]
        is_real = columns >= 0
        if mask is None:
            if bool(is_real.all()):
                return None
            return nn.functional.pad(is_real.long(), (0, past_length - columns.shape[1] + new), value=1)
        behind = past_length - columns.shape[1] + new
        mask = mask.to(columns.device)
        if mask.shape == (rows, columns.shape[1] + behind):
            prompt_mask = mask[:, : columns.shape[1]]
        elif mask.shape == (rows, self.length + behind):
            prompt_mask = mask.gather(1, columns.clamp(min=0))
        else:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} behind a cache of {past_length} columns: expected "
                f"{(rows, past_length + new)}, or {(rows, self.length + behind)} with all of the prompt's columns. "
                "output.qtsplus.columns says which of them are cached."
            )
        return torch.cat([prompt_mask * is_real.to(mask.dtype), mask[:, mask.shape[1] - behind :]], dim=1)

    def new_positions(self, position_ids: Any, past_length: int, new: int) -> Any:
        """The caller's `position_ids` of the new columns, from those or from those of all columns."""
        if position_ids is None:
            return None
        width = position_ids.shape[-1]
        widths = (new, past_length + new, self.length + past_length - self.columns.shape[1] + new)
        if width not in widths:
            raise ValueError(
                f"position_ids {tuple(position_ids.shape)} for {new} columns behind a cache: expected {new} of them, "
                f"or {widths[2]} with the prompt's. output.qtsplus.columns says which of its columns are cached."
            )
        return position_ids[..., width - new :]


class _CacheWithPrompt:
    """Added to the class of a cache with a [`CachedPrompt`]: selects and repeats its rows as those of the cache."""

    qtsplus_prompt: CachedPrompt | None = None

    def reorder_cache(self, beam_idx):
        self._select_prompt(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices):
        self._select_prompt(indices)
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats):
        prompt = self._prompt_of_rows()
        if prompt is not None:
            self.qtsplus_prompt = prompt.of_rows(len(prompt.columns) * repeats)
        super().batch_repeat_interleave(repeats)

    def _select_prompt(self, indices):
        prompt = self._prompt_of_rows()
        if prompt is not None:
            self.qtsplus_prompt = prompt.select(indices)

    def _prompt_of_rows(self) -> CachedPrompt | None:
        """The prompt with a row for each of the cache, which has several of each where `generate` searched beams."""
        for layer in self.layers:  # type: ignore[attr-defined]
            keys = getattr(layer, "keys", None)
            if self.qtsplus_prompt is not None and keys is not None and keys.ndim == 4:
                return self.qtsplus_prompt.of_rows(len(keys))
        return self.qtsplus_prompt

    def __reduce__(self):
        stock = type(self).__mro__[2]
        return _empty_cache, (stock,), vars(self)


@cached
def _with_prompt(kind: Any) -> Any:
    """The class of a cache that keeps a prompt; it has the name of the one that it is made of."""
    return type(kind.__name__, (_CacheWithPrompt, kind), {})


def _empty_cache(stock: type) -> Any:
    kind = _with_prompt(stock)
    return kind.__new__(kind)


def check_cache(cache: Any) -> None:
    """Raises `ValueError` for what is no key/value cache, such as the tuples of earlier versions of Transformers."""
    if cache is not None and (isinstance(cache, dict) or not callable(getattr(cache, "update", None))):
        raise ValueError(
            f"The cache (past_key_values) is a {type(cache).__name__}: expected a Cache of Transformers, such as "
            "DynamicCache(config=model.config.get_text_config())."
        )


# --- Generating ---


class _PromptStreamer(BaseStreamer):
    """Shows a streamer the caller's prompt where `generate` would show the shortened one."""

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor):
        self.streamer = streamer
        self.prompt: torch.Tensor | None = prompt

    def put(self, value):
        if self.prompt is not None:
            value, self.prompt = self.prompt.to(value.device), None
        self.streamer.put(value)

    def end(self):
        self.streamer.end()


class QTSplusGenerationMixin:
    """`generate` and the labels of the shortened prompt, for a class whose `model` is a [`QTSplusModelMixin`]."""

    model: Any
    generation_config: Any

    def compact_labels(
        self, labels: torch.Tensor, input_ids: torch.Tensor | None, columns: torch.Tensor
    ) -> torch.Tensor:
        """`[B, S]` labels of the full prompt -> `[B, S']`; padding and placeholders are ignored (-100)."""
        if input_ids is not None:
            labels = labels.masked_fill(self.model.token_types(input_ids) != TEXT, -100)
        return labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)

    def shift_labels(self, labels: torch.Tensor, input_ids: torch.Tensor | None, columns: torch.Tensor) -> torch.Tensor:
        """`[B, S]` labels of the full prompt, each beside the token before its own -> `[B, S']`."""
        unshifted = nn.functional.pad(labels[:, :-1], (1, 0), value=-100)
        return torch.cat([self.compact_labels(unshifted, input_ids, columns)[:, 1:], labels[:, -1:]], dim=1)

    def generate_batch(self, inputs, *args, **kwargs):
        """As stock, of text alone; a `ValueError` for a prompt with an image or a video."""
        for ids in inputs:
            self.model.check_no_placeholders(torch.as_tensor(ids))
        return super().generate_batch(inputs, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """As stock; the manager refuses a prompt with an image or a video."""
        manager = super().init_continuous_batching(*args, **kwargs)
        add_request = type(manager).add_request

        def add_text(input_ids, *args, **kwargs):
            self.model.check_no_placeholders(torch.as_tensor(input_ids))
            return add_request(manager, input_ids, *args, **kwargs)

        manager.add_request = add_text
        return manager

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
        cache, embeds = take_cache(kwargs), kwargs.get("inputs_embeds")
        check_cache(cache)
        if cache is not None:
            kwargs[CACHE] = cache
        if input_ids is None or embeds is not None or "mm_encoder_outputs" in kwargs:
            # Nothing to shorten: embeddings, an empty prompt, or a prompt that this method has shortened already.
            if visual.videos_given or (visual.given and (embeds is None or "mm_encoder_outputs" in kwargs)):
                raise alone_with_ids()
            self.model.check_selected(kwargs.get("mm_encoder_outputs"))
            if visual.given:
                kwargs["image_grid_thw"] = visual.image_grid_thw
                kwargs["mm_encoder_outputs"] = self.model.encode_images(self.model.image_ids(embeds), visual)
            return super().generate(input_ids, generation_config, streamer=streamer, **kwargs)
        kwargs.pop("mm_token_type_ids", None)  # found in input_ids
        prompt = (input_ids, kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None))
        if prompt[1] is None:
            check_no_padding(input_ids, self.generation_config.pad_token_id)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"The cache holds {cache.get_seq_length()} columns of an earlier prompt: expected an empty one. Each "
                "question chooses its own visual tokens; give encoded videos as video_features=, and they wait for it."
            )
        shortened = self.model.shorten(*prompt, visual, selection, sample_gate=False, pad_left=True)
        return self.generate_from(shortened, generation_config, streamer, **kwargs)

    @torch.no_grad()
    def generate_from(self, prompt: CompactPrompt, generation_config=None, streamer=None, **kwargs):
        """[`generate`] from a prompt that has been shortened already, padded on the left."""
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError('cache_implementation="paged" cannot take a prompt with selected visual tokens.')
        # As `generate` finds them: in the call, in the configuration passed with it, or in the model's own.
        configs = [vars(config) for config in (self.generation_config, generation_config) if config is not None]
        settings = {name: value for config in configs for name, value in config.items() if value is not None}
        settings.update(kwargs)  # where a None is said, and counts
        chunk_size = settings.get("prefill_chunk_size")
        if chunk_size is not None and prompt.features and not _SPLITS_FEATURES:
            raise ValueError(f"prefill_chunk_size={chunk_size} needs Transformers 5.23 or later beside videos.")
        source_ids = prompt.source_ids
        generation_config, kwargs = self._count_new_tokens(generation_config, kwargs, settings, source_ids.shape[1])
        result = super().generate(
            prompt.input_ids,
            generation_config,
            streamer=None if streamer is None else _PromptStreamer(streamer, source_ids),
            attention_mask=prompt.attention_mask,
            position_ids=prompt.position_ids,
            mm_encoder_outputs=prompt.selected,
            **kwargs,
        )

        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        generated = sequences[:, prompt.input_ids.shape[1] :]
        CachedPrompt.of(prompt).keep_with(kwargs.get(CACHE))
        front = source_ids.repeat_interleave(len(sequences) // len(source_ids), dim=0).to(generated.device)
        sequences = torch.cat([front, generated], dim=1)
        if isinstance(result, torch.Tensor):
            return sequences
        result.sequences = sequences
        result.qtsplus = prompt.qtsplus
        CachedPrompt.of(prompt).keep_with(result.get(CACHE))
        return result

    def _count_new_tokens(self, generation_config, kwargs, settings, prompt_length: int):
        """Says lengths in new tokens, for those that count the prompt would count the shortened one."""
        config = copy.deepcopy(generation_config)
        for total, new, least in (("max_length", "max_new_tokens", 1), ("min_length", "min_new_tokens", 0)):
            length = settings.get(total)
            if settings.get(new) is None and length:
                if length - prompt_length < least and total == "max_length":
                    raise ValueError(f"max_length={length}, the prompt has {prompt_length} tokens: set max_new_tokens.")
                kwargs[new] = max(length - prompt_length, least)
            kwargs.pop(total, None)
            if config is not None:
                setattr(config, total, None)
        return config, kwargs

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        outputs = model_kwargs.pop("mm_encoder_outputs", None)
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        if outputs is not None:
            model_kwargs["mm_encoder_outputs"] = {
                name: SelectedFeatures(
                    pooler_output=tuple(row for row in selected.pooler_output for _ in range(expand_size))
                )
                for name, selected in outputs.items()
            }
        return input_ids, model_kwargs

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, is_first_iteration=False, **kwargs):
        # Transformers looks for `inputs_embeds` in this signature.
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        cache = kwargs.get(CACHE)
        if not is_first_iteration and kwargs.get("use_cache", True) and cache is not None and cache.get_seq_length():
            inputs.pop("mm_encoder_outputs", None)  # Transformers below 5.18 does not know that these belong to prefill
        elif kwargs.get("mm_encoder_outputs"):  # an assistant's prefill is not called the first
            inputs["mm_encoder_outputs"] = kwargs["mm_encoder_outputs"]
        return inputs


def states_of(
    hidden_states: torch.Tensor,
    columns: torch.Tensor,
    logits_to_keep: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    length: int,
) -> torch.Tensor:
    """`[B, K, d]` of the `K` columns of the full prompt that `logits_to_keep` means, from `[B, S', d]`."""
    wanted = torch.arange(length, device=columns.device)
    wanted = wanted[-logits_to_keep:] if isinstance(logits_to_keep, int) else wanted[logits_to_keep.to(wanted.device)]
    place = places(columns, length)[:, wanted]
    gone = place < 0 if attention_mask is None else (place < 0) & attention_mask.bool()[:, wanted]
    if bool(gone.any()):
        row, index = gone.nonzero()[0].tolist()
        raise ValueError(
            f"logits_to_keep names column {int(wanted[index])}, in row {row} a visual token that was not kept: "
            "expected columns of text. output.qtsplus.columns says which columns are left."
        )
    return hidden_states.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, hidden_states.shape[-1]))


def places(columns: torch.Tensor, length: int) -> torch.Tensor:
    """`[B, S]`, where each column of the full prompt stands in the shortened one; -1 for those that went."""
    place = columns.new_full((len(columns), length + 1), -1)
    shortened = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    return place.scatter(1, columns.masked_fill(columns < 0, length), shortened)[:, :length]

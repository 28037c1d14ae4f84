"""What stock's models do, as ours do it: load, save with their code, and generate, also from a conversation's cache."""

import copy
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.generation.streamers import BaseStreamer

from .layout_qtsplus import full_mask
from .prompt_qtsplus import (
    CACHE,
    IMAGE,
    MODALITIES,
    TEXT,
    VIDEO,
    CompactPrompt,
    SelectedFeatures,
    SelectionInputs,
    VisualInputs,
    alone_with_ids,
    lay_positions,
    pad_rows,
    take_cache,
    take_inputs,
    text_positions,
)
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
        """As stock; the selector, whose attention is its own, is left out."""
        if isinstance(attn_implementation, str):
            parts = [name for name in self.config.sub_configs if name != "qtsplus_config"]
            attn_implementation = {"": attn_implementation, **dict.fromkeys(parts, attn_implementation)}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

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


# --- Generating ---


@dataclass
class CachedPrompt:
    """What a key/value cache that `generate` filled stands for; kept on the cache as `qtsplus` for the next turn."""

    compact: CompactPrompt
    generated: torch.Tensor  # [B, g], behind the prompt

    @property
    def rows(self) -> list[torch.Tensor]:
        """Per row, the real tokens of the caller's prompt."""
        pairs = zip(self.compact.source_ids, self.compact.source_mask.bool(), strict=True)
        return [ids[real] for ids, real in pairs]


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
            cache (`Cache`, *optional*): that of an earlier `generate` on the same conversation; or `past_key_values`.
                What it holds is neither encoded nor selected again, and need not be passed again as pixels. What is new
                is text alone.
            kwargs: as stock, and the fields of [`VisualInputs`] and [`SelectionInputs`], such as `retention`.

        Returns:
            as stock; with `return_dict_in_generate=True` the output carries `qtsplus`, a [`QTSplusOutput`].
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        visual, selection = take_inputs(kwargs)
        cache, embeds = take_cache(kwargs), kwargs.get("inputs_embeds")
        if cache is not None:
            kwargs[CACHE] = cache
        if input_ids is None or embeds is not None or "mm_encoder_outputs" in kwargs:
            # Nothing to shorten: embeddings, an empty prompt, or a prompt that this method has shortened already.
            if visual.given:
                raise alone_with_ids()
            self.model.check_selected(kwargs.get("mm_encoder_outputs"))
            return super().generate(input_ids, generation_config, streamer=streamer, **kwargs)
        kwargs.pop("mm_token_type_ids", None)  # found in input_ids
        prompt = (input_ids, kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None))
        if cache is None or cache.get_seq_length() == 0:
            shortened = self.model.shorten(*prompt, visual, selection, sample_gate=False, pad_left=True)
        else:
            shortened = self._continue(cache, *prompt[:2], visual, selection)
        return self.generate_from(shortened, generation_config, streamer, **kwargs)

    @torch.no_grad()
    def generate_from(self, prompt: CompactPrompt, generation_config=None, streamer=None, **kwargs):
        """[`generate`] from a prompt that has been shortened already, padded on the left."""
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError('cache_implementation="paged" cannot take a prompt with selected visual tokens.')
        # As `generate` finds them: in the call, in the configuration passed with it, or in the model's own.
        configs = [vars(config) for config in (self.generation_config, generation_config) if config is not None]
        settings = {name: value for one in (*configs, kwargs) for name, value in one.items() if value is not None}
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
        copies = len(sequences) // len(source_ids)
        front = source_ids.repeat_interleave(copies, dim=0).to(generated.device)
        sequences = torch.cat([front, generated], dim=1)
        cache = kwargs.get(CACHE) if isinstance(result, torch.Tensor) else result.get(CACHE)
        if cache is not None:
            prompt.features, prompt.selected = {}, {}
            # A cache with a row for every beam or copy cannot be continued with one row for every prompt.
            # Layers of linear attention have a state in place of keys.
            keys = (getattr(layer, "keys", None) for layer in cache.layers)
            whole = copies == 1 and next(len(rows) for rows in keys if rows is not None) == len(source_ids)
            cache.qtsplus = CachedPrompt(prompt, generated) if whole else None
        if isinstance(result, torch.Tensor):
            return sequences
        result.sequences = sequences
        result.qtsplus = prompt.qtsplus
        return result

    def _continue(
        self, cache: Cache, input_ids, attention_mask, visual: VisualInputs, selection: SelectionInputs
    ) -> CompactPrompt:
        """The shortened prompt of the next turn: the columns that the cache holds, then the text that is new."""
        mask = full_mask(input_ids, attention_mask)
        rows = [ids[real] for ids, real in zip(input_ids, mask.bool(), strict=True)]
        state = getattr(cache, "qtsplus", None)
        if not isinstance(state, CachedPrompt) or len(state.rows) != len(rows):
            raise ValueError(
                f"The cache holds {cache.get_seq_length()} columns that no generate call of this model with one "
                f"sequence for each of the {len(rows)} prompts left there: start with an empty cache, without beams "
                "and with num_return_sequences=1."
            )
        old = state.compact
        answer = state.generated[:, : cache.get_seq_length() - old.input_ids.shape[1]].to(old.input_ids.device)
        fresh_rows, answer_mask = _behind_the_cache(state, rows, answer)
        starts = (old.next_position + answer_mask.sum(1)).tolist()
        fresh_ids = pad_rows(fresh_rows, 0, left=True)
        fresh_mask = pad_rows([torch.ones_like(row) for row in fresh_rows], 0, left=True)
        types = self.model.token_types(fresh_ids * fresh_mask)
        for modality, grid in ((IMAGE, visual.image_grid_thw), (VIDEO, visual.video_grid_thw)):
            cached = sum(old.counts[modality])
            if bool((types == modality).any()) or (grid is not None and len(grid) != cached):
                raise ValueError(
                    f"New {MODALITIES[modality]}s in a later turn, beside the {cached} that the cache holds: expected "
                    "text alone. Start with an empty cache."
                )
        selection = replace(selection, query_mask=None)  # the question of the new turn is found in the new tokens
        call = {"sample_gate": False, "pad_left": True, "starts": starts}
        fresh = self.model.shorten(fresh_ids, fresh_mask, None, VisualInputs(), selection, **call)
        attention_mask = torch.cat([old.attention_mask, answer_mask, fresh.attention_mask], dim=1)
        if self.model.recurrent and bool((attention_mask.diff(dim=1) < 0).any()):
            raise ValueError(
                "The cache carries a state from token to token, which cannot leave out tokens in the middle: "
                "pass the answers as they were generated, with new turns of one length, or start with an empty cache."
            )
        answered = old.next_position[:, None] + torch.arange(answer.shape[1], device=answer.device)
        before, behind = (self.model.language_axes(prompt.position_ids) for prompt in (old, fresh))
        language = torch.cat([before, answered.expand(len(before), -1, -1), behind], dim=2)
        return replace(
            fresh,
            input_ids=torch.cat([old.input_ids, answer, fresh.input_ids], dim=1),
            attention_mask=attention_mask,
            position_ids=lay_positions(text_positions(attention_mask), language),
            source_ids=input_ids,
            source_mask=mask,
            counts=old.counts,
        )

    def _count_new_tokens(self, generation_config, kwargs, settings, prompt_length: int):
        """Says lengths in new tokens, for those that count the prompt would count the shortened one."""
        config = copy.deepcopy(generation_config)
        for total, new, least in (("max_length", "max_new_tokens", 1), ("min_length", "min_new_tokens", 0)):
            length = settings.get(total)
            if new not in settings and length:
                if length - prompt_length < least and total == "max_length":
                    raise ValueError(
                        f"max_length={length}, but the prompt alone has {prompt_length} tokens: set max_new_tokens."
                    )
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
        elif kwargs.get("mm_encoder_outputs"):
            inputs["mm_encoder_outputs"] = kwargs[
                "mm_encoder_outputs"
            ]  # an assistant's prefill is not called the first
        return inputs


def _behind_the_cache(
    state: CachedPrompt, rows: list[torch.Tensor], answer: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What is new in each row of a conversation, and which tokens `[B, g]` of the cached answer stand in it."""
    fresh_rows, answer_mask = [], torch.zeros_like(answer)
    for b, (known, ids) in enumerate(zip(state.rows, rows, strict=True)):
        if len(ids) <= len(known) or not torch.equal(ids[: len(known)].to(known.device), known):
            raise ValueError(
                f"Row {b} does not begin with the {len(known)} tokens of the prompt that filled the cache: pass "
                "the whole conversation, with the earlier prompt and its answer."
            )
        # The caller's text decides how much of the cached answer stands; at least one token must be new.
        rest = ids[len(known) :].to(answer.device)
        limit = min(answer.shape[1], len(rest) - 1)
        differs = (rest[:limit] != answer[b, :limit]).nonzero()
        same = int(differs[0]) if len(differs) else limit
        answer_mask[b, :same] = 1
        fresh_rows.append(rest[same:])
    return fresh_rows, answer_mask


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

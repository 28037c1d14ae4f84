"""Generation from a shortened prompt: `generate` as users know it, and the next turn from a conversation's cache."""

import copy
from dataclasses import dataclass, replace

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from .prompt_qtsplus import (
    IMAGE,
    KINDS,
    TEXT,
    VIDEO,
    CompactPrompt,
    SelectedFeatures,
    VisualSpan,
    pad_rows,
    text_positions,
)

_PIXELS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "video_features",
)
_SPLITS_FEATURES = Version(transformers.__version__) >= Version("5.23")  # along with the chunks of a prompt
_CALL = ("query_mask", "query_input_ids", "query_attention_mask", "retention", "max_visual_tokens")


@dataclass
class CachedPrompt:
    """What a key/value cache that `generate` filled stands for; kept on the cache as `qtsplus` for the next turn."""

    rows: list[torch.Tensor]  # per row, the real tokens of the caller's prompt
    compact: CompactPrompt
    generated: torch.Tensor  # [B, g], behind the prompt
    counts: dict[int, list[int]]  # per kind and row, images and videos in the prompt


class _PromptStreamer(BaseStreamer):
    """Shows a streamer the caller's prompt where `generate` would show the shortened one."""

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor):
        self.streamer, self.prompt = streamer, prompt

    def put(self, value):
        if self.prompt is not None:
            value, self.prompt = self.prompt.to(value.device), None
        self.streamer.put(value)

    def end(self):
        self.streamer.end()


class QTSplusGenerationMixin:
    """`generate` and the labels of the shortened prompt, for a class whose `model` is a [`QTSplusModelMixin`]."""

    def compact_labels(
        self, labels: torch.Tensor, input_ids: torch.Tensor | None, columns: torch.Tensor
    ) -> torch.Tensor:
        """`[B, S]` labels of the full prompt -> `[B, S']`; padding and placeholders are ignored (-100)."""
        if input_ids is not None:
            labels = labels.masked_fill(self.model.token_types(input_ids) != TEXT, -100)
        return labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)

    @torch.no_grad()
    def generate(self, inputs=None, generation_config=None, streamer=None, **kwargs):
        """
        As [`~GenerationMixin.generate`], from the shortened prompt. The returned sequences begin with the caller's own
        `input_ids`. Everything between (logits processors, stopping criteria, the cache, attentions) sees the shortened
        prompt.

        Args:
            video_features (`list[torch.Tensor]`, *optional*): per video `[k, d]`, as `encode_videos` returns them, in
                the place of `pixel_values_videos`.
            retention (`float`, *optional*): keep this fraction of the visual tokens, in (0, 1].
            max_visual_tokens (`int`, *optional*): keep at most this many.
            past_key_values (`Cache`, *optional*): a cache from an earlier `generate` on the same conversation. What it
                holds is neither encoded nor selected again, and need not be passed again as pixels.

        Returns:
            as stock; with `return_dict_in_generate=True` the output carries `qtsplus`, a [`QTSplusOutput`].
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None or kwargs.get("inputs_embeds") is not None or "mm_encoder_outputs" in kwargs:
            if any(kwargs.get(name) is not None for name in ("pixel_values", "pixel_values_videos", "video_features")):
                raise ValueError("generate selects visual tokens by input_ids: pass them instead of inputs_embeds.")
            self.model.check_selected(kwargs.get("mm_encoder_outputs"))
            # Nothing to shorten: embeddings, an empty prompt, or a prompt that this method has shortened already.
            return super().generate(input_ids, generation_config, streamer=streamer, **kwargs)
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError('cache_implementation="paged" cannot take a prompt with selected visual tokens.')

        pixels = {name: kwargs.pop(name, None) for name in _PIXELS}
        call = {name: kwargs.pop(name, None) for name in _CALL}
        attention_mask, position_ids = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
        kwargs.pop("mm_token_type_ids", None)  # found in input_ids
        cache = kwargs.get("past_key_values")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(attention_mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}."
            )
        rows = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]

        if cache is None or cache.get_seq_length() == 0:
            prompt = self.model.compress(
                input_ids, attention_mask, position_ids, **pixels, **call, sample_gate=False, pad_left=True
            )
            counts = _count_spans(prompt.spans)
        else:
            prompt, counts = self._continue(cache, rows, pixels, call)
        chunk_size = self._setting("prefill_chunk_size", kwargs, generation_config)
        if chunk_size is not None and prompt.features and not _SPLITS_FEATURES:
            raise ValueError(
                f"prefill_chunk_size={chunk_size}: Transformers {transformers.__version__} cannot cut visual features "
                "into chunks; 5.23 and later can. Leave it out, or upgrade."
            )
        generation_config, kwargs = self._count_new_tokens(generation_config, kwargs, input_ids.shape[1])

        result = super().generate(
            prompt.input_ids,
            generation_config,
            streamer=None if streamer is None else _PromptStreamer(streamer, input_ids),
            attention_mask=prompt.attention_mask,
            position_ids=prompt.position_ids,
            mm_encoder_outputs={
                name: SelectedFeatures(pooler_output=tuple(features)) for name, features in prompt.features.items()
            },
            **kwargs,
        )

        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        generated = sequences[:, prompt.input_ids.shape[1] :]
        copies = len(sequences) // len(input_ids)
        sequences = torch.cat([input_ids.repeat_interleave(copies, dim=0).to(generated.device), generated], dim=1)
        cache = cache if isinstance(result, torch.Tensor) else result.get("past_key_values")
        if cache is not None:
            prompt.features = {}
            # A cache with a row for every beam or copy cannot be continued with one row for every prompt.
            whole = copies == 1 and len(cache.layers[0].keys) == len(input_ids)
            cache.qtsplus = CachedPrompt(rows, prompt, generated, counts) if whole else None
        if isinstance(result, torch.Tensor):
            return sequences
        result.sequences = sequences
        result.qtsplus = prompt.qtsplus
        return result

    def _continue(self, cache: Cache, rows, pixels, call) -> tuple[CompactPrompt, dict[int, list[int]]]:
        """The shortened prompt of the next turn: the columns that the cache holds, then what is new in `rows`."""
        state = getattr(cache, "qtsplus", None)
        if not isinstance(state, CachedPrompt) or len(state.rows) != len(rows):
            raise ValueError(
                f"past_key_values holds {cache.get_seq_length()} columns that no generate call of this model with one "
                f"sequence for each of the {len(rows)} prompts left there: start with an empty cache, without beams "
                "and with num_return_sequences=1."
            )
        if call["query_mask"] is not None:
            call = {**call, "query_mask": None}  # the question of the new turn is found in the new tokens
        old = state.compact
        device = old.input_ids.device
        answer = state.generated[:, : cache.get_seq_length() - old.input_ids.shape[1]].to(device)
        answer_mask = torch.zeros_like(answer)
        fresh_rows, starts = [], []
        for b, (known, ids) in enumerate(zip(state.rows, rows, strict=True)):
            if len(ids) <= len(known) or not torch.equal(ids[: len(known)].to(known.device), known):
                raise ValueError(
                    f"Row {b} does not begin with the {len(known)} tokens of the prompt that filled past_key_values: "
                    "pass the whole conversation, with the earlier prompt and its answer."
                )
            # The caller's text decides how much of the cached answer stands; at least one token must be new.
            rest = ids[len(known) :].to(device)
            limit = min(answer.shape[1], len(rest) - 1)
            differs = (rest[:limit] != answer[b, :limit]).nonzero()
            same = int(differs[0]) if len(differs) else limit
            answer_mask[b, :same] = 1
            starts.append(int(old.next_position[b]) + same)
            fresh_rows.append(rest[same:])

        fresh_ids = pad_rows(fresh_rows, 0, left=True)
        fresh_mask = pad_rows([torch.ones_like(row) for row in fresh_rows], 0, left=True)
        counts, pixels = self._uncached_pixels(pixels, state.counts, fresh_ids * fresh_mask)
        fresh = self.model.compress(
            fresh_ids, fresh_mask, **pixels, **call, sample_gate=False, pad_left=True, start_positions=starts
        )
        attention_mask = torch.cat([old.attention_mask, answer_mask, fresh.attention_mask], dim=1)
        answered = old.next_position[:, None] + torch.arange(answer.shape[1], device=device)
        before, behind = (self.model.language_axes(prompt.position_ids) for prompt in (old, fresh))
        language = torch.cat([before, answered.expand(len(before), -1, -1), behind], dim=2)
        return replace(
            fresh,
            input_ids=torch.cat([old.input_ids, answer, fresh.input_ids], dim=1),
            attention_mask=attention_mask,
            position_ids=self.model.lay_positions(text_positions(attention_mask), language),
        ), counts

    def _uncached_pixels(self, pixels, cached: dict[int, list[int]], fresh_ids: torch.Tensor):
        """Drops the images and videos that stand in the cache; returns the conversation's counts and the rest."""
        pixels, counts = dict(pixels), {}
        types = self.model.token_types(fresh_ids)
        for kind, values, grid in ((IMAGE, *_PIXELS[:2]), (VIDEO, *_PIXELS[2:4])):
            placeholders = (types == kind).sum(1).tolist()
            counts[kind] = list(cached[kind])
            if pixels[grid] is None:
                continue
            lengths = self.model.placeholder_counts(kind, pixels[grid])
            only_new = sum(lengths) == sum(placeholders)
            is_new: list[bool] = []
            for row, left in enumerate(placeholders):
                is_new += [False] * (0 if only_new else cached[kind][row])
                while left > 0 and len(is_new) < len(lengths):
                    left -= lengths[len(is_new)]
                    is_new.append(True)
                    counts[kind][row] += 1
            if only_new:
                continue
            if len(is_new) != len(lengths):
                raise ValueError(
                    f"{len(lengths)} {KINDS[kind]}s were given: expected the {sum(is_new)} that the cache does not "
                    f"hold, or all {len(is_new)} of the conversation."
                )
            flags = torch.tensor(is_new)
            if pixels[values] is not None:
                rows = torch.tensor(self.model.pixel_rows(pixels[grid]))
                pixels[values] = pixels[values][flags.repeat_interleave(rows).to(pixels[values].device)]
            if kind == VIDEO and pixels["video_features"] is not None:
                features = list(pixels["video_features"])
                if len(features) != len(is_new):
                    raise ValueError(f"{len(features)} video_features: expected one per video ({len(is_new)}).")
                pixels["video_features"] = [features[i] for i in flags.nonzero()[:, 0]] or None
            pixels[grid] = pixels[grid][flags.to(pixels[grid].device)]
            if kind == VIDEO and pixels["second_per_grid_ts"] is not None:
                seconds = zip(pixels["second_per_grid_ts"], is_new, strict=True)
                pixels["second_per_grid_ts"] = [one for one, new_one in seconds if new_one]
            if not any(is_new):
                pixels.update({values: None, grid: None})
        return counts, pixels

    def _setting(self, name: str, kwargs, generation_config):
        """What `generate` goes by: the call, the configuration given with it, the model's own."""
        for value in (
            kwargs.get(name),
            getattr(generation_config, name, None),
            getattr(self.generation_config, name, None),
        ):
            if value is not None:
                return value
        return None

    def _count_new_tokens(self, generation_config, kwargs, prompt_length: int):
        """Lengths that count the prompt would count the shortened one: says them in new tokens instead."""
        given = copy.deepcopy(generation_config)
        for total, new, least in (("max_length", "max_new_tokens", 1), ("min_length", "min_new_tokens", 0)):
            length = self._setting(total, kwargs, given)
            if self._setting(new, kwargs, given) is None and length:
                if length - prompt_length < least and total == "max_length":
                    raise ValueError(
                        f"max_length={length}, but the prompt alone has {prompt_length} tokens: set max_new_tokens."
                    )
                kwargs[new] = max(length - prompt_length, least)
            kwargs.pop(total, None)
            if given is not None:
                setattr(given, total, None)
        return given, kwargs

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        outputs = model_kwargs.pop("mm_encoder_outputs", None)
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        if outputs is not None:
            model_kwargs["mm_encoder_outputs"] = {
                name: SelectedFeatures(pooler_output=tuple(f for f in one.pooler_output for _ in range(expand_size)))
                for name, one in outputs.items()
            }
        return input_ids, model_kwargs

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, is_first_iteration=False, **kwargs):
        # Transformers looks for `inputs_embeds` in this signature.
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            inputs.pop("mm_encoder_outputs", None)  # Transformers below 5.18 does not know that these belong to prefill
        return inputs


def _count_spans(spans: list[list[VisualSpan]]) -> dict[int, list[int]]:
    return {kind: [len({span.index for span in row if span.kind == kind}) for row in spans] for kind in KINDS}

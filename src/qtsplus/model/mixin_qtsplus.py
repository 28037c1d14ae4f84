"""What every video language model with the selector shares: the way through the selection, `forward` and its loss.
[`QTSplusModelMixin`] stands in front of a backbone's model, [`QTSplusHeadMixin`] in front of the class with a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import torch_compilable_check

from .columns_qtsplus import CachedPrompt, KeptColumns, check_cache
from .encoding_qtsplus import Device, PatchProjection, encode_modality, encode_visual, tower_inputs
from .generation_qtsplus import QTSplusGenerationMixin
from .layout_qtsplus import QTSplusBackboneMixin, are_packed, check_grids, lay_out
from .lm_attention_qtsplus import GroupAttention, check_attention, log_attention, read_group, reading_of
from .methods_qtsplus import take_rows
from .prompt_qtsplus import (
    CACHE,
    IMAGE,
    MODALITIES,
    NAMES,
    TEXT,
    VIDEO,
    CompactPrompt,
    Features,
    Layout,
    SelectedFeatures,
    SelectionInputs,
    VisualInputs,
    alone_with_ids,
    lay_positions,
    names_inputs,
    query_embeds,
    splice,
    take_inputs,
    text_positions,
)
from .question_qtsplus import question_token_ids
from .selector_qtsplus import QTSplusOutput, QTSplusSelector, Selected


@dataclass
class QTSplusModelOutputWithPast(BaseModelOutputWithPast):
    """
    A backbone's output with the selector's decisions as `qtsplus` ([`QTSplusOutput`]; `None` without vision). Unlike in
    stock, `image_outputs` and `video_outputs` hold what selection left, per row `[k, token_width]`.
    """

    image_outputs: SelectedFeatures | None = None
    video_outputs: SelectedFeatures | None = None
    qtsplus: QTSplusOutput | None = None


@dataclass
class QTSplusCausalLMOutputWithPast(CausalLMOutputWithPast):
    """
    As the stock output, over the shortened prompt, with the selector's decisions as `qtsplus`. `loss` in training is
    the language-modelling loss plus `qtsplus.loss_t + qtsplus.loss_m + qtsplus.loss_s`; in evaluation only the former.
    """

    image_outputs: SelectedFeatures | None = None
    video_outputs: SelectedFeatures | None = None
    qtsplus: QTSplusOutput | None = None


def choose(
    model: "QTSplusModelMixin",
    layout: Layout,
    features: Features,
    selection: SelectionInputs,
    *,
    sample_gate: bool | None = None,
    is_checked: bool = False,
) -> Selected:
    """
    Per row the kept tokens `[n_b, token_width]`, and how they were chosen.

    Args:
        sample_gate: as for [`QTSplusSelector`].
        is_checked: whether the features are known to be finite.
    """
    if isinstance(selection.query_mask, Tensor):  # read once for all that look for the question
        selection = replace(selection, query_mask=selection.query_mask.cpu())
    device = layout.source_ids.device
    width = model.config.text_config.hidden_size
    # By identity: rows about the same video share its features.
    moved = {id(tokens): tokens.to(device) for tokens in features[VIDEO]}
    scored = {key: tokens[:, :width] for key, tokens in moved.items()}
    nothing = model.no_features(device)
    nothing_scored = nothing[:, :width]
    sources = []
    visual = []
    positions = []
    grids = []
    for row in layout.rows:
        videos = layout.competing(row)
        keys = [id(features[VIDEO][video.index]) for video in videos]
        sources.append([moved[key] for key in keys] or [nothing])
        visual.append([scored[key] for key in keys] or [nothing_scored])
        positions_of_row = row.positions[:, row.candidates]
        positions.append(positions_of_row.to(device, non_blocking=True))
        grids.append([grid for video in videos for grid in layout.grids_of(video)])
    reading = cache(partial(reading_of, model, layout, selection))
    attention = [
        partial(log_attention, model, reading, index, source, grids[index], features)
        for index, source in enumerate(sources)
    ]
    selected, qtsplus = model.qtsplus(
        visual,
        query_embeds(model, layout, selection),
        positions,
        grids,
        retention=selection.retention,
        max_visual_tokens=selection.max_visual_tokens,
        selection=selection.selection,
        reencode=selection.reencode,
        sample_gate=sample_gate,
        attention=attention,
        unchecked=() if is_checked else list(moved.values()),
    )
    if nothing.shape[1] == width:
        return selected, qtsplus
    # Features that a backbone puts behind a token's own, such as DeepStack's, are kept with the token.
    with_behind = []
    for tokens, parts, kept_indices in zip(selected, sources, qtsplus.kept_indices, strict=True):
        parts_behind = [part[:, width:] for part in parts]
        behind = take_rows(parts_behind, kept_indices.to(device, non_blocking=True), kept_indices)
        with_behind.append(torch.cat([tokens, behind], dim=1))
    return with_behind, qtsplus


class QTSplusModelMixin(QTSplusBackboneMixin):
    """A backbone's model without a head, whose language model reads the shortened prompt; the selector is `qtsplus`."""

    qtsplus: QTSplusSelector
    language_model: Callable
    post_init: Callable[[], None]
    named_parameters: Callable
    rope_deltas: Tensor | None = None  # [B, 1]: how far decoding is from the count of the tokens

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        self.qtsplus = self.build_selector(config)
        self.post_init()

    def group_attention(self, prompt: CompactPrompt, visual: Tensor, place: Tensor) -> GroupAttention:
        """As [`read_group`]. An engine that has layers of its own overrides it."""
        return read_group(self, prompt, visual, place)

    def build_selector(self, config) -> QTSplusSelector:
        """A selector of the language model's shape."""
        text = config.text_config
        selector = config.qtsplus_config
        check_attention(text, selector)
        heads = text.num_attention_heads
        if text.hidden_size % heads:  # as in Qwen3.5-27B, whose heads together are wider than its hidden states
            heads = text.hidden_size // text.head_dim
        half = text.hidden_size // heads // 2
        section = text.rope_parameters.get("mrope_section")
        if section is None or sum(section) != half:  # as Qwen2.5-VL shares them out
            time = half // 4
            height = (half - time) // 2
            section = (time, height, half - time - height)
        return QTSplusSelector(
            selector,
            hidden_size=text.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=text.num_key_value_heads,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            mrope_section=section,
        )

    @torch.no_grad()
    def encode_videos(
        self,
        pixel_values_videos: Tensor,
        video_grid_thw: Tensor,
        *,
        frames_per_chunk: int | None = None,
        device: Device = None,
    ) -> list[Tensor]:
        """
        Encodes videos once, for any number of questions: `forward` and `generate` take what this returns as
        `video_features=`, in place of `pixel_values_videos`. Without gradients; to train the encoder, pass pixels.

        Args:
            pixel_values_videos, video_grid_thw: as the processor returns them; they may stay on the CPU, from where
                one chunk at a time is moved.
            frames_per_chunk: the most frames that are encoded together, but at least one temporal patch; about 16,384
                patches if `None`, and 2,048 on a CPU. Chunks change nothing but the memory in use.
            device: where the features are kept, such as `"cpu"`; the model's if `None`.

        Returns:
            per video `[k, token_width]`, all its visual tokens.

        Raises:
            ValueError: pixels and grids that do not fit each other, or that are not finite; no frame per chunk.
        """
        check_grids(self, VIDEO, pixel_values_videos, video_grid_thw)
        if pixel_values_videos is None:
            raise ValueError("encode_videos got no videos: pass pixel_values_videos and video_grid_thw.")
        return encode_modality(self, VIDEO, pixel_values_videos, video_grid_thw, frames_per_chunk, device)

    def shorten(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        visual: VisualInputs,
        selection: SelectionInputs,
        *,
        sample_gate: bool | None = None,
        pad_left: bool | None = None,
    ) -> CompactPrompt:
        """From the caller's prompts to the shortened ones; see [`lay_out`], [`choose`] and [`splice`]."""
        layout = lay_out(self, visual, input_ids, attention_mask, position_ids)
        features = encode_visual(self, visual, layout.grids)
        is_checked = visual.video_features is None
        selected, qtsplus = choose(self, layout, features, selection, sample_gate=sample_gate, is_checked=is_checked)
        return splice(self, layout, features, selected, qtsplus, pad_left)

    @names_inputs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple | QTSplusModelOutputWithPast:
        """As the stock model, over the shortened prompt; [`VisualInputs`] and [`SelectionInputs`] are ours."""
        self.check_arguments(kwargs)
        visual, selection = take_inputs(kwargs)
        cache = past_key_values if cache is None else cache
        check_cache(cache)
        anchors = self._anchors(input_ids) if self._trains else []
        prompt = None
        selected: dict = mm_encoder_outputs or {}
        if visual.given:
            if inputs_embeds is not None and input_ids is None and not visual.videos_given:
                input_ids = self.image_ids(inputs_embeds)
            elif inputs_embeds is not None or input_ids is None:
                raise alone_with_ids()
            if mm_encoder_outputs:
                raise alone_with_ids()
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError("New images or videos after a cache: expected an empty one.")
            is_packed = attention_mask is None and use_cache is False and are_packed(position_ids)
            if inputs_embeds is not None or (is_packed and not visual.videos_given):
                selected = self.encode_images(input_ids, visual)  # with nothing to select, nothing is laid out again
            else:
                prompt = self.shorten(input_ids, attention_mask, position_ids, visual, selection)
        if prompt is None:
            inputs, qtsplus = self._plain_inputs(
                input_ids, attention_mask, position_ids, inputs_embeds, cache, selected
            )
        else:
            self.rope_deltas = prompt.rope_deltas
            embeds = self.get_input_embeddings()(prompt.input_ids)
            inputs = self.language_inputs(embeds, prompt.input_ids, prompt.features)
            inputs["position_ids"] = prompt.position_ids
            inputs["attention_mask"] = prompt.attention_mask
            if self.rope_axes == 3 and attention_mask is None and bool(prompt.attention_mask.all()):
                # Without a mask, gaps in the positions of a sequence would be read as the seams of packed ones.
                inputs["attention_mask"] = None
            qtsplus = prompt.qtsplus
            selected = prompt.selected
        if anchors:
            zero = torch.stack(anchors).sum() * 0.0
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + zero
        outputs = self.language_model(**{CACHE: cache}, use_cache=use_cache, **inputs, **kwargs)
        if prompt is not None:
            CachedPrompt.of(prompt).keep_with(outputs.get(CACHE))
        elif cache is None and outputs.get(CACHE) is not None:
            outputs.get(CACHE).qtsplus_prompt = None
        encoded = {}
        for name, output in selected.items():
            if any(map(len, output["pooler_output"])):
                encoded[f"{name}_outputs"] = output
        return QTSplusModelOutputWithPast(**outputs, **encoded, qtsplus=qtsplus)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _anchors(self, input_ids: Tensor | None) -> list[Tensor]:
        """
        A scalar of each weight that is trained in front of the language model's layers. They are made before anything
        else, for the reason that the selector's anchor is. Weights that FSDP has sharded are left out.
        """
        anchors = []
        embed = self.get_input_embeddings()
        if input_ids is not None and embed.weight.requires_grad:
            anchors.append(embed(input_ids[:, :1]).sum())
        for name, weight in self.named_parameters():
            is_in_front = not name.startswith(("language_model.", "qtsplus."))
            if is_in_front and weight.requires_grad and type(weight) is nn.Parameter:
                anchors.append(weight.sum())
        return anchors

    def _plain_inputs(
        self, input_ids, attention_mask, position_ids, inputs_embeds, cache, selected: dict
    ) -> tuple[dict, QTSplusOutput | None]:
        """The language model's inputs for a prompt with selected features, or for text only."""
        qtsplus = None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        inputs = {"inputs_embeds": inputs_embeds}
        if selected:
            self.check_selected(selected)
            features = {name: output["pooler_output"] for name, output in selected.items()}
            if input_ids is None:
                input_ids = self.image_ids(inputs_embeds)
            inputs = self.language_inputs(inputs_embeds, input_ids, features)
        if self._trains:
            # The selector takes part in every training step, so that no rank of a distributed run waits for another.
            device = inputs_embeds.device
            rows = len(inputs_embeds)
            nothing = self.no_features(device)[:, : inputs_embeds.shape[-1]]
            no_position = torch.zeros(3, 0, dtype=torch.long, device=device)
            no_tokens = [nothing] * rows
            kept, qtsplus = self.qtsplus(no_tokens, no_tokens, [no_position] * rows)
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + torch.cat(kept).sum()
        past_length = 0  # the columns that are cached
        if cache is not None:
            # A step of decoding that brings its position need not wait for the count; any that are cached count as 1.
            needs_count = (
                position_ids is None or inputs_embeds.shape[1] > 1 or getattr(cache, "qtsplus_prompt", None) is not None
            )
            past_length = int(cache.get_seq_length()) if needs_count else 1
        if past_length == 0 and not selected:
            self.check_no_placeholders(input_ids)
            self.rope_deltas = inputs_embeds.new_zeros((len(inputs_embeds), 1), dtype=torch.long)
        inputs["attention_mask"], inputs["position_ids"] = self._behind(
            cache, past_length, input_ids, inputs_embeds, attention_mask, position_ids
        )
        return inputs, qtsplus

    def _behind(self, cache, past_length: int, input_ids, inputs_embeds, attention_mask, position_ids) -> tuple:
        """The mask, and the positions of new tokens `[B, S]`, behind what is cached."""
        rope_deltas = None
        prompt = getattr(cache, "qtsplus_prompt", None)
        if past_length == 0 and cache is not None:  # a new cache, or one that has been reset
            cache.qtsplus_prompt = None
        elif prompt is not None:
            rows, new = inputs_embeds.shape[:2]
            prompt = prompt.of_rows(rows)
            if new > 1 and input_ids is not None:
                prompt.check_question(input_ids, past_length, question_token_ids(self.config))
            rope_deltas = prompt.rope_deltas
            attention_mask = prompt.shorten_mask(attention_mask, past_length, new)
            if position_ids is not None:
                position_ids = position_ids[..., -new:]  # they may also cover the prompt, in either width
            if self.config.qtsplus_config.position_ids == "sequential":
                position_ids = None  # as in the prompt, where the caller's do not count either
        elif past_length > 0 and position_ids is None:
            was_filled_here = hasattr(cache, "qtsplus_prompt")
            if not was_filled_here and self.rope_deltas is not None and self.rope_deltas.any():
                # The last prompt of this model had images or videos: behind a copy of its cache, the positions of text
                # alone would be wrong.
                raise ValueError(
                    f"The cache holds {past_length} columns, but it is not one that forward returned, so the positions "
                    "behind it are not known. Expected the cache that forward returned, which knows the prompt's "
                    "qtsplus.columns, or the position_ids of the new columns."
                )
        if position_ids is None:
            position_ids = self._positions_after(past_length, inputs_embeds, attention_mask, rope_deltas)
        return attention_mask, position_ids

    def image_ids(self, inputs_embeds: Tensor) -> Tensor:
        """`[B, S]`, the id of an image's placeholder wherever its embedding is, as stock finds them; 0 elsewhere."""
        image_token_id = torch.tensor([[self.config.image_token_id]], device=inputs_embeds.device)
        is_image = (inputs_embeds == self.get_input_embeddings()(image_token_id)).all(-1)
        return is_image * image_token_id

    def encode_images(self, input_ids: Tensor, visual: VisualInputs) -> dict[str, SelectedFeatures]:
        """All features of the images of the prompts `[B, S]`, per row, as `mm_encoder_outputs`."""
        grids = {IMAGE: check_grids(self, IMAGE, visual.pixel_values, visual.image_grid_thw), VIDEO: []}
        features = torch.cat(encode_visual(self, visual, grids)[IMAGE])
        counts = (input_ids == self.config.image_token_id).sum(1).tolist()
        if sum(counts) != len(features):
            raise ValueError(f"{sum(counts)} image placeholders in the prompt for {len(features)} features.")
        return {MODALITIES[IMAGE]: SelectedFeatures(pooler_output=features.split(counts))}

    def check_selected(self, mm_encoder_outputs: dict | None):
        """
        Raises `ValueError` for features that [`shorten`] has not selected, as stock encoders return them. Hooks that
        move a module's inputs, such as llm-compressor's, make a plain dict of those that it has selected.
        """
        for output in (mm_encoder_outputs or {}).values():
            was_selected = isinstance(output, SelectedFeatures)
            was_moved = type(output) is dict and output.keys() == {"pooler_output"}
            if not was_selected and not was_moved:
                raise ValueError("mm_encoder_outputs would bypass the selector: pass pixel values.")

    def check_no_placeholders(self, input_ids: Tensor | None):
        """Raises `ValueError` for placeholders in a prompt that comes without pixels."""
        if input_ids is None:
            return
        for modality, name in MODALITIES.items():
            is_other = self.token_types(input_ids) != modality
            message = f"The prompt has {name} placeholders, but no {name} pixels were given."
            torch_compilable_check(is_other.all(), message)

    def _positions_after(
        self, past_length: int, inputs_embeds: Tensor, attention_mask, rope_deltas: Tensor | None
    ) -> Tensor | None:
        """`position_ids` of `[B, S]` new tokens behind a cache; `None` lets the language model count from 0."""
        rows, length = inputs_embeds.shape[:2]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            width = past_length + length
            if past_length > 0 and attention_mask.shape[1] != width:
                raise ValueError(
                    f"attention_mask {tuple(attention_mask.shape)} behind a cache of {past_length} columns: expected "
                    f"{(rows, width)}. Only the cache that read a prompt with a video knows the prompt's own width."
                )
            order = text_positions(attention_mask)[:, -length:]
        elif past_length == 0:
            return None
        else:
            order = torch.arange(past_length, past_length + length, device=inputs_embeds.device)
            order = order.expand(rows, -1)
        positions = order
        if rope_deltas is not None:
            positions = order + rope_deltas.to(order.device)
        return lay_positions(order, positions.expand(self.rope_axes, -1, -1))


# --- With a language-modelling head ---


class QwenVLQTSplusModelMixin(QTSplusModelMixin):
    """What the Qwen-VL models have in common."""

    visual: nn.Module
    get_image_features: Callable

    def __init__(self, config):
        super().__init__(config)
        self.visual.patch_embed.proj.__class__ = PatchProjection  # type: ignore[union-attr]

    def encode_pixels(self, pixels: Tensor, grid_thw: Tensor) -> list[Tensor]:
        # Videos and images are encoded in the same way.
        encoded = self.get_image_features(pixels, grid_thw, return_dict=True, **tower_inputs(self.visual, grid_thw))
        return encoded.pooler_output


class QTSplusHeadMixin(QTSplusGenerationMixin):
    """Logits, a loss and `generate`, for a class whose `model` is a [`QTSplusModelMixin`] and that has an `lm_head`."""

    accepts_loss_kwargs = False  # a Trainer would divide L_SFT by the tokens of all micro-batches, but no penalty

    lm_head: Callable
    loss_function: Callable
    training: bool
    post_init: Callable[[], None]
    config: Any
    model_class: Any  # of `model`
    stock_class: Any  # of Transformers, that it derives from
    projections = r"self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj"  # of a layer of the language model, for LoRA

    def __init__(self, config):
        super(self.stock_class, self).__init__(config)  # type: ignore[call-arg]  # the stock one would build its own model
        self.model = self.model_class(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    @wraps(QTSplusModelMixin.encode_videos)
    def encode_videos(self, *args, **kwargs) -> list[Tensor]:
        return self.model.encode_videos(*args, **kwargs)

    @names_inputs
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> tuple | QTSplusCausalLMOutputWithPast:
        """
        As the stock class over the shortened prompt: `logits` are `[B, S', vocabulary]`, and `output.qtsplus.columns`
        says which column of `input_ids` each one belongs to. [`VisualInputs`] and [`SelectionInputs`] are ours.

        Args:
            labels: `[B, S]`, those of the full prompt.
            logits_to_keep: the last so many columns, or the columns, of the full prompt; 0 keeps all that are left.

        Raises:
            ValueError: `logits_to_keep` names a visual token that was not kept; inputs that do not fit each other.
        """
        prompt: Any = inputs_embeds if input_ids is None else input_ids
        if labels is not None and prompt is not None and labels.shape != prompt.shape[:2]:
            raise ValueError(
                f"labels {tuple(labels.shape)}: expected the shape of the prompt, {tuple(prompt.shape[:2])}."
            )
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        qtsplus = outputs.qtsplus
        kept = None
        if qtsplus is not None and qtsplus.columns is not None:
            kept = KeptColumns(qtsplus.columns, prompt.shape[1])
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
            wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
            if kept is not None:
                hidden_states = kept.take_states(hidden_states, wanted, attention_mask)
            else:
                hidden_states = hidden_states[:, wanted]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss_options = {name: value for name, value in kwargs.items() if name not in NAMES}
            if kept is not None:
                if loss_options.get("shift_labels") is not None:
                    raise ValueError("Got shift_labels beside images or videos: expected labels, which are shortened.")
                labels = self.compact_labels(labels, input_ids, kept.columns)
            vocab_size = self.config.text_config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **loss_options)
            if self.training and qtsplus is not None:
                loss = loss + qtsplus.loss_t + qtsplus.loss_m + qtsplus.loss_s
        return QTSplusCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            image_outputs=outputs.image_outputs,
            video_outputs=outputs.video_outputs,
            qtsplus=qtsplus,
        )

    def compact_labels(self, labels: Tensor, input_ids: Tensor | None, columns: Tensor) -> Tensor:
        """`[B, S]` labels of the full prompt -> `[B, S']`; padding and placeholders are ignored (-100)."""
        labels = labels.to(columns.device)
        if input_ids is not None:
            is_placeholder = self.model.token_types(input_ids) != TEXT
            labels = labels.masked_fill(is_placeholder, -100)
        kept = KeptColumns(columns, labels.shape[1])
        return kept.shorten(labels).masked_fill(~kept.is_real, -100)

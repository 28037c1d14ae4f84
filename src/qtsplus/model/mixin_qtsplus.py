"""What every video language model with the selector shares: the way through the selection, `forward` and its loss.
[`QTSplusModelMixin`] stands in front of a backbone's model, [`QTSplusHeadMixin`] in front of the class with a head.
"""

from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from .encoding_qtsplus import encode_modality, encode_visual
from .generation_qtsplus import CachedPrompt, QTSplusGenerationMixin, check_cache, places, states_of
from .layout_qtsplus import QTSplusBackboneMixin, are_packed, check_grids, lay_out
from .lm_attention_qtsplus import check_attention, log_attention, reading_of
from .methods_qtsplus import take_rows
from .prompt_qtsplus import (
    CACHE,
    IMAGE,
    MODALITIES,
    NAMES,
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
from .selector_qtsplus import QTSplusOutput, QTSplusSelector


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
) -> tuple[list[torch.Tensor], QTSplusOutput]:
    """
    Per row the kept tokens `[n_b, token_width]`, and how they were chosen.

    Args:
        sample_gate: as for [`QTSplusSelector`].
    """
    device, width = layout.mask.device, model.config.text_config.hidden_size
    # By tensor: rows about the same video share it.
    moved = {id(source): source.to(device) for source in features[VIDEO]}
    moved[0] = model.no_features(device)  # of a row without any
    scored = {key: source[:, :width] for key, source in moved.items()}
    spans = [layout.competing(row) for row in layout.rows]
    grids = [[grid for span in row for grid in layout.grids_of(span)] for row in spans]
    keys = [[id(features[VIDEO][span.index]) for span in row] or [0] for row in spans]
    sources = [[moved[key] for key in row] for row in keys]
    reading = cache(partial(reading_of, model, layout, selection))
    selected, qtsplus = model.qtsplus(
        [[scored[key] for key in row] for row in keys],
        query_embeds(model, layout, selection),
        [row.positions[:, row.candidates] for row in layout.rows],
        grids,
        retention=selection.retention,
        max_visual_tokens=selection.max_visual_tokens,
        selection=selection.selection,
        reencode=selection.reencode,
        sample_gate=sample_gate,
        attention=[
            partial(log_attention, model, reading, row, sources[row], grids[row], features) for row in range(len(spans))
        ],
    )
    if sources[0][0].shape[1] > width:  # what a backbone puts behind a token goes with it
        selected = [
            torch.cat([tokens, take_rows([part[:, width:] for part in parts], kept)], dim=1)
            for tokens, parts, kept in zip(selected, sources, qtsplus.kept_indices, strict=True)
        ]
    return selected, qtsplus


class QTSplusModelMixin(QTSplusBackboneMixin):
    """A backbone's model without a head, whose language model reads the shortened prompt; the selector is `qtsplus`."""

    qtsplus: QTSplusSelector
    language_model: Any
    post_init: Any
    named_parameters: Any
    rope_deltas: Any = None  # [B, 1]: how far decoding stands from the count of the tokens
    # Whether outputs have all columns of the caller's prompt, as trainers that know nothing of selection expect: one
    # that was not kept has the state of the nearest before it. None: not decided, and so not; training says so.
    full_length: bool | None = None

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        self.qtsplus = self.build_selector(config)
        self.post_init()

    def build_selector(self, config) -> QTSplusSelector:
        """A selector of the language model's shape."""
        text, selector = config.text_config, config.qtsplus_config
        check_attention(text, selector)
        heads = text.num_attention_heads
        if text.hidden_size % heads:  # as in Qwen3.5-27B, whose heads together are wider than its hidden states
            heads = text.hidden_size // text.head_dim
        half = text.hidden_size // heads // 2
        section = text.rope_parameters.get("mrope_section")
        if section is None or sum(section) != half:
            time, height = half // 4, (half - half // 4) // 2  # as Qwen2.5-VL shares them out
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
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.Tensor,
        *,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
    ) -> list[torch.Tensor]:
        """
        Encodes videos once, for any number of questions: `forward` and `generate` take what this returns as
        `video_features=`, in place of `pixel_values_videos`. Without gradients; to train the encoder, pass pixels.

        Args:
            pixel_values_videos, video_grid_thw: as the processor returns them; they may stay on the CPU, from where
                one chunk at a time is moved.
            frames_per_chunk: the most frames that are encoded together, but at least one temporal patch; about 16,384
                patches if `None`, and 2,048 on a CPU. Chunks change nothing but the memory in use.
            device: where the features shall live, such as `"cpu"`; the model's if `None`.

        Returns:
            per video `[k, token_width]`, all its visual tokens.

        Raises:
            ValueError: pixels and grids that do not fit each other, or that are not finite; no frame per chunk.
        """
        check_grids(self, VIDEO, pixel_values_videos, video_grid_thw)
        if pixel_values_videos is None:
            raise ValueError("encode_videos got no videos: pass pixel_values_videos and video_grid_thw.")
        if self.device.type != "meta":  # as where weights wait on disk; what brings them in brings the pixels too
            video_grid_thw = video_grid_thw.to(self.device)
        return encode_modality(self, VIDEO, pixel_values_videos, video_grid_thw, frames_per_chunk, device)

    def shorten(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        visual: VisualInputs,
        selection: SelectionInputs,
        *,
        sample_gate: bool | None = None,
        pad_left: bool | None = None,
    ) -> CompactPrompt:
        """From the caller's prompts to the shortened ones; see [`lay_out`], [`choose`] and [`splice`]."""
        layout = lay_out(self, visual, input_ids, attention_mask, position_ids)
        features = encode_visual(self, visual, layout.grids)
        selected, qtsplus = choose(self, layout, features, selection, sample_gate=sample_gate)
        return splice(self, layout, features, selected, qtsplus, pad_left)

    @names_inputs
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
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
        qtsplus: QTSplusOutput | None
        selected: dict[str, Any] = mm_encoder_outputs or {}
        prompt: CompactPrompt | None = None
        anchors = self._anchors(input_ids) if self.training and torch.is_grad_enabled() else []
        if visual.given:
            if inputs_embeds is not None and input_ids is None and not visual.videos_given:
                input_ids = self.image_ids(inputs_embeds)
            elif inputs_embeds is not None:
                raise alone_with_ids()
            if input_ids is None or mm_encoder_outputs:
                raise alone_with_ids()
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError("New images or videos after a cache: expected an empty one.")
            is_packed = attention_mask is None and use_cache is False and are_packed(position_ids)
            if inputs_embeds is not None or (is_packed and not visual.videos_given):
                selected = self.encode_images(input_ids, visual)  # with nothing to select, nothing is laid out again
            else:
                prompt = self.shorten(input_ids, attention_mask, position_ids, visual, selection)
        if prompt is None:
            plain = (input_ids, attention_mask, position_ids, inputs_embeds)
            inputs, qtsplus = self._plain_inputs(*plain, cache, selected)
        else:
            inputs, qtsplus = self._shortened_inputs(prompt, attention_mask is not None), prompt.qtsplus
            selected = prompt.selected
        if anchors:
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + torch.stack(anchors).sum() * 0.0
        outputs = self.language_model(**{CACHE: cache}, use_cache=use_cache, **inputs, **kwargs)
        if prompt is not None:
            CachedPrompt.of(prompt).keep_with(outputs.get(CACHE))
            if self.full_length:
                self._lengthen(outputs, prompt)
        encoded = {}
        for name, output in selected.items():
            if any(len(features) for features in output["pooler_output"]):
                encoded[f"{name}_outputs"] = output
        return QTSplusModelOutputWithPast(**outputs, **encoded, qtsplus=qtsplus)

    @staticmethod
    def _lengthen(outputs: Any, prompt: CompactPrompt) -> None:
        """Gives the states all columns of the caller's prompt; `qtsplus.columns` is -1 for those that went."""
        length = prompt.source_ids.shape[1]
        place = places(prompt.qtsplus.columns, length)  # type: ignore[arg-type]
        nearest = place.cummax(1).values.clamp(min=0)[..., None]

        def lengthen(states: torch.Tensor) -> torch.Tensor:
            return states.gather(1, nearest.expand(-1, -1, states.shape[-1]))

        outputs.last_hidden_state = lengthen(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(map(lengthen, outputs.hidden_states))
        everything = torch.arange(length, device=place.device).expand_as(place)
        prompt.qtsplus.columns = everything.masked_fill(place < 0, -1)

    def _anchors(self, input_ids: torch.Tensor | None) -> list[torch.Tensor]:
        """
        A scalar of each weight that is trained in front of the language model's layers. They are made before anything
        else, for the reason that the selector's anchor is. Weights that FSDP has sharded are left out.
        """
        embed, apart = self.get_input_embeddings(), ("language_model.", "qtsplus.")
        first = [] if input_ids is None or not embed.weight.requires_grad else [embed(input_ids[:, :1]).sum()]
        trained = ((name, weight) for name, weight in self.named_parameters() if weight.requires_grad)
        in_front = [weight for name, weight in trained if not name.startswith(apart)]
        return first + [weight.sum() for weight in in_front if type(weight) is nn.Parameter]

    def _shortened_inputs(self, prompt: CompactPrompt, masked: bool) -> dict[str, Any]:
        """The language model's inputs for a prompt with pixels or features, which came with a mask or not."""
        inputs_embeds = self.get_input_embeddings()(prompt.input_ids)
        self.rope_deltas = (prompt.next_position - prompt.attention_mask.sum(-1))[:, None]
        # Without a mask, gaps in the positions of a sequence would be read as the seams of packed ones.
        unmasked = self.rope_axes == 3 and not masked and bool(prompt.attention_mask.all())
        return {
            **self.language_inputs(inputs_embeds, prompt.input_ids, prompt.features),
            "attention_mask": None if unmasked else prompt.attention_mask,
            "position_ids": prompt.position_ids,
        }

    def _plain_inputs(
        self, input_ids, attention_mask, position_ids, inputs_embeds, cache, mm_encoder_outputs
    ) -> tuple[dict[str, Any], QTSplusOutput | None]:
        """The language model's inputs for a prompt with selected features, or for text only."""
        qtsplus = None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        inputs = {"inputs_embeds": inputs_embeds}
        if mm_encoder_outputs:
            self.check_selected(mm_encoder_outputs)
            features = {name: output["pooler_output"] for name, output in mm_encoder_outputs.items()}
            if input_ids is None:
                input_ids = self.image_ids(inputs_embeds)
            inputs = self.language_inputs(inputs_embeds, input_ids, features)
        if self.training and torch.is_grad_enabled():
            # The selector takes part in every training step, so that no rank of a distributed run waits for another.
            nothing = self.no_features(inputs_embeds.device)[:, : inputs_embeds.shape[-1]]
            rows, no_position = len(inputs_embeds), torch.zeros(3, 0, dtype=torch.long, device=inputs_embeds.device)
            kept, qtsplus = self.qtsplus([nothing] * rows, [nothing] * rows, [no_position] * rows)
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + torch.cat(kept).sum()
        past_length = 0
        cached_prompt = CachedPrompt.kept_with(cache)
        if cache is not None:
            # A step of decoding need not wait for the count; the cache of continuous batching has none.
            several = inputs_embeds.shape[1] > 1 and hasattr(cache, "get_seq_length")
            counts = position_ids is None or cached_prompt is not None or several
            past_length = int(cache.get_seq_length()) if counts else 1
        if past_length == 0 and not mm_encoder_outputs:
            self.check_no_placeholders(input_ids)
            self.rope_deltas = inputs_embeds.new_zeros((len(inputs_embeds), 1), dtype=torch.long)
        if cached_prompt is not None and past_length == 0:  # the cache has been reset
            cache.qtsplus_prompt = None
            cached_prompt = None
        if cached_prompt is not None:
            new = inputs_embeds.shape[:2]
            attention_mask = cached_prompt.shorten_mask(attention_mask, past_length, *new)
            position_ids = cached_prompt.new_positions(position_ids, past_length, new[1])
            if self.config.qtsplus_config.position_ids == "sequential":
                position_ids = None  # as in the prompt, where the caller's do not count either
        if position_ids is None:
            rope_deltas = None if cached_prompt is None else cached_prompt.rope_deltas
            position_ids = self._positions_after(past_length, inputs_embeds, attention_mask, rope_deltas)
        return {**inputs, "attention_mask": attention_mask, "position_ids": position_ids}, qtsplus

    def image_ids(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """`[B, S]`, the id of an image's placeholder wherever its embedding is, as stock finds them; 0 elsewhere."""
        image_token_id = torch.tensor([[self.config.image_token_id]], device=inputs_embeds.device)
        is_image = (inputs_embeds == self.get_input_embeddings()(image_token_id)).all(-1)
        return is_image * image_token_id

    def encode_images(self, input_ids: torch.Tensor, visual: VisualInputs) -> dict[str, SelectedFeatures]:
        """All features of the images of the prompts `[B, S]`, per row, as `mm_encoder_outputs`."""
        grids = {IMAGE: check_grids(self, IMAGE, visual.pixel_values, visual.image_grid_thw), VIDEO: []}
        features = torch.cat(encode_visual(self, visual, grids)[IMAGE])
        counts = (input_ids == self.config.image_token_id).sum(1).tolist()
        if sum(counts) != len(features):
            raise ValueError(f"{sum(counts)} image placeholders in the prompt for {len(features)} features.")
        return {MODALITIES[IMAGE]: SelectedFeatures(pooler_output=features.split(counts))}

    def check_selected(self, mm_encoder_outputs: dict[str, Any] | None):
        """
        Raises `ValueError` for features that [`shorten`] has not selected, as stock encoders return them. Hooks that
        move a module's inputs, such as llm-compressor's, make a plain dict of those that it has selected.
        """
        for output in (mm_encoder_outputs or {}).values():
            was_selected = isinstance(output, SelectedFeatures)
            was_moved = type(output) is dict and output.keys() == {"pooler_output"}
            if not was_selected and not was_moved:
                raise ValueError("mm_encoder_outputs would bypass the selector: pass pixel values.")

    def check_no_placeholders(self, input_ids: torch.Tensor | None):
        """Raises `ValueError` for placeholders in a prompt that comes without pixels."""
        if input_ids is None:
            return
        for modality, name in MODALITIES.items():
            count = int((self.token_types(input_ids) == modality).sum())
            if count:
                raise ValueError(f"The prompt has {count} {name} placeholders, but no {name} pixels were given.")

    def _positions_after(
        self, past_length: int, inputs_embeds: torch.Tensor, attention_mask, rope_deltas: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`position_ids` of `[B, S]` new tokens behind a cache; `None` lets the language model count from 0."""
        batch_size, length = inputs_embeds.shape[:2]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            order = text_positions(attention_mask)[:, -length:]
        elif past_length == 0:
            return None
        else:
            order = torch.arange(past_length, past_length + length, device=inputs_embeds.device).expand(batch_size, -1)
        delta: int | torch.Tensor = 0
        if rope_deltas is not None:
            delta = rope_deltas.repeat_interleave(batch_size // len(rope_deltas), dim=0).to(order.device)
        return lay_positions(order, (order + delta).expand(self.rope_axes, -1, -1))


# --- With a language-modelling head ---

logger = logging.get_logger(__name__)

# Whoever takes the labels away and computes a loss of the logits: `label_smoothing_factor`, `compute_loss_func`, TRL.
LENGTHS = (
    "Training without labels: the logits have the length of the shortened prompt, so a loss outside the model needs "
    "`model.compact_labels`. For one that expects the length of `input_ids` (the plain Trainer with "
    "label_smoothing_factor or compute_loss_func, TRL) set `model.model.full_length = True`. QTSplusTrainer needs "
    "nothing. `model.model.full_length = False` ends this warning."
)


class QTSplusHeadMixin(QTSplusGenerationMixin):
    """Logits, a loss and `generate`, for a class whose `model` is a [`QTSplusModelMixin`] and that has an `lm_head`."""

    accepts_loss_kwargs = False  # a Trainer would divide L_SFT by the tokens of all micro-batches, but no penalty

    config: Any
    lm_head: Any
    loss_function: Any
    training: bool
    post_init: Any
    model_class: Any  # of `model`
    stock_class: Any  # of Transformers, that it derives from
    projections = r"self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj"  # of a layer of the language model, for LoRA

    def __init__(self, config: Any):
        super(self.stock_class, self).__init__(config)  # type: ignore[call-arg]  # the stock one would build its own model
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @wraps(QTSplusModelMixin.encode_videos)
    def encode_videos(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return self.model.encode_videos(*args, **kwargs)

    @names_inputs
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
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
        prompt: Any = input_ids if input_ids is not None else inputs_embeds
        shift_labels = kwargs.pop("shift_labels", None)
        for name, given in (("labels", labels), ("shift_labels", shift_labels)):
            if given is not None and prompt is not None and given.shape != prompt.shape[:2]:
                expected = tuple(prompt.shape[:2])
                raise ValueError(f"{name} {tuple(given.shape)}: expected the shape of the prompt, {expected}.")
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        qtsplus, hidden_states = outputs.qtsplus, outputs.last_hidden_state
        columns = None if qtsplus is None else qtsplus.columns
        if columns is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states = hidden_states[:, kept]
        elif not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            hidden_states = states_of(hidden_states, columns, logits_to_keep, attention_mask, prompt.shape[1])
        logits = self.lm_head(hidden_states)
        if self.training and labels is None and columns is not None and self.model.full_length is None:
            logger.warning_once(LENGTHS)

        loss = None
        if labels is not None:
            if columns is not None:
                labels = self.compact_labels(labels, input_ids, columns)
            kwargs = {name: value for name, value in kwargs.items() if name not in NAMES}
            if shift_labels is not None:
                shifted = shift_labels if columns is None else self.shift_labels(shift_labels, input_ids, columns)
                kwargs["shift_labels"] = shifted
            vocab_size = self.config.text_config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
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

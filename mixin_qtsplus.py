"""What every video language model with the selector shares: forward with its loss, initialising and loading.

[`QTSplusModelMixin`] stands in front of a backbone's model, [`QTSplusHeadMixin`] in front of the class with a head. How
a prompt is shortened is compression_qtsplus.py; what a backbone may say otherwise, backbone_qtsplus.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .compression_qtsplus import QTSplusCompressionMixin, packed_rows
from .generation_qtsplus import QTSplusGenerationMixin
from .inputs_qtsplus import NAMES, SelectionInputs, VisualInputs, names_inputs, take_inputs
from .lm_attention_qtsplus import check_attention
from .prompt_qtsplus import MODALITIES, SelectedFeatures, text_positions
from .repeats_qtsplus import Repeats
from .saving_qtsplus import QTSplusSavingMixin
from .selector_qtsplus import QTSplusOutput, QTSplusSelector

_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass
class QTSplusModelOutputWithPast(BaseModelOutputWithPast):
    """A backbone's output with the selector's decisions as `qtsplus` ([`QTSplusOutput`]; `None` without vision)."""

    qtsplus: QTSplusOutput | None = None


@dataclass
class QTSplusCausalLMOutputWithPast(CausalLMOutputWithPast):
    """
    As the stock output, over the shortened prompt, with the selector's decisions as `qtsplus`. `loss` in training is
    the language-modelling loss plus `qtsplus.loss_t + qtsplus.loss_m + qtsplus.loss_s`; in evaluation the former alone.
    """

    qtsplus: QTSplusOutput | None = None


class QTSplusModelMixin(QTSplusCompressionMixin):
    """A backbone's model without a head, whose language model reads the shortened prompt."""

    rope_deltas: Any = None  # [B, 1]: how far decoding stands from the count of the tokens

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

    @names_inputs
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs,
    ) -> tuple | QTSplusModelOutputWithPast:
        """As the stock model, over the shortened prompt; [`VisualInputs`] and [`SelectionInputs`] are ours."""
        visual, selection = take_inputs(kwargs)
        prompt = (input_ids, attention_mask, position_ids, inputs_embeds)
        qtsplus: QTSplusOutput | None
        if visual.given:
            self._check_fresh(past_key_values, mm_encoder_outputs, kwargs)
            inputs, qtsplus = self._shortened_inputs(*prompt, visual, selection)
        else:
            inputs, qtsplus = self._plain_inputs(*prompt, past_key_values, mm_encoder_outputs)
        outputs = self.language_model(past_key_values=past_key_values, use_cache=use_cache, **inputs, **kwargs)
        return QTSplusModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            qtsplus=qtsplus,
        )

    def _check_fresh(self, past_key_values, mm_encoder_outputs, kwargs) -> None:
        """Refuses pixels or features in a call that cannot be shortened."""
        if mm_encoder_outputs:
            raise ValueError("Pass pixel values or mm_encoder_outputs, not both.")
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            raise ValueError("New images or videos after a cache: use generate, which lays them out.")
        told = [name for name in _PACKING if kwargs.get(name) is not None]
        if told:
            raise packed_rows(", ".join(told))

    def _shortened_inputs(
        self, input_ids, attention_mask, position_ids, inputs_embeds, visual: VisualInputs, selection: SelectionInputs
    ) -> tuple[dict[str, Any], QTSplusOutput]:
        """The language model's inputs for a prompt with pixels or features."""
        prompt = self.compress(
            input_ids, attention_mask, position_ids, inputs_embeds, **vars(visual), **vars(selection)
        )
        if prompt.inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(prompt.input_ids)
        else:
            inputs_embeds = prompt.inputs_embeds
        self.rope_deltas = (prompt.next_position - prompt.attention_mask.sum(-1))[:, None]
        # Without a mask, gaps in the positions of a sequence would be read as the seams of packed ones.
        unmasked = self.rope_axes == 3 and attention_mask is None and bool(prompt.attention_mask.all())
        return {
            **self.language_inputs(inputs_embeds, prompt.input_ids, prompt.features),
            "attention_mask": None if unmasked else prompt.attention_mask,
            "position_ids": prompt.position_ids,
        }, prompt.qtsplus

    def _plain_inputs(
        self, input_ids, attention_mask, position_ids, inputs_embeds, past_key_values, mm_encoder_outputs
    ) -> tuple[dict[str, Any], QTSplusOutput | None]:
        """The language model's inputs for a prompt with selected features, or for text alone."""
        qtsplus = None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        inputs = {"inputs_embeds": inputs_embeds}
        if mm_encoder_outputs:
            self.check_selected(mm_encoder_outputs)
            features = {name: output.pooler_output for name, output in mm_encoder_outputs.items()}
            input_ids = self.ids_from_embeds(inputs_embeds) if input_ids is None else input_ids
            inputs = self.language_inputs(inputs_embeds, input_ids, features)
        elif self.training and torch.is_grad_enabled():
            # The selector takes part in every training step, so that no rank of a distributed run waits for another.
            nothing = self.no_features(inputs_embeds.device)[:, : inputs_embeds.shape[-1]]
            rows, no_position = len(inputs_embeds), torch.zeros(3, 0, dtype=torch.long, device=inputs_embeds.device)
            features, qtsplus = self.qtsplus([nothing] * rows, [nothing] * rows, [no_position] * rows)
            inputs = {"inputs_embeds": inputs_embeds + torch.cat(features).sum()}
        if position_ids is None:
            past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
            if past_length == 0 and not mm_encoder_outputs:
                self._check_no_placeholders(input_ids)
                self.rope_deltas = inputs_embeds.new_zeros((len(inputs_embeds), 1), dtype=torch.long)
            position_ids = self._positions_after(past_length, inputs_embeds, attention_mask)
        return {**inputs, "attention_mask": attention_mask, "position_ids": position_ids}, qtsplus

    def check_selected(self, mm_encoder_outputs: dict[str, Any] | None):
        """Raises `ValueError` for features that [`compress`] has not selected."""
        if not all(isinstance(output, SelectedFeatures) for output in (mm_encoder_outputs or {}).values()):
            raise ValueError("mm_encoder_outputs would pass the selector by: pass pixel values.")

    def _check_no_placeholders(self, input_ids: torch.Tensor | None):
        if input_ids is None:
            return
        for modality, name in MODALITIES.items():
            count = int((self.token_types(input_ids) == modality).sum())
            if count:
                raise ValueError(f"The prompt has {count} {name} placeholders, but no {name} pixels were given.")

    def _positions_after(self, past_length: int, inputs_embeds: torch.Tensor, attention_mask) -> torch.Tensor | None:
        """`position_ids` of `[B, S]` new tokens behind a cache; `None` lets the language model count from 0."""
        batch_size, length = inputs_embeds.shape[:2]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            order = text_positions(attention_mask)[:, -length:]
        elif past_length == 0:
            return None
        else:
            order = torch.arange(past_length, past_length + length, device=inputs_embeds.device).expand(batch_size, -1)
        delta: int | torch.Tensor = 0
        if self.rope_deltas is not None:
            delta = self.rope_deltas.repeat_interleave(batch_size // len(self.rope_deltas), dim=0).to(order.device)
        return self.lay_positions(order, (order + delta).expand(self.rope_axes, -1, -1))


# --------------------------------------------------------------------------------------------------------------------
# Loading and initialising
# --------------------------------------------------------------------------------------------------------------------


class QTSplusPreTrainedMixin(QTSplusSavingMixin):
    """Initialises the selector, and refuses checkpoints that would leave a part of the model random."""

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, QTSplusSelector):
            # A fresh re-encoder changes nothing, so that it does not wreck a trained language model; nor does a fresh
            # layer over the question.
            layers: Any = [*module.reencode_layers, *module.question_layers]
            for layer in layers:
                for weight in (layer.o_proj.weight, layer.ffn[-1].weight, layer.ffn[-1].bias):
                    init.zeros_(weight)
            init.zeros_(module.rho_history)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """
        As stock, but a checkpoint that lacks weights is an error.

        Raises:
            ValueError: weights are missing, as in a checkpoint of the base model, whose names may be other ones too.
        """
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


# --------------------------------------------------------------------------------------------------------------------
# With a language-modelling head
# --------------------------------------------------------------------------------------------------------------------


class QTSplusHeadMixin(QTSplusGenerationMixin):
    """Logits, a loss and `generate`, for a class whose `model` is a [`QTSplusModelMixin`] and that has an `lm_head`."""

    config: Any
    lm_head: Any
    loss_function: Any
    training: bool

    def encode_videos(
        self,
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.Tensor,
        *,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
        repeats: Repeats | None = None,
    ) -> list[torch.Tensor]:
        """See [`QTSplusModelMixin.encode_videos`]."""
        return self.model.encode_videos(
            pixel_values_videos, video_grid_thw, frames_per_chunk=frames_per_chunk, device=device, repeats=repeats
        )

    @names_inputs
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs,
    ) -> tuple | QTSplusCausalLMOutputWithPast:
        """
        As the stock class over the shortened prompt: `logits` are `[B, S', vocabulary]`, and `output.qtsplus.columns`
        says which column of `input_ids` each one belongs to. [`VisualInputs`] and [`SelectionInputs`] are ours.

        Args:
            labels: `[B, S]`, those of the full prompt; so is `shift_labels`.
            logits_to_keep: the last so many columns, or the columns, of the full prompt; 0 keeps all that are left of
                it. Those of padding hold no meaning.

        Raises:
            ValueError: `logits_to_keep` names a visual token that was not kept; and as [`compress`].
        """
        inputs = {name: kwargs.pop(name) for name in NAMES if name in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            **inputs,
            **{name: value for name, value in kwargs.items() if name != "shift_labels"},
        )
        qtsplus, hidden_states = outputs.qtsplus, outputs.last_hidden_state
        columns = None if qtsplus is None else qtsplus.columns
        if columns is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states = hidden_states[:, kept]
        elif not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            prompt: Any = input_ids if input_ids is not None else inputs_embeds
            hidden_states = _states_of(hidden_states, columns, logits_to_keep, attention_mask, prompt.shape[1])
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            if columns is not None:
                labels = self.compact_labels(labels, input_ids, columns)
                if kwargs.get("shift_labels") is not None:
                    kwargs["shift_labels"] = self._compact_shifted(kwargs["shift_labels"], input_ids, columns)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **kwargs
            )
            if self.training and qtsplus is not None:
                loss = loss + qtsplus.loss_t + qtsplus.loss_m + qtsplus.loss_s
        return QTSplusCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            qtsplus=qtsplus,
        )

    def _compact_shifted(self, shift_labels: torch.Tensor, input_ids, columns: torch.Tensor) -> torch.Tensor:
        """[`compact_labels`] for labels that stand one column in front of their tokens."""
        labels = nn.functional.pad(shift_labels, (1, 0), value=-100)[:, :-1]
        return nn.functional.pad(self.compact_labels(labels, input_ids, columns)[:, 1:], (0, 1), value=-100)


def _states_of(
    hidden_states: torch.Tensor,
    columns: torch.Tensor,
    logits_to_keep: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    length: int,
) -> torch.Tensor:
    """`[B, K, d]` of the `K` columns of the full prompt that `logits_to_keep` means, from `[B, S', d]`."""
    wanted = torch.arange(length, device=columns.device)
    wanted = wanted[-logits_to_keep:] if isinstance(logits_to_keep, int) else wanted[logits_to_keep.to(wanted.device)]
    place = columns.new_full((len(columns), length + 1), -1)  # of each column of the full prompt in the shortened one
    own = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    place = place.scatter(1, columns.masked_fill(columns < 0, length), own)[:, wanted]
    gone = place < 0 if attention_mask is None else (place < 0) & attention_mask.bool()[:, wanted]
    if bool(gone.any()):
        row, index = gone.nonzero()[0].tolist()
        raise ValueError(
            f"logits_to_keep names column {int(wanted[index])}, in row {row} a visual token that was not kept: "
            "expected columns of text. output.qtsplus.columns says which columns are left."
        )
    return hidden_states.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, hidden_states.shape[-1]))


__all__ = [
    "QTSplusCausalLMOutputWithPast",
    "QTSplusHeadMixin",
    "QTSplusModelMixin",
    "QTSplusModelOutputWithPast",
    "QTSplusPreTrainedMixin",
]

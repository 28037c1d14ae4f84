"""The question of every row as the selector gets it: its words' embeddings, or their states in the text before them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .backbone_qtsplus import QTSplusBackboneMixin
from .inputs_qtsplus import SelectionInputs
from .prompt_qtsplus import TEXT, PromptRow, find_query_mask
from .selection_qtsplus import LM_ATTENTION


class QTSplusQueryMixin(QTSplusBackboneMixin):
    """Finds the questions, and makes of them what `query_states` of [`QTSplusConfig`] asks for."""

    language_model: Any

    def query_states(
        self,
        rows: Sequence[PromptRow],
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        mask: torch.Tensor,
        selection: SelectionInputs,
        earlier: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """
        The questions' embeddings; with `"language_model"` the states of their words behind its first `query_layers`
        layers, which read the row's text up to the question's end, without its visual tokens and with positions counted
        over what is left. A question that does not stand in the prompt takes the place of the prompt's own.

        The states teach the language model nothing: no gradient reaches it through them. (`"layer"` is a part of the
        selector, which begins with it.)

        Args:
            rows: the layout of the prompt.
            input_ids, mask: `[B, S]`.
            inputs_embeds: `[B, S, d]`, in the place of the embeddings of `input_ids`.
            earlier: per row the ids of the conversation in front of its first token.

        Returns:
            per row `[L_b, d]`, empty where there is no question.

        Raises:
            ValueError: inputs of a question whose shapes do not fit the prompt's.
        """
        config, embed = self.config.qtsplus_config, self.get_input_embeddings()
        asks = config.selection if selection.selection is None else selection.selection
        # No other one looks at the question's states.
        in_context = config.query_states == "language_model" and asks not in ("all", LM_ATTENTION)
        query_mask, given = self._query_mask(input_ids, mask, selection), given_queries(selection, len(input_ids))
        if in_context:
            query_mask = query_mask & (self.token_types(input_ids) == TEXT)

        def embeds(row: int, columns: torch.Tensor) -> torch.Tensor:
            return embed(input_ids[row, columns]) if inputs_embeds is None else inputs_embeds[row, columns]

        if given is None:
            queries = [embeds(row, columns) for row, columns in enumerate(query_mask)]
        else:
            queries = [embed(ids) for ids in given]
        if not in_context:
            return queries

        needed = [b for b, row in enumerate(rows) if len(row.candidates) and len(queries[b])]
        texts, places = [], []
        for b in needed:
            columns = rows[b].columns[rows[b].types == TEXT]
            place = query_mask[b, columns].nonzero()[:, 0].tolist()
            if given is None:
                text = embeds(b, columns[: place[-1] + 1])
            else:  # where the prompt has no question of its own, there is no telling what stands in front of one
                front = embeds(b, columns[: place[0] if place else 0])
                text, place = torch.cat([front, queries[b]]), [len(front) + at for at in range(len(queries[b]))]
            if earlier is not None:
                before = embed(earlier[b][self.token_types(earlier[b]) == TEXT])
                text, place = torch.cat([before, text]), [len(before) + at for at in place]
            texts.append(text)
            places.append(place)
        if needed:
            states = self._first_states(texts, config.query_layers)
            for b, place, state in zip(needed, places, states, strict=True):
                queries[b] = state[place]
        return queries

    def _query_mask(self, input_ids: torch.Tensor, mask: torch.Tensor, selection: SelectionInputs) -> torch.Tensor:
        """`[B, S]` bool: the questions in the prompt."""
        query_mask, config = selection.query_mask, self.config
        if query_mask is None:
            query_mask = find_query_mask(
                input_ids,
                mask,
                config.user_turn_token_ids,
                config.turn_end_token_id,
                config.special_token_ids,
                config.video_token_id,
                getattr(config, "frame_text_token_ids", ()),
            )
        elif query_mask.shape != input_ids.shape:
            raise ValueError(
                f"query_mask {tuple(query_mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}."
            )
        return query_mask.bool() & mask.bool()

    def _first_states(self, texts: list[torch.Tensor], layers: int) -> torch.Tensor:
        """`[B, S, d]` behind the language model's first layers, of `[S_b, d]` embeddings."""
        first = self.first_layers(self.language_model.layers[:layers])
        # It is causal, recurrent layers too: padding on the right changes nothing in front of it. The class's own
        # forward, for what others have hooked onto the model's would run all of it.
        states = type(first).forward(
            first,
            inputs_embeds=pad_sequence(texts, batch_first=True),
            use_cache=False,
            output_hidden_states=False,
            output_attentions=False,
        )
        # Not torch.no_grad: in older releases of PyTorch autocast keeps the weights that it casts there, and the model
        # itself would run with these, which have no gradient (pytorch issue 112583).
        return states.last_hidden_state.detach()

    def first_layers(self, layers: nn.ModuleList) -> Any:
        """A view of the language model that shares its weights, with these layers in the place of all, and no norm."""
        first: Any = copy.copy(self.language_model)
        first._modules = {**first._modules, "layers": layers, "norm": nn.Identity()}
        return first


def given_queries(selection: SelectionInputs, rows: int) -> list[torch.Tensor] | None:
    """Per row the ids of a question that does not stand in the prompt."""
    ids, mask = selection.query_input_ids, selection.query_attention_mask
    if ids is None:
        return None
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} rows of query_input_ids: expected one per prompt ({rows}).")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"query_attention_mask {tuple(mask.shape)}: expected query_input_ids' shape, {tuple(ids.shape)}."
        )
    return list(ids) if mask is None else [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]


__all__ = ["QTSplusQueryMixin", "given_queries"]

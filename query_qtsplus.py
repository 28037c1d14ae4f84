"""The question of every row as the selector gets it: the embeddings of its words."""

import torch

from .backbone_qtsplus import QTSplusBackboneMixin
from .inputs_qtsplus import SelectionInputs
from .prompt_qtsplus import find_query_mask


class QTSplusQueryMixin(QTSplusBackboneMixin):
    """Finds the questions that select."""

    def query_embeds(
        self,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        mask: torch.Tensor,
        selection: SelectionInputs,
    ) -> list[torch.Tensor]:
        """
        The embeddings of the questions. One that is given apart from the prompt takes the place of the prompt's own.

        Args:
            input_ids, mask: `[B, S]`.
            inputs_embeds: `[B, S, d]`, in the place of the embeddings of `input_ids`.

        Returns:
            per row `[L_b, d]`, empty where there is no question.

        Raises:
            ValueError: inputs of a question whose shapes do not fit the prompt's.
        """
        questions, given = self._query_mask(input_ids, mask, selection), given_queries(selection, len(input_ids))
        embed = self.get_input_embeddings()
        if given is not None:
            return [embed(ids) for ids in given]
        if inputs_embeds is not None:
            return [embeds[asked] for embeds, asked in zip(inputs_embeds, questions, strict=True)]
        return [embed(ids[asked]) for ids, asked in zip(input_ids, questions, strict=True)]

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

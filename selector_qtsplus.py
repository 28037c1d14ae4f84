"""The query-aware token selector: Algorithm 1 of the paper, from relevance to the re-encoded tokens.

Independent of any backbone. Pure functions over one sample come first, in the paper's order; thin modules and
[`QTSplusSelector`], which runs them over a ragged batch, follow.
"""

import torch

# --------------------------------------------------------------------------------------------------------------------
# The query Q: which tokens of a prompt are the question
# --------------------------------------------------------------------------------------------------------------------


def find_query_mask(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    user_turn_token_ids: list[int],
    turn_end_token_id: int,
    special_token_ids: list[int],
) -> torch.Tensor:
    """
    Marks the question in a chat prompt: the text of the last user turn, without its header, special and vision tokens.

    Args:
        input_ids: `[B, S]` token ids of prompts made with the chat template.
        attention_mask: `[B, S]`, 1 on real tokens, or `None`.
        user_turn_token_ids: the ids that open a user's turn; the one token after them (the line break) is skipped.
        turn_end_token_id: the id that closes a turn.
        special_token_ids: ids that are never part of a question.

    Returns:
        `[B, S]` int64, 1 on the question's tokens. A row without a user turn is all 0.
    """
    special = torch.tensor(special_token_ids, device=input_ids.device)
    eligible = ~torch.isin(input_ids, special)
    if attention_mask is not None:
        eligible &= attention_mask.bool()

    header = torch.tensor(user_turn_token_ids, device=input_ids.device)
    mask = torch.zeros_like(input_ids)
    if input_ids.shape[1] < len(header):
        return mask
    opens = (input_ids.unfold(1, len(header), 1) == header).all(-1)
    for row in range(input_ids.shape[0]):
        starts = opens[row].nonzero()
        if len(starts) == 0:
            continue
        start = int(starts[-1]) + len(header) + 1
        ends = (input_ids[row, start:] == turn_end_token_id).nonzero()
        stop = start + int(ends[0]) if len(ends) else input_ids.shape[1]
        mask[row, start:stop] = eligible[row, start:stop].long()
    return mask

"""From a real mp4 through the real processor: a conversation that goes on from its cache."""

import pytest
import torch

from tiny import load_bundled

OPTIONS = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}


@pytest.fixture(scope="module")
def tiny():
    bundled, processor = load_bundled()
    torch.manual_seed(0)
    model = type(bundled)(bundled.config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(2.0)  # random weights of the initial size answer with one token over and over
    return model, processor


def user(question, video=None):
    content = [] if video is None else [{"type": "video", "video": str(video)}]
    return {"role": "user", "content": [*content, {"type": "text", "text": question}]}


def test_the_next_turn_through_the_chat_template(tiny, tiny_mp4):
    """The answer goes through text and back; whatever part of it tokenizes alike is taken from the cache."""
    model, processor = tiny
    messages = [user("What colour is the square?", tiny_mp4)]
    first_inputs = processor.apply_chat_template(messages, **OPTIONS)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True}
    first = model.generate(**first_inputs, retention=0.2, **options)
    said = processor.tokenizer.decode(first.sequences[0, first_inputs["input_ids"].shape[1] :])
    messages += [{"role": "assistant", "content": [{"type": "text", "text": said}]}, user("And the circle?")]
    inputs = processor.apply_chat_template(messages, **OPTIONS)

    columns = first.past_key_values.get_seq_length()
    second = model.generate(**inputs, past_key_values=first.past_key_values, **options)
    assert second.past_key_values.get_seq_length() > columns, "the cache was used, not filled anew"

    # The whole conversation anew, with the tokens that the first question had kept.
    question = first_inputs["input_ids"][first_inputs["query_mask"].bool()][None]
    anew = model.generate(**inputs, query_input_ids=question, retention=0.2, **options)
    assert torch.equal(anew.qtsplus.kept_indices[0], first.qtsplus.kept_indices[0])
    assert second.sequences.tolist() == anew.sequences.tolist()

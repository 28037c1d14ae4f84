"""Images: without a video nothing is selected, and everything that stock takes is taken."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model_checks import main_output, shared_model
from tiny import IMAGE_PAD, assert_same, batch, compress, prompt, stock_twin, tiny_model, without

IMAGE = (1, 4, 4)
OTHER = (1, 8, 4)
LENGTHS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@dataclass
class ReadAlike:
    """A prompt with images, and where its real tokens are."""

    inputs: dict
    is_real: Tensor
    positions: Tensor


def read(model):
    inputs = batch(*image_rows())
    types = model.model.token_types(inputs["input_ids"])
    positions, _ = model.model.get_rope_index(mm_token_type_ids=types, **inputs)
    return ReadAlike(inputs, inputs["attention_mask"].bool(), positions)


def image_rows():
    """As many images as rows, but two in the first row and none in the last."""
    two_images = prompt(images=[IMAGE, OTHER], question=6, seed=1)
    one_image = prompt(images=[OTHER], question=9, seed=2)
    return two_images, one_image, prompt(question=4, seed=3)


def embedded(model, inputs):
    """The same inputs with embeddings instead of ids."""
    others = without(inputs, "input_ids")
    embed = model.get_input_embeddings()
    others["inputs_embeds"] = embed(inputs["input_ids"])
    return others


def test_embeddings_beside_images_and_the_prompts_positions_give_what_the_ids_give():
    model = shared_model()
    rows = read(model)
    by_ids = main_output(model, rows.inputs)
    by_embeddings = main_output(model, embedded(model, rows.inputs), position_ids=rows.positions)
    assert_close(
        by_embeddings[rows.is_real],
        by_ids[rows.is_real],
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_embeddings_beside_images_generate_what_stock_generates(beams):
    model = shared_model()
    stock = stock_twin(model)
    ids = batch(*image_rows())
    call = {**LENGTHS, "num_beams": beams}
    embeds = embedded(model, ids)
    expected = stock.generate(**embeds, **call)
    assert expected.shape == (3, 5)
    assert_same(model.generate(**embeds, **call), expected)
    both = {**embeds, **ids, "mm_token_type_ids": model.model.token_types(ids["input_ids"])}
    assert_same(model.generate(**both, **call), model.generate(**ids, **call))


def test_embeddings_with_another_number_of_placeholders_are_refused():
    model = shared_model()
    inputs = embedded(model, batch(*image_rows()))
    inputs["inputs_embeds"] = inputs["inputs_embeds"][:, 1:].flip(0)[:1]
    inputs["attention_mask"] = inputs["attention_mask"][:1, 1:]
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="0 image placeholders in the prompt for 20 features"):
            call(**inputs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_images_in_packed_rows_are_read_as_in_padded_rows(attention):
    model = tiny_model()
    model.set_attn_implementation(attention)
    rows = read(model)
    order = rows.inputs["attention_mask"].cumsum(1) - 1
    positions = torch.cat([order[None], rows.positions])
    packed = {
        "input_ids": rows.inputs["input_ids"][rows.is_real][None],
        "position_ids": positions[:, rows.is_real][:, None],
        "pixel_values": rows.inputs["pixel_values"],
        "image_grid_thw": rows.inputs["image_grid_thw"],
    }
    in_one_row = main_output(model, packed, use_cache=False)[0]
    padded = main_output(model, rows.inputs)[rows.is_real]
    assert_close(in_one_row, padded, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="several sequences packed into one row"):
        model(**packed, use_cache=True)  # stock would attend across the sequences


def test_images_beside_videos_pass_untouched_and_take_nothing_of_the_budget():
    image = (1, 8, 8)
    video = (4, 8, 12)
    both = prompt(images=[image], videos=[video])
    image_alone = prompt(images=[image])
    text = prompt()
    model = shared_model().model
    compact = compress(model, **batch(both, image_alone, text), retention=0.25)
    is_image = compact.input_ids == IMAGE_PAD
    assert is_image.sum(-1).tolist() == [16, 16, 0]
    assert compact.qtsplus.n.tolist() == [24, 0, 0]

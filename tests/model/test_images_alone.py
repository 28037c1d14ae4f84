"""Images: without a video nothing is selected, and everything that stock takes is taken."""

import pytest
import torch
from torch.testing import assert_close

from model_checks import main_output, shared_model
from tiny import IMAGE_PAD, assert_same, batch, compress, prompt, stock_twin, tiny_model, without

IMAGE = (1, 4, 4)
OTHER = (1, 8, 4)
LENGTHS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def image_rows():
    """As many images as rows, but two in the first row and none in the last."""
    two_images = prompt(images=[IMAGE, OTHER], question=6, seed=1)
    one_image = prompt(images=[OTHER], question=9, seed=2)
    return two_images, one_image, prompt(question=4, seed=3)


def embedded(model, inputs):
    """The same inputs with embeddings instead of ids."""
    others = without(inputs, "input_ids")
    return {**others, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}


def test_embeddings_beside_images_and_the_prompts_positions_give_what_the_ids_give():
    model = shared_model()
    inputs = batch(*image_rows())
    real = inputs["attention_mask"].bool()
    expected = main_output(model, inputs)[real]
    token_types = model.model.token_types(inputs["input_ids"])
    positions, _ = model.model.get_rope_index(mm_token_type_ids=token_types, **inputs)
    again = main_output(model, embedded(model, inputs), position_ids=positions)[real]
    assert_close(again, expected, atol=1e-5, rtol=1e-5)


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
    inputs = batch(*image_rows())
    real = inputs["attention_mask"].bool()
    token_types = model.model.token_types(inputs["input_ids"])
    positions, _ = model.model.get_rope_index(mm_token_type_ids=token_types, **inputs)
    order = inputs["attention_mask"].cumsum(1) - 1
    packed = {
        "input_ids": inputs["input_ids"][real][None],
        "position_ids": torch.cat([order[None], positions])[:, real][:, None],
        "pixel_values": inputs["pixel_values"],
        "image_grid_thw": inputs["image_grid_thw"],
    }
    expected = main_output(model, inputs)[real]
    assert_close(main_output(model, packed, use_cache=False)[0], expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="several sequences packed into one row"):
        model(**packed, use_cache=True)  # stock would attend across the sequences


def test_images_beside_videos_pass_untouched_and_take_nothing_of_the_budget():
    rows = [prompt(images=[(1, 8, 8)], videos=[(4, 8, 12)]), prompt(images=[(1, 8, 8)]), prompt()]
    compact = compress(shared_model().model, **batch(*rows), retention=0.25)
    is_image = compact.input_ids == IMAGE_PAD
    assert is_image.sum(-1).tolist() == [16, 16, 0]
    assert compact.qtsplus.n.tolist() == [24, 0, 0]

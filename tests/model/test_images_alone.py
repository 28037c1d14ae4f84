"""Images: nothing of them is selected."""

import pytest

from model_checks import shared_model
from tiny import IMAGE_PAD, batch, compress, prompt

IMAGE = (1, 4, 4)
OTHER = (1, 8, 4)


def image_rows():
    """As many images as rows, but two in the first row and none in the last."""
    two_images = prompt(images=[IMAGE, OTHER], question=6, seed=1)
    one_image = prompt(images=[OTHER], question=9, seed=2)
    return two_images, one_image, prompt(question=4, seed=3)


def test_embeddings_beside_images_are_refused():
    model = shared_model()
    inputs = batch(*image_rows())
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="come with input_ids alone: leave out inputs_embeds"):
            call(**inputs)


def test_images_beside_videos_pass_untouched_and_take_nothing_of_the_budget():
    rows = [prompt(images=[(1, 8, 8)], videos=[(4, 8, 12)]), prompt(images=[(1, 8, 8)]), prompt()]
    compact = compress(shared_model().model, **batch(*rows), retention=0.25)
    is_image = compact.input_ids == IMAGE_PAD
    assert is_image.sum(-1).tolist() == [16, 16, 0]
    assert compact.qtsplus.n.tolist() == [24, 0, 0]

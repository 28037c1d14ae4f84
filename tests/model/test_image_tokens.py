"""Images beside videos."""

import torch

from tiny import IMAGE_PAD, batch, compress, prompt, tiny_model

IMAGE = (1, 8, 8)
VIDEO = (4, 8, 12)


def test_images_pass_untouched_and_take_nothing_of_the_budget():
    model = tiny_model()
    inputs = batch(prompt(images=[IMAGE], videos=[VIDEO]), prompt(images=[IMAGE], seed=1), prompt(seed=2))
    with torch.no_grad():
        compact = compress(model.model, **inputs, retention=0.25)
    assert (compact.input_ids == IMAGE_PAD).sum(-1).tolist() == [16, 16, 0]
    assert compact.qtsplus.n.tolist() == [24, 0, 0]

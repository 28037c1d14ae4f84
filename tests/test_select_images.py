"""With `select_images` an image's tokens compete with the video's for one budget."""

import torch

from tiny import IMAGE_PAD, VIDEO_PAD, batch, compress, prompt, tiny_model

IMAGE, VIDEO = (1, 8, 8), (4, 8, 12)
INPUTS = batch(prompt(images=[IMAGE], videos=[VIDEO]), prompt(images=[IMAGE], seed=1), prompt(seed=2))


def compressed(**selector):
    model = tiny_model(**selector)
    with torch.no_grad():
        return compress(model.model, **INPUTS, retention=0.25)


def test_images_pass_untouched_by_default():
    compact = compressed()
    assert (compact.input_ids == IMAGE_PAD).sum(-1).tolist() == [16, 16, 0]
    assert compact.qtsplus.n.tolist() == [24, 0, 0]


def test_images_compete():
    compact = compressed(select_images=True)
    images, videos = ((compact.input_ids == pad).sum(-1) for pad in (IMAGE_PAD, VIDEO_PAD))
    assert (images + videos).tolist() == compact.qtsplus.n.tolist() == [28, 4, 0]
    assert [len(r) for r in compact.features["image"]] == images.tolist()
    assert [len(r) for r in compact.features["video"]] == videos.tolist()
    assert len(compact.qtsplus.relevance[0]) == 16 + 96


def test_all_tokens_of_both_kinds_stay_in_their_places():
    inputs = {key: value for key, value in INPUTS.items()}
    together = tiny_model(select_images=True, selection="all", reencode_layers=0)
    apart = tiny_model(selection="all", reencode_layers=0)
    with torch.no_grad():
        assert torch.equal(together(**inputs).logits, apart(**inputs).logits)


def test_generation_with_selected_images():
    model = tiny_model(select_images=True)
    answer = model.generate(**INPUTS, retention=0.25, max_new_tokens=4, do_sample=False, num_beams=2)
    assert torch.equal(answer[:, : INPUTS["input_ids"].shape[1]], INPUTS["input_ids"])

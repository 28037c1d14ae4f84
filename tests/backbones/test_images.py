"""Images come by path, address, base64 or as PIL, flat or in a list per row, as the stock processor takes them."""

import base64
import functools
import inspect
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from tiny import assert_same, chat_inputs

NAMES = ("wide.png", "tall.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for name, size in zip(NAMES, ((40, 64, 3), (72, 36, 3)), strict=True):
        Image.fromarray(random.integers(0, 255, size, np.uint8)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def stock_processor(processor, backbone):
    if backbone.without_images:
        with pytest.raises(ValueError, match="read videos alone here: expected no images"):
            processor(images=Image.new("RGB", (60, 40)), text=processor.image_token)
        pytest.skip("takes no images")
    stock = next(kind for kind in type(processor).__mro__ if kind.__module__.startswith("transformers."))
    names = inspect.signature(stock).parameters
    parts = {name: getattr(processor, name) for name in names if hasattr(processor, name)}
    return stock(**parts)


def given(form, folder, address):
    path, other_path = (str(folder / name) for name in NAMES)
    image = Image.open(path)
    other = Image.open(other_path)
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    return {
        "path": path,
        "address": f"{address}/{NAMES[0]}",
        "base64": data,
        "data URI": f"data:image/png;base64,{data}",
        "PIL": image,
        "flat paths": [path, other_path],
        "nested paths": [[path], [other_path]],
        "nested PIL": [[image], [other]],
        "mixed": [[image], [other_path]],
    }[form]


def assert_as_stock(ours, stock):
    """Ours keeps apart what stock pads: a crop more is all zeros."""
    assert_same(ours["input_ids"], stock["input_ids"])
    pixels = stock["pixel_values"]
    if pixels.ndim == 5:
        counts = ours["image_grid_thw"][:, 0]
        is_real = torch.arange(pixels.shape[1]) < counts[:, None]
        pixels = pixels[is_real]
    assert_same(ours["pixel_values"], pixels)


FORMS = ("path", "address", "base64", "data URI", "PIL", "flat paths", "nested paths", "nested PIL", "mixed")


@pytest.mark.parametrize("form", FORMS)
def test_a_call_takes_images_as_stock_does(processor, stock_processor, folder, address, form):
    images = given(form, folder, address)
    rows = len(images) if isinstance(images, list) else 1
    content = [{"type": "image"}, {"type": "text", "text": "Why?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}])
    call = {"images": images, "text": [prompt] * rows, "padding": True, "return_tensors": "pt"}
    assert_as_stock(processor(**call), stock_processor(**call))


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("image", "PIL"),
        ("image", "path"),
        ("url", "address"),
        ("path", "path"),
        ("base64", "base64"),
    ],
)
def test_the_chat_template_takes_images_as_stock_does(processor, stock_processor, folder, address, form, key):
    image = given(form, folder, address)
    ours = chat_inputs(processor, {"type": "image", key: image}, "What is it?")
    stock = chat_inputs(stock_processor, {"type": "image", key: image}, "What is it?")
    assert_as_stock(ours, stock)


@pytest.mark.parametrize("folder", ["a", "aa", "aaa", "aaaa"])  # some paths of a length can be read as base64
def test_an_image_that_is_not_there(processor, folder):
    with pytest.raises(ValueError, match=r"nowhere\.png"):
        processor(images=f"/{folder}/nowhere.png", text=processor.image_token)

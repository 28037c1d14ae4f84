"""A file of tensors holds what its format declares, or is refused in one line that says what to do."""

import pytest
import torch
from safetensors.torch import save_file

from qtsplus.common.tensors import TensorFormat, TensorKind

CODES = TensorKind(("M", "d"), (torch.uint8,))
SCALE = TensorKind(("d",), (torch.float32,))
FORMAT = TensorFormat("stored scale", "make it again", {"codes": CODES, "scale": SCALE}, frozenset(["of"]))
TENSORS = {"codes": torch.arange(6, dtype=torch.uint8).view(2, 3), "scale": torch.ones(3)}
TEXTS = {"of": "a video"}


def test_what_was_written_is_read(tmp_path):
    FORMAT.write(tmp_path / "file", TENSORS, TEXTS)
    with FORMAT.reading(tmp_path / "file") as file:
        assert file.texts == TEXTS
        assert file.tensors.keys() == TENSORS.keys()
        assert torch.equal(file.tensors["codes"], TENSORS["codes"])


OTHERS = {
    "a symbol with two sizes": ({"scale": torch.ones(2)}, TEXTS, r"scale is \[2\] torch.float32; expected \[3\] of"),
    "another dtype": ({"scale": torch.ones(3).double()}, TEXTS, "scale is .*float64; expected .* of torch.float32"),
    "another rank": ({"codes": TENSORS["codes"][0]}, TEXTS, r"codes is \[3\]"),
    "one more tensor": ({"more": torch.ones(1)}, TEXTS, "it is no stored scale"),
    "another text": ({}, {"from": "a video"}, "it is no stored scale"),
}


@pytest.mark.parametrize(("tensors", "texts", "reason"), OTHERS.values(), ids=OTHERS)
def test_another_file_is_refused(tmp_path, tensors, texts, reason):
    FORMAT.write(tmp_path / "file", TENSORS | tensors, texts)
    refusal = f"The stored scale '.*file' cannot be used: {reason}.*; make it again"
    with pytest.raises(ValueError, match=refusal), FORMAT.reading(tmp_path / "file"):
        pass


def test_a_file_without_its_digest_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "file", TEXTS)
    changed = "it was changed since it was written"
    with pytest.raises(ValueError, match=changed), FORMAT.reading(tmp_path / "file"):
        pass


def test_an_error_of_the_reader_is_about_the_file(tmp_path):
    FORMAT.write(tmp_path / "file", TENSORS, TEXTS)
    refusal = "'.*file' cannot be used: it is of another video; make it again"
    with pytest.raises(ValueError, match=refusal), FORMAT.reading(tmp_path / "file"):
        raise ValueError("it is of another video")

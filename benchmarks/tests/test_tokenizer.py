"""The tokenizer of the tiny models."""

from benchmarks.world.tokenizer import SPECIAL_TOKENS, build_processor


def test_the_same_texts_give_the_same_bytes(tmp_path):
    processor = build_processor(tmp_path / "one")
    build_processor(tmp_path / "other")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name
    tokenizer = processor.tokenizer
    assert len(tokenizer) <= 2048
    for word in ("user", "assistant", "system", "\n", *SPECIAL_TOKENS):
        assert len(tokenizer(word)["input_ids"]) == 1, word
    text = "Schöne Grüße, 你好 🙂\t\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

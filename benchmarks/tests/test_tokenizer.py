"""The tokenizer of the crowd's model."""

from benchmarks.bases import CROWD
from benchmarks.world.tokenizer import SPECIAL_TOKENS, build_processor


def test_the_committed_tokenizer_is_what_the_script_writes(tmp_path):
    processor = build_processor(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (CROWD / path.name).read_bytes(), path.name
    tokenizer = processor.tokenizer
    assert len(tokenizer) <= 2048
    for word in ("user", "assistant", "system", "\n", *SPECIAL_TOKENS):
        assert len(tokenizer(word)["input_ids"]) == 1, word
    text = "Schöne Grüße, 你好 🙂\t\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

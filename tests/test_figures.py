"""Every measured figure of the README and of the pages in `docs` is that of a JSON file of `benchmarks/results`."""

import pytest

from page_figures import LIST, PAGES, ROOT, check, compare, listed_texts, unlisted_figures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page):
    _, faults = check(page)
    assert not faults, f"`python tests/page_figures.py --write` corrects figures; {LIST.name} lists them"


def test_pages_that_are_listed_exist():
    for page in listed_texts():
        assert ROOT / page in PAGES


ALL_TOKENS = "all tokens are right in {all tokens/right:.1f}% of {questions:,}"


def test_another_figure_than_the_results_is_found_and_corrected():
    said = "all\ntokens are right in 89.7% of 750"
    found = compare("choice.json", ALL_TOKENS, f"With {said} questions.")
    assert found == (said, said.replace("89.7", "89.6"))


def test_a_listed_text_that_is_gone_is_found():
    assert compare("choice.json", ALL_TOKENS, "89.6% are right.") is None


HOLES = [
    ("choice.json", "{all tokens/right / questions * 100 - 10:.1f}", "1.9"),
    ("open/seed*.json", "{nothing seen/overlap:.2f}", "0.86"),
    ("stream.json", "{milliseconds/diversity/*:.1f}", "16.4"),
    ("stream.json", "{library.json/rows/0/found/0:.0f}", "98"),
    ("choice.json", "{all tokens/right / 180:half}", "half"),
    ("choice.json", "{all tokens/right / 300:half}", "0.30"),
]


@pytest.mark.parametrize(("source", "hole", "figure"), HOLES)
def test_a_hole_takes_its_figure_from_the_results(source, hole, figure):
    assert compare(source, f"It is {hole}", "It is 5 today.") == ("It is 5", f"It is {figure}")


def test_a_key_that_the_results_do_not_have_is_an_error():
    with pytest.raises(ValueError, match="all tokens/wrong is not in choice.json"):
        compare("choice.json", "{all tokens/wrong:.1f}", "5")


FIGURES = [
    "It is right in 57% of the questions.",
    "A question takes 12 s.",
    "It was asked 360 questions.",
    "This is four\ntimes as fast.",
    "They overlap by 0.86.",
    "- Beside it, a lead of\n  +7 points.",
    "| a | b |\n|---|---:|\n| way | 70 |",
]
NO_FIGURES = [
    "Qwen2.5-VL-7B reads 16 frames.",
    "Set `--retention 0.05`, see [there](page-1.5.md).",
    "```\nIt took 3.2 s.\n```",
    "| Frames | 600 |\n|---|---:|\n| 8 | many |",
]


@pytest.mark.parametrize("content", FIGURES)
def test_a_measurement_without_a_key_is_found(content):
    assert len(unlisted_figures(content)) == 1


@pytest.mark.parametrize("content", NO_FIGURES)
def test_numbers_of_names_code_and_heads_are_no_measurements(content):
    assert unlisted_figures(content) == []

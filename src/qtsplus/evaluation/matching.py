"""Whether a text that a model wrote gives the answer of a record: to the letter, by rules, or in a judge's opinion."""

import os
import re
from collections.abc import Callable, Sequence
from string import ascii_uppercase

from ..data.records import VideoRecord

Matcher = Callable[[VideoRecord, str], bool]

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS.split())}
_DIGITS["none"] = "0"
_ARTICLES = {"a", "an", "the"}
_NEGATIONS = {"not", "no", "never", "without", "isn't", "aren't", "wasn't", "doesn't", "don't"}
_NEAR = 3  # words; a negation as near before an answer denies it
_WORD = re.compile(r"[\w']+")
# How a text chooses an option by its letter: "B", "B." or "(B) a dog" at the start, though not "A dog"; "the answer is
# B"; "\boxed{B}"; "(B)"; "option B"; "it is B"; "B is right". The first of these forms that it has counts.
_LETTERS = (
    r"^\W*([{0}])\b(?! \w)",
    r"\b[Aa]nswer\W+(?:is\W+)?(?:but\W+)?(?:[Oo]ption\W+)?([{0}])\b",
    r"\\boxed\W+(?:text\W+)?([{0}])\b",
    r"\(([{0}])\)",
    r"\b(?:[Oo]ption|[Cc]hoice)\W+(?:is\W+)?([{0}])\b",
    r"\b(?:[Ii]s|[Ii]t's|think|choose|but)\W+([{0}])\b(?! \w)",
    r"\b([{0}]) is\b",
)
# Letters that a text rules out: "not A", "neither (A) nor (B)", "rather than A", "A is wrong", "A isn't".
_RULED_OUT = r"""(?x)
    (?:\b(?i:not|neither|nor|rather\ than)|n't)\ (?:[Oo]ption\ )?\(?[{0}]\b\)?
    (?:\ or\ \(?[{0}]\b\)?)*(?!\ (?!(?:but|nor)\b)\w)
    | \(?\b[{0}]\b\)?\ (?:is|was|does|can|could|would)
      (?:(?:n?'t|\ ?not)(?!\ (?:be\ )?(?:wrong|incorrect|false)\b)|\ (?:wrong|incorrect|false))\b
"""
_JUDGE = """Question: {question}
Right answer: {answer}
Given answer: {said}
Does the given answer say the same as the right answer? Reply with yes or no."""


def is_exact(record: VideoRecord, said: str) -> bool:
    """Whether the text is the record's answer to the letter."""
    return said == record.answer


def gives_answer(record: VideoRecord, said: str) -> bool:
    """
    Whether a sentence gives the record's answer. With options, the sentence must choose the right one, by its letter or
    by its text. "Yes" or "no" must be the first of the two that is said. A number must be the only one, or the first
    word. Any other answer must be said in the same words, and not be denied. Case, punctuation and articles do not
    count.
    """
    if record.options:
        right = _chosen(record.answer, record.options)
        chosen = _chosen(said, record.options)
        return right is not None and right == chosen
    expected = _words(record.answer)
    words = _words(said)
    if expected in (["yes"], ["no"]):
        decisions = [word for word in words if word in ("yes", "no")]
        return decisions[:1] == expected
    if len(expected) == 1 and expected[0].isdecimal():
        numbers = {word for word in words if word.isdecimal()}
        return words[:1] == expected or numbers == set(expected)
    return _says(words, expected)


def _words(text: str) -> list[str]:
    plain = text.lower().replace("’", "'")
    return [_DIGITS.get(word, word) for word in _WORD.findall(plain) if word not in _ARTICLES]


def _says(words: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether the expected words follow each other among the words, without a negation just before them."""
    if not expected:
        return not words
    for start in range(len(words)):
        end = start + len(expected)
        before = words[max(0, start - _NEAR) : start]
        is_said = words[start:end] == expected
        if is_said and _NEGATIONS.isdisjoint(before):
            return True
    return False


def _chosen(said: str, options: Sequence[str]) -> int | None:
    """The option that a text chooses, by its letter or because it is the only one whose text it holds."""
    letters = ascii_uppercase[: len(options)]
    bare = re.sub(r"\W", "", said)
    if len(bare) == 1:
        said = bare.upper()
    said = re.sub(_RULED_OUT.format(letters), "", said)
    for form in _LETTERS:
        stated = re.search(form.format(letters), said)
        if stated is not None:
            return letters.index(stated[1])
    words = _words(said)
    named = [number for number, option in enumerate(options) if _says(words, _words(option))]
    if len(named) == 1:
        return named[0]
    return None


def judge_at(address: str, model: str) -> Matcher:
    """
    A language model behind an OpenAI-compatible address as the judge of answers; its key is in `OPENAI_API_KEY`. A
    `ValueError` where the client is not installed or gets no reply, and for a reply that is neither yes nor no.
    """
    try:
        from openai import OpenAI, OpenAIError
    except ImportError:
        raise ValueError("A judge needs the package openai: pip install openai.") from None
    client = OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY") or "none")

    def judge(record: VideoRecord, said: str) -> bool:
        prompt = _JUDGE.format(question=record.question, answer=record.answer, said=said)
        try:
            reply = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
            )
        except OpenAIError as error:
            raise ValueError(f"The judge {model} at {address} gave no reply: {error}") from None
        text = reply.choices[0].message.content or ""
        decision = _words(text)[:1]
        if decision not in (["yes"], ["no"]):
            raise ValueError(f"The judge {model} replied {text[:80]!r}; expected yes or no.")
        return decision == ["yes"]

    return judge

"""Whether a text that a model wrote gives the answer of a record: to the letter, by rules, or in a judge's opinion."""

import os
import re
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from unicodedata import normalize

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
_YES_OR_NO = (["yes"], ["no"])
_NEAR = 3  # words; a negation as near before an answer denies it
# A word with the vowel signs and accents of its script, as in "C++" also with signs at its end; or a number with its
# sign, points, commas and colons, or a range of numbers such as "4 or 5".
_WORD = re.compile(
    r"""(?x)
    (?: (?<![\w.])-?\.?(?=\d) )?
    (?: [\w\u0300-\u036f\u05b0-\u05bd\u064b-\u065f\u0900-\u0963\u0966-\u0dff\u0e31-\u0e4e\u0eb1-\u0ecd\u102b-\u103e]
        | '(?=\w) | (?<=\d)(?:[.,:-]|\ (?:or|to)\ )(?=\d) )+
    (?: [+\#]+(?!\w) )?
    """
)
# Where a text declares its choice, with all letters that it names there: "B." or "(B) a dog" at the start, "the answer
# is B", "Answer: A or B", "\boxed{B}". "A" before a word that is not one of a few is an article.
_DECLARED = r"""(?x)
    (?: ^\W*(?=[{0}]\b|\w\W*$)
    | (?i:\banswer(?:\W+(?:is|was|be|should|would|could|must|but|likely|option|choice)\b)*)\W+
    | \\boxed\W+(?:text\W+)?
    )
    ((?i:[{0}])\b(?!'|\ (?!(?i:or|and|nor|but|because|since|as|which|with|in)\b)\w)
    (?:\W+(?:(?:or|and|maybe|perhaps|option|choice)\W+)*
        (?i:[{0}])\b(?!'|\ (?!(?i:or|and|nor|but|because|since|as|which|with)\b)\w))*)
"""
# A letter that a text names: at the start, after a sign, or beside one of a few words.
_NAMED = r"""(?x)
    (?: (?:^|[^\w\s]\s*|\n|[\u2e80-\ud7a3]\s*|\b[{0}][ ]
        | \b(?i:both|is|be|it's|think|say|pick|choose|select|with|but|or|and|so|maybe|perhaps)\s)
        (?=[{0}])(?!(?:A|I)\ (?!(?i:is|was|or|and|nor|but|because|since|as|which|with|in)\b)\w)
    | \b(?i:option|choice)\W+(?i:is\W+)?
    | \b(?=[{0}]\ is\b)
    )
    ([{0}])(?!'|[^\W\u2e80-\ud7a3])
"""
# Letters that a text rules out: "not A", "neither (A) nor (B)", "rather than A", "A is wrong", "A isn't", "A. No,".
_RULED_OUT = r"""(?x)
    (?:\b(?i:not|neither|nor|rather\ than)|n't)\ (?:be\ )?(?:[Oo]ption\ )?\(?[{0}]\b\)?
    (?:\ or\ \(?[{0}]\b\)?)*(?!\ (?!(?:but|nor)\b)\w)
    | \(?\b[{0}]\b\)?\ (?:is|was|does|can|could|would)
      (?:(?:n?'t|\ ?not)(?!\ (?:be\ )?(?:wrong|incorrect|false)\b)|\ (?:wrong|incorrect|false))\b
    | \b[{0}]\b\W+(?i:no\b(?!\ \w)|no\ wait\b|wait\b|actually\b)
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
    word and not of a range. Any other answer must be said in the same words, and not be denied. Case, punctuation and
    articles do not count.
    """
    if record.options:
        right = _chosen(record.answer, record.options)
        return right is not None and right == _chosen(said, record.options)
    expected = _words(record.answer)
    words = _words(said)
    if expected in _YES_OR_NO:
        return [word for word in words if word in ("yes", "no")][:1] == expected
    if "".join(expected).isdecimal():
        return words[:1] == expected or set(filter(str.isdecimal, words)) == set(expected)
    return _says(words, expected)


def _words(text: str) -> list[str]:
    """The words that count, in which signs that look alike are equal; a text of signs alone is one word."""
    plain = normalize("NFKC", text).casefold().replace("’", "'")
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)|(?<=\d)\.0+\b", "", plain)  # "1,000" and "5.0" are 1000 and 5
    return [_DIGITS.get(word, word) for word in _WORD.findall(plain) if word not in _ARTICLES] or [plain]


def _says(words: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether the expected words follow each other among the words, without a negation just before them."""
    for start in range(len(words)):
        before = words[max(0, start - _NEAR) : start]
        if words[start : start + len(expected)] == expected and _NEGATIONS.isdisjoint(before):
            return True
    return False


def _chosen(said: str, options: Sequence[str]) -> int | None:
    """The option that a text chooses: by the letter declared last, by the only letter, or by the only text it holds."""
    letters = ascii_uppercase[: len(options)]
    words = _words(said)
    # The letters of an option's text, as in "both A and B", choose nothing.
    texts = "|".join(map(re.escape, options))
    said = re.sub(rf"(?i)(?<!\w)(?:an? )?(?!\w\b)(?:{texts})\b", "", normalize("NFKC", said))
    said = re.sub(_RULED_OUT.format(letters), "", said)
    for declared in re.findall(_DECLARED.format(letters), said):
        said = declared.upper()
    named = {letters.index(letter) for letter in re.findall(_NAMED.format(letters), said)}
    if not named:
        named = {number for number, option in enumerate(options) if _says(words, _words(option))}
    return named.pop() if len(named) == 1 else None


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
        if decision not in _YES_OR_NO:
            raise ValueError(f"The judge {model} replied {text[:80]!r}; expected yes or no.")
        return decision == ["yes"]

    return judge

"""Whether a text that a model wrote gives the answer of a record: to the letter, by rules, or in a judge's opinion."""

import os
import re
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from unicodedata import normalize

from ..data.records import VideoRecord

Matcher = Callable[[VideoRecord, str], bool]

_DIGITS = dict(
    re.findall(
        r"(\w+)=(\d+)",
        "zero=0 none=0 one=1 two=2 three=3 four=4 five=5 six=6 seven=7 eight=8 nine=9 ten=10 eleven=11 twelve=12 "
        "thirteen=13 fourteen=14 fifteen=15 sixteen=16 seventeen=17 eighteen=18 nineteen=19 twenty=20 thirty=30 "
        "forty=40 fifty=50 sixty=60 seventy=70 eighty=80 ninety=90",
    )
)
# Each table maps patterns to replacements, which are applied to a text in order.
_PLAIN = {
    r"\A(?s:.*)</think>": "",  # what a model thinks before it answers
    "[−–]": "-",
    "’": "'",
    r"(?i)n't\b": " not",
    r"(?:\*\*|`)([A-Za-z])(?:\*\*|`)": r"(\1)",  # "**A**" is "(A)"; other words lose their marks
    r"\*\*|`": "",
    # "twenty-five" becomes "twenty+five", later 20+5, and with the first rule of `_NUMBERS` 25.
    r"(?i)(?<=ty)-(?=(?:one|two|three|four|five|six|seven|eight|nine)\b)": "+",
}
_NUMBERS = {
    r"0\+(?=\d\b)": "",  # 20+5 becomes 25
    r"(?<=\d),(?=\d{3}\b)|(?<=\d)\.0+\b": "",  # "1,000" and "5.0" are 1000 and 5
    r"(?<=\d) hundred\b": "00",
    r"(?<=\d) thousand\b": "000",
    r"(?<=\d) million\b": "000000",
}
# A word or a number that counts, or no text where a clause ends and another follows.
_WORD = r"""(?x)
    (?<=\w) (?= [.,!?]\W{1,9}\w | \ but\b ) |
    # Articles do not count; "A+" and "A#" are not articles.
    (?<!\w) (?! (?:an?|the)(?![\w'+\#]) )
    # the sign and the leading point of a number: "-5", ".5"
    (?: (?<!\.)-?\.?(?=\d) )?
    # letters and digits, with the accents and vowel signs of Latin, Hebrew, Arabic, Indic, Thai, Lao and Burmese words
    (?: [\w\u0300-\u036f\u05b0-\u05bd\u064b-\u065f\u0900-\u0963\u0966-\u0dff\u0e31-\u0e4e\u0eb1-\u0ecd\u102b-\u103e]
        # an apostrophe within a word; a sign within a number, or a range of numbers: "1.5", "10:30", "4-5", "4 or 5"
        | (?<=\w)'(?=\w) | (?<=\d)(?:[.,:-]|\ (?:or|to)\ )(?=\d) )+
    # the signs at the end of "C++" and "C#"
    (?: [+\#]+(?!\w) )?
"""
# A line of `_words` with a number that is not denied.
_COUNT = r"""(?xm)
    ^ (?<!\bnot\n) (?<!\bnot\nexactly\n) (?<!\bcannot\nbe\n) (?<!\bthan\n) (?<!\bat\nleast\n) (?<!\bat\nmost\n) \d+$
"""
# Which letter a text chooses is read from a sketch of it: letters of options stay, and each other word becomes a sign.
# "The answer is not (A) but B." becomes "_!=~@A=B,". The signs mean:
#   !  chooses the letter that follows       ~  not
#   =  "is", and other words beside a letter /  wrong
#   +  "are": the plural of "="              ?  takes back the letter before
#   @  option                                ,  punctuation
#   &  joins letters                         _  any other word, put in after these rules
#   <  gives a reason
_SKETCH = {
    r"\\(?!boxed)[a-z]+": ",",  # commands of LaTeX
    r"(?<=\w)['-](?=[a-z])": "",  # "it's" and "x-ray" are one word
    r"(?<!\w)(?:[(\[{*\"'“]{1,4}|(?=\w\)))"  # "(" of "(A)", or nothing before "A)"
    r"([A-Za-z])[)\]}*\"'”]+(?!\w)": r" option \1 ",
    r"[\"“](?=\w\w)": "",  # a quotation mark before a word
    r"[^\w ]|_": ",",
    r"\b(?i:all|anything|everything) but\b": "~",  # "all but B" rules B out
    # Words after which the chosen letter follows; in Chinese, the end of "answer", and "choose" but not "option".
    r"\b(?i:answer|boxed|pick|chose|choose|select|likely|probably|definitely|clearly)\b|案|选(?!项)": "!",
    # Other words beside a letter. "ca" is left of "can't"; the Chinese words mean "is".
    r"\b(?i:is|was|be|its|thats|think|say|should|would|could|must|does|ca|but|so|with)\b|是|为": "=",
    # Before a denial, it rules out all letters in front of it.
    r"\b(?i:are|were)\b": "+",
    r"\b(?i:option|choice|letter)s?\b": "@",
    # Words between letters; the Chinese words mean "or" and "and".
    r"\b(?i:or|and|both|either|maybe|perhaps)\b|或|和": "&",
    # A letter right after one of these is not the chosen one.
    r"\b(?i:because|since|as|which|in)\b": "<",
    # Words that rule a letter out; the Chinese words mean "not".
    r"\b(?i:not|neither|nor|than|cannot)\b|不|非": "~",
    r"\b(?i:wrong|incorrect|false)\b": "/",
    r"\b(?i:no|wait|actually)\b": "?",
    r"[\u2e80-\ud7a3]": ",",  # other words of scripts without spaces
}
_RULED_OUT = r"""(?x)
    ~[=@!]* (?:=_{1,2}![=@]*)?                # "not", "not think the answer is"
    [A-Z] (?:[&~@]+[A-Z])* (?![_!])           # "not A", "neither A nor B"; not in "not A dog" or "not A likely one"
    | [A-Z][=!]+~ (?!=?/)                     # "A is not"; not in "A is not wrong"
    | (?:[A-Z][,&@]{0,9}){1,9} \+ (?:~(?!/)|/)  # "A and B are not", "A and B are wrong"; not in "A and B are not wrong"
    | [A-Z] [=,]* /                           # "A is wrong", "A: wrong"
    | [A-Z] ,*\? (?!_)                        # "A. No,"; not in "A. No dog"
"""
_DECLARED = r"""(?x)
    (?:^|!) [=,&@]*                           # after "answer", or at the start
    ( (?:[A-Z] (?!@*[^,&@<A-Z]) [,&@]*)+      # letters that no other word follows, such as "A" and "A or B"
    | (?:[a-z] (?![^,&<a-z]) [,&@]*)+ )       # the same in small letters, but not the article of "a choice"
"""
_NAMED = r"""(?x)
    (?<=@)[A-Z]                               # "option A"
    | [A-HJ-Z](?==)                           # "B is"; not I, because of "I think"
    | (?<![_~<]) (?![AI]@*[^,&@<A-Z]) [A-Z]   # a letter with no other word before it, except in "A man" or "I see"
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
    by its text. "Yes" or "no" must be the first of the two that is said. A number must be the only number that is not
    denied, or the first word unless this begins a range such as "4 or 5". Any other answer must be said in the same
    words, and not be denied or be one of two, as in "red or blue". Case, articles and most punctuation do not count.
    """
    if record.options:
        right = _chosen(record.answer, record.options)
        return len(right) == 1 and right == _chosen(said, record.options)
    expected = _words(record.answer)
    words = _words(said)
    if expected in ("yes", "no"):
        return re.findall("(?m)^(?:yes|no)$", words)[:1] == [expected]
    if expected.isdecimal():  # `_WORD` takes a range such as "4 or 5" for one word
        return words.split("\n")[0] == expected or set(re.findall(_COUNT, words)) == {expected}
    return _says(words, expected)


def _rewritten(text: str, rules: dict[str, str] = _PLAIN) -> str:
    text = normalize("NFKC", text)
    for pattern, replacement in rules.items():
        text = re.sub(pattern, replacement, text)
    return text


def _words(text: str) -> str:
    """
    The words that count, one a line, with numbers in digits, and an empty line between clauses. A text of signs alone
    is one word.
    """
    plain = _rewritten(text).casefold()
    plain = re.sub(r"\w+", lambda word: _DIGITS.get(word[0], word[0]), plain)
    plain = _rewritten(plain, _NUMBERS)
    return "\n".join(re.findall(_WORD, plain)).strip() or plain


def _says(words: str, expected: str) -> bool:
    """
    Whether the expected words are said, with no "or" after them, and no denial or "or" in the three words of a clause
    before.
    """
    expected = re.escape(expected).replace("\\\n", "$\n*")  # a clause may end between them
    # At each place where the expected words are found, group 1 is the denial before them, or empty.
    return "" in re.findall(
        r"(?m)^((?:not|no|never|without|or|nor|neither|nothing|cannot|rather\nthan|instead\nof)\n(?:.+\n){0,2})?"
        rf"{expected}$(?!\n+or$)",
        words,
    )


def _chosen(said: str, options: Sequence[str]) -> set[str]:
    """The options that a text chooses: the letters declared last, all letters named, or those whose text it holds."""
    sketch = re.sub(_RULED_OUT, ",", _sketch(said, options))
    letters = re.findall(_DECLARED, sketch)[-1:] or re.findall(_NAMED, sketch)
    if letters:
        return set(re.findall("[A-Z]", "".join(letters).upper()))
    words = _words(said)
    return {letter for letter, option in zip(ascii_uppercase, options, strict=False) if _says(words, _words(option))}


def _sketch(said: str, options: Sequence[str]) -> str:
    """The sketch of a text. The options' own texts are left out: a letter in the option "both A and B" is no choice."""
    sketch = _rewritten(said)
    for option in options:
        if len(option) > 1:
            own = re.escape(_rewritten(option).rstrip("."))
            sketch = re.sub(rf"(?i)(?<!\w)(?:an? \"?)?{own}(?!\w)", "", sketch)
    letters = ascii_uppercase[: len(options)]
    return re.sub(rf"(?i)\b(?![{letters}]\b)\w+", "_", _rewritten(sketch, _SKETCH)).replace(" ", "")


def judge_at(address: str, model: str) -> Matcher:
    """
    A language model behind an OpenAI-compatible address as the judge of answers; its key is in `OPENAI_API_KEY`.

    Raises:
        ValueError: here if the package `openai` is not installed; from the judge if there is no reply, or one that is
            neither yes nor no.
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
        decision = _words(text).split("\n")[0]
        if decision not in ("yes", "no"):
            raise ValueError(f"The judge {model} replied {text[:80]!r}; expected yes or no.")
        return decision == "yes"

    return judge

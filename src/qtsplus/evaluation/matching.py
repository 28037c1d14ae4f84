"""Whether a text that a model wrote gives the answer of a record: to the letter, by rules, or in a judge's opinion."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import ascii_lowercase
from unicodedata import normalize

from text_to_num import alpha2digit

from ..common.files import rewritten
from ..data.records import VideoRecord, lone_letter, options_by_letter, right_letter

logger = logging.getLogger(__name__)

Matcher = Callable[[VideoRecord, str], bool]

# --- From a text to its clauses (`_clauses`), within which a denial counts: "It isn't a cat; two dogs run." becomes
# the lines "it is not cat" and "2 dogs run". ---

# Each table maps patterns to replacements, which are applied to a text in order.
_PLAIN = {
    r"\A(?s:.*)</think>": "",  # what a model thinks before it answers
    "[−–]": "-",
    "’": "'",
    r"(?i)n't\b": " not",
    r"(?:\*\*|`|__)([A-Za-z])(?:\*\*|`|__)": r"(\1)",  # "**A**" is "(A)"; other words lose their marks
    r"\*\*|`": "",
    r"(?i)\b(?:(?:all|anything|everything) (?:but|except)|rather than|instead of|except)\b": "not",
    r"(?<=\w)/(?=\w)": " or ",
    # Numbers that mix digits and words, and exceptions to `alpha2digit`, which reads numbers in words afterwards
    r"(?<=\d),(?=\d{3}\b)|(?<=\d)\.0+\b": "",  # "1,000" and "5.0" are 1000 and 5
    r"(?i)(?<=\d)\.(\d) million\b": r"\g<1>00000",
    r"(?i)(?<=\d) million\b": "000000",
    r"(?i)(?<=\d) thousand\b": "000",
    r"(?i)(?<=\d) hundred\b": "00",
    r"(?i)\bhalf a million\b": "500000",
    r"(?i)\b(hundred|thousand|million)s\b": r"\1_s",  # `alpha2digit` would read "hundreds" as 100
    r"(?i)\b(one|two|three|four|five|six|seven|eight|nine|ten)-(?=[a-z])": r"\1 ",  # it would not read "five-year-old"
    r"(?i)(?<!half )\ba dozen\b": "12",
    r"(?i)\bnone\b": "0",
}
_SPELLING = {
    r"\b([cdjlmnst]|qu)'(?=\w)": r"\1 ",  # French "l'église" is two words
    # Commas within a denied phrase are dropped, so that they end no clause: "not a big, red car", "no cats, dogs or
    # birds"
    r"\b((?:not|without) an?|no) ([\w-]+),(?: ([\w-]+),)? "
    r"(?!(?:an?|the|it|he|she|they|there|this|that|i|we|you|but|so|only|just|\d+)\b)": r"\1 \2 \3 ",
}
_CLAUSE_END = r"""(?x)
    [.,;:!?] (?!\d) | [\n…—。，、；：！？।] | [ ]-+[ ]
    # before a word that begins a clause, and before "and" if a marked letter with its own verb follows: "and @B is"
    | (?= \b (?:but|so|because|since|until|although|though|whereas|while|pero|sino|porque|mais|aber|sondern|weil) \b )
    | (?= \b and\ @\w\ (?:is|was|ca|does) \b )
"""
_WORD = r"""(?x)
    @\w |  # the marked letter of an option, see `_MARKS`
    # Articles do not count; "A+" and "A#" are not articles.
    (?<!\w) (?! (?:an?|the)(?![\w'+\#]) )
    # the sign and the leading point of a number: "-5", ".5"
    (?: (?<!\.)-?\.?(?=\d) )?
    # letters and digits, with the accents and vowel signs of Latin, Hebrew, Arabic, Indic, Thai, Lao and Burmese words
    (?: [\w\u0300-\u036f\u05b0-\u05bd\u064b-\u065f\u0900-\u0963\u0966-\u0dff\u0e31-\u0e4e\u0eb1-\u0ecd\u102b-\u103e]
        # an apostrophe within a word; a sign within a number, or a range of numbers: "1.5", "10:30", "4-5"
        | (?<=\w)'(?=\w) | (?<=\d)[.,:-](?=\d) )+
    # the signs at the end of "C++" and "C#"
    (?: [+\#]+(?!\w) )?
"""

# --- What a clause says. Its words are separated by single spaces. ---

# After one of these words, the rest of a clause is denied or uncertain, in English, Spanish, French or German.
_UNSURE = (
    "not|no|never|without|neither|nor|nothing|nobody|cannot|0|or|"
    "nunca|ni|sin|o|pas|jamais|sans|ou|nicht|kein|keine|keinen|nie|ohne|oder"
)
_YES_OR_NO = r"(?<!\S)(?:(yes|sí|oui|ja)|no|non|nein)(?!\S)"  # group 1 is a word for "yes"
# Where neither is said, a denial is "no", but not "I do not know". Group 1 is empty, so that it counts as "no".
_DENIED = r"(?<!\S)()(?:not(?! (?:sure|certain|clear|know|only)(?!\S))|nobody|nothing|never)(?!\S)"
# A whole number, but not that of "not 3", "more than 3" or "at least 3"
_COUNT = r"(?<!\S)(?<!\bnot )(?<!\bnot exactly )(?<!\bcannot be )(?<!\bthan )(?<!\bat least )(?<!\bat most )\d+(?!\S)"
# A text that begins with a number: its other numbers do not count, unless the first begins a range such as "4 or 5".
_FIRST_COUNT = r"(?s)\A(\d+)(?!\S| (?:or|to) \d).*"

# --- Which letter a text chooses. Letters of options are marked: "(A)" and "B." become "option @A" and "@B.". ---

_MARKS = {
    r"\\(?!boxed)[a-z]+": " ",  # commands of LaTeX
    # Chinese: "answer", "choose" but not "option", "is", "or" and "and", "not" and "wrong"; other words end a clause.
    "案|选(?!项)": " answer ",
    "是|为": " is ",
    "或|和": " or ",
    "不|非|错": " not ",
    "[\u2e80-\ud7a3]": " , ",
    r"(?i)\bnot (?:wrong|incorrect|false)\b": "right",
    r"(?i)\b(?:wait|actually)\b": r", \g<0>, ",
    r"\b(?i:option|opción|choice|letter)s? ([A-Z])(?![\w'+#-])": r"option @\1",
    r"(?<!\w)(?:[(\[{*\"'“]{1,4}|(?=\w\)))"  # "(" of "(A)", or nothing before "A)"
    r"([A-Za-z])[)\]}*\"'”]+(?!\w)": r" option @\1 ",
    r"""(?xm)
        (?<! [\w@'.-] )
        (?: [B-HJ-Z]  # any capital letter, except for the article "A" and the pronoun "I" before most words
            | [AI] (?! \ ["“]?\w )
            | A (?= \ (?:[A-Z]|is|was|ca|does|are|were|or|and|because|since|as|which|wrong)\b )
            | [a-z] (?= \ * (?: [.,:;!?)\]}"](?!\w) | $ ) | \ (?:or|and|because|since|as|which)\b )  # "a." or "a or b"
        )
        (?! [\w'+\#-] )
    """: r"@\g<0>",
    # Each of these stays in one clause: a list of letters, "Answer: A", and a letter with what is said of it, as in
    # "A: wrong" and "A. No, B."
    r"(@\w) *[,&+] *(?=(?:and |or |option )*@)": r"\1 and ",
    r"(?i)\b(answer|choice)( is)?\s*[:\n=-]\s*": r"\1\2 ",
    r"(?i)(@\w)\W+(?=(?:(?:it|that|this)(?: is|'s) )?(?:wrong|incorrect|false|no|wait|actually) *(?:[.,;:!?\n]|$))": (
        r"\1 "
    ),
}
# Words that rule out a letter; "than" and "over" do so in "B is better than A" and "B over A".
_WRONG = r"\b(?:not|neither|nor|cannot|no|0|than|over|wrong|incorrect|false|wait|actually|nicht|pas)\b"
# Words that declare an answer
_ANSWER = (
    r"\b(?:answer(?:'s)?|boxed|pick|chose|choose|select|likely|probably|definitely|clearly|respuesta|réponse|antwort)\b"
)
# A marked letter names an option at the start of a clause and after one of these words. After other words it is part of
# a name, as in "vitamin C".
_LINK = (
    rf"(?:{_ANSWER}|(?<=@\w)|\b(?:is|was|be|it|its|it's|that|thats|that's|i|i'd|i'll|think|say|should|would|could|must|"
    "does|ca|but|so|with|and|or|both|either|maybe|perhaps|are|were|options?|choice|letter|only|hence|therefore|thus|"
    r"es|est|ist)\b)"
)
_NAMED = rf"(?m)(?:^|{_LINK} )@(\w)"
# The part of a clause that rules out its letters: the denial and what follows, as in "not A"; if no letter follows, the
# whole clause, as in "A is wrong".
_RULED_OUT = rf"(?m){_WRONG}.*@.*|^(?=.*@).*{_WRONG}(?!.*@).*"
# Where the chosen letters are looked for, until some are found: in the last clause that declares an answer, in the
# clauses that end in a letter, and in all clauses
_CHOOSING = (rf"\A(?:.*\n)*(?=.*@)(.*{_ANSWER}.*)", r"(?m)^.*@\w$", ".+")

_JUDGE = """Question: {record.question}
Right answer: {record.answer}
Given answer: {said}
Does the given answer say the same as the right answer? Reply with yes or no."""


def is_exact(record: VideoRecord, said: str) -> bool:
    """Whether the text equals the record's answer, character by character."""
    return said == record.answer


def gives_answer(record: VideoRecord, said: str) -> bool:
    """
    Whether a sentence gives the record's answer. Case, articles and most punctuation do not count. The first rule that
    applies decides:

    - With options, the sentence must choose the right option alone, by its letter or by its text.
    - If the answer is a letter and the sentence names letters of options, it must choose this letter alone.
    - "Yes" or "no" must be the first of the two that is said. Where neither is said, a denial is "no".
    - A number must be the only number that is not denied, or the first word unless this begins a range: "4 or 5".
    - Any other answer must be said in the same words, neither denied nor as one of two: "red or blue".
    """
    if record.options:
        return _chosen(said, record.options) == {right_letter(record.answer, record.options)}
    letter = lone_letter(record.answer)
    named = _named(said, dict.fromkeys(ascii_lowercase, ""))
    if letter and named:  # The record has no `options`, but its question may name them.
        return named == {letter}
    expected = _clauses(record.answer)
    clauses = _clauses(said)
    expected_yes = re.fullmatch(_YES_OR_NO, expected)
    if expected_yes:
        said_yes = re.search(_YES_OR_NO, clauses) or re.search(_DENIED, clauses)
        return said_yes is not None and bool(said_yes[1]) == bool(expected_yes[1])
    if expected.isdecimal():
        return set(re.findall(_COUNT, re.sub(_FIRST_COUNT, r"\1", clauses))) == {expected}
    return _says(clauses, expected)


def _plain(text: str) -> str:
    return rewritten(normalize("NFKC", text), _PLAIN)


def _clauses(text: str) -> str:
    """The words that count, a clause on each line, with numbers in digits. A text of signs alone stays."""
    plain = alpha2digit(_plain(text), "en", threshold=0).casefold()
    parts = re.split(_CLAUSE_END, rewritten(plain, _SPELLING))
    return "\n".join(filter(None, (" ".join(re.findall(_WORD, part)) for part in parts))) or plain


def _says(clauses: str, expected: str) -> bool:
    """
    Whether the clauses say the expected words: without a denial before them in their clause, and without "or" on either
    side.
    """
    words = r"\s".join(map(re.escape, expected.split()))  # clauses may end between the words: `\s` is also a line break
    sure_words = rf"(?:(?!(?:{_UNSURE}) )\S+ )*"
    return re.search(rf"(?m)^{sure_words}{words}(?!\S|\s(?:or|o|ou|oder)\s)", clauses) is not None


def _chosen(said: str, options: Sequence[str]) -> set[str]:
    """
    The lower-case letters of the options that a text chooses: the letters that it names and does not rule out, or if
    there are none, the options whose texts it says. Where it says the option "cat and dog", "cat" alone is not chosen.
    """
    by_letter = options_by_letter(options)
    named = _named(said, by_letter)
    if named:
        return named
    clauses = _clauses(said)
    texts = {letter: _clauses(option) for letter, option in by_letter.items()}
    spoken = {letter: text for letter, text in texts.items() if _says(clauses, text)}
    longest = max(spoken.values(), key=len, default="")
    return {letter for letter, text in spoken.items() if text == longest or not _says(longest, text)}


def _named(said: str, by_letter: Mapping[str, str]) -> set[str]:
    """The letters of options that a text names and does not rule out."""
    marked = _clauses(_marked(said, by_letter.values()))
    possible = by_letter.keys() - re.findall(r"@(\w)", "\n".join(re.findall(_RULED_OUT, marked)))
    for choosing in _CHOOSING:
        chosen = possible.intersection(re.findall(_NAMED, "\n".join(re.findall(choosing, marked))))
        if chosen:
            return chosen
    return set()


def _marked(said: str, options: Iterable[str]) -> str:
    """
    A text with marked letters. The options' own texts are first removed from it, since the letters in them name no
    options: "both A and B".
    """
    plain = _plain(said)
    for option in options:
        if len(option) > 1:
            own_text = re.escape(_plain(option).rstrip("."))
            plain = re.sub(rf"(?i)(?<!\w)(?:an? \"?)?{own_text}(?!\w)", "", plain)
    return rewritten(plain, _MARKS)


def judge_at(address: str, model: str) -> Matcher:
    """
    A language model behind an OpenAI-compatible address as the judge of answers. The environment variable
    `OPENAI_API_KEY` holds the key for the address. If a reply is neither yes nor no, the judge logs a warning and does
    not accept the answer.

    Raises:
        ValueError: if the package `openai` is not installed, or if a first request, which is sent at once, gets no
            reply. The returned judge raises it too if a later request gets no reply.
    """
    try:
        from openai import OpenAI, OpenAIError
    except ImportError:
        raise ValueError("A judge needs the package openai: pip install openai.") from None
    client = OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY") or "none")

    def reply_to(content: str) -> str:
        messages: list = [{"role": "user", "content": content}]
        try:
            reply = client.chat.completions.create(model=model, messages=messages, temperature=0)
            return str(reply.choices[0].message.content)
        # The last four are raised if the reply is not JSON, is an error page, or is JSON of another form.
        except (OpenAIError, ValueError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"The judge {model} at {address} gave no chat completion: {error}") from None

    def judge(record: VideoRecord, said: str) -> bool:
        text = reply_to(_JUDGE.format(record=record, said=said))
        decision = re.search(r"(?m)^(yes|no)\b(?! or\b)", _clauses(text))
        if decision:
            return decision[1] == "yes"
        logger.warning("The judge %s replied %.80r; expected yes or no.", model, text)
        return False

    reply_to("Reply with yes.")
    return judge

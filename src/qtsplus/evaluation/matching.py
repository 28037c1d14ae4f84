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

# --- From a text to its clauses (`_clauses`): "It isn't a cat; two dogs run." is "it is not cat" and "2 dogs run". ---

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
    # Numbers that are not all words; `alpha2digit` reads the others.
    r"(?<=\d),(?=\d{3}\b)|(?<=\d)\.0+\b": "",  # "1,000" and "5.0" are 1000 and 5
    r"(?i)(?<=\d)\.(\d) million\b": r"\g<1>00000",
    r"(?i)(?<=\d) million\b": "000000",
    r"(?i)(?<=\d) thousand\b": "000",
    r"(?i)(?<=\d) hundred\b": "00",
    r"(?i)\bhalf a million\b": "500000",
    r"(?i)\b(hundred|thousand|million)s\b": r"\1_s",  # it would read "hundreds" as 100,
    r"(?i)\b(one|two|three|four|five|six|seven|eight|nine|ten)-(?=[a-z])": r"\1 ",  # and not read "five-year-old"
    r"(?i)(?<!half )\ba dozen\b": "12",
    r"(?i)\bnone\b": "0",
}
_SPELLING = {
    r"\b([cdjlmnst]|qu)'(?=\w)": r"\1 ",  # French "l'église" is two words
    # A comma inside of what is denied does not end the clause: "not a big, red car", "no cats, dogs or birds".
    r"\b((?:not|without) an?|no) ([\w-]+),(?: ([\w-]+),)? "
    r"(?!(?:an?|the|it|he|she|they|there|this|that|i|we|you|but|so|only|just|\d+)\b)": r"\1 \2 \3 ",
}
_CLAUSE_END = r"""(?x)
    [.,;:!?] (?!\d) | [\n…—。，、；：！？।] | [ ]-+[ ]
    # before a word that begins a clause, and before "and" if the next letter of an option has its own verb
    | (?= \b (?:but|so|because|since|until|although|though|whereas|while|pero|sino|porque|mais|aber|sondern|weil) \b )
    | (?= \b and\ @\w\ (?:is|was|ca|does) \b )
"""
_WORD = r"""(?x)
    @\w |  # the marked letter of an option
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

# Behind one of these words, the rest of a clause is denied or uncertain, in English, Spanish, French or German.
_UNSURE = (
    "not|no|never|without|neither|nor|nothing|nobody|cannot|0|or|"
    "nunca|ni|sin|o|pas|jamais|sans|ou|nicht|kein|keine|keinen|nie|ohne|oder"
)
_YES_OR_NO = r"(?<!\S)(?:(yes|sí|oui|ja)|no|non|nein)(?!\S)"  # group 1 is empty for "no"
# Where neither is said, a denial is "no", but "I do not know" is not.
_DENIED = r"(?<!\S)()(?:not(?! (?:sure|certain|clear|know|only)(?!\S))|nobody|nothing|never)(?!\S)"
# A number, but not in "not 3", "more than 3" or "at least 3".
_COUNT = r"(?<!\S)(?<!\bnot )(?<!\bnot exactly )(?<!\bcannot be )(?<!\bthan )(?<!\bat least )(?<!\bat most )\d+(?!\S)"
# A text that begins with a number, which counts alone unless it begins the range "4 or 5".
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
    r"(@\w) *[,&+] *(?=(?:and |or |option )*@)": r"\1 and ",  # a list of letters is in one clause,
    r"(?i)\b(answer|choice)( is)?\s*[:\n=-]\s*": r"\1\2 ",  # and so are "Answer: A",
    # "A: wrong" and "A. No, B."
    r"(?i)(@\w)\W+(?=(?:(?:it|that|this)(?: is|'s) )?(?:wrong|incorrect|false|no|wait|actually) *(?:[.,;:!?\n]|$))": (
        r"\1 "
    ),
}
_WRONG = r"\b(?:not|neither|nor|cannot|no|0|than|over|wrong|incorrect|false|wait|actually|nicht|pas)\b"
_ANSWER = (
    r"\b(?:answer(?:'s)?|boxed|pick|chose|choose|select|likely|probably|definitely|clearly|respuesta|réponse|antwort)\b"
)
# A letter is that of an option at the start of a clause, and behind these words. Behind others it is a part of a name,
# as in "vitamin C".
_LINK = (
    rf"(?:{_ANSWER}|(?<=@\w)|\b(?:is|was|be|it|its|it's|that|thats|that's|i|i'd|i'll|think|say|should|would|could|must|"
    "does|ca|but|so|with|and|or|both|either|maybe|perhaps|are|were|options?|choice|letter|only|hence|therefore|thus|"
    r"es|est|ist)\b)"
)
_NAMED = rf"(?m)(?:^|{_LINK} )@(\w)"
# "not A", "B, not A", and where no letter follows the denial "A is wrong"
_RULED_OUT = rf"(?m){_WRONG}.*@.*|^(?=.*@).*{_WRONG}(?!.*@).*"
# The last clause that declares an answer, the clauses that end in a letter, and all clauses
_CHOOSING = (rf"\A(?:.*\n)*(?=.*@)(.*{_ANSWER}.*)", r"(?m)^.*@\w$", ".+")

_JUDGE = """Question: {record.question}
Right answer: {record.answer}
Given answer: {said}
Does the given answer say the same as the right answer? Reply with yes or no."""


def is_exact(record: VideoRecord, said: str) -> bool:
    """Whether the text is the record's answer to the letter."""
    return said == record.answer


def gives_answer(record: VideoRecord, said: str) -> bool:
    """
    Whether a sentence gives the record's answer. With options, the sentence must choose the right one, by its letter or
    by its text. "Yes" or "no" must be the first of the two that is said; where neither is said, a denial is "no". A
    number must be the only number that is not denied, or the first word unless this begins a range such as "4 or 5".
    An answer that is a letter is an option's, where the sentence names options. Any other answer must be said in the
    same words, and not be denied or be one of two, as in "red or blue". Case, articles and most punctuation do not
    count.
    """
    if record.options:
        return _chosen(said, record.options) == {right_letter(record.answer, record.options)}
    letter = lone_letter(record.answer)
    named = _named(said, dict.fromkeys(ascii_lowercase, ""))
    if letter and named:  # of options that only the question names
        return named == {letter}
    expected = _clauses(record.answer)
    clauses = _clauses(said)
    right_side = re.fullmatch(_YES_OR_NO, expected)
    if right_side:
        side = re.search(_YES_OR_NO, clauses) or re.search(_DENIED, clauses)
        return side is not None and bool(side[1]) == bool(right_side[1])
    if expected.isdecimal():
        return set(re.findall(_COUNT, re.sub(_FIRST_COUNT, r"\1", clauses))) == {expected}
    return _says(clauses, expected)


def _plain(text: str) -> str:
    return rewritten(normalize("NFKC", text), _PLAIN)


def _clauses(text: str) -> str:
    """The words that count, a clause on each line, with numbers in digits. A text of signs alone is one word."""
    plain = alpha2digit(_plain(text), "en", threshold=0).casefold()
    parts = re.split(_CLAUSE_END, rewritten(plain, _SPELLING))
    return "\n".join(filter(None, (" ".join(re.findall(_WORD, part)) for part in parts))) or plain


def _says(clauses: str, expected: str) -> bool:
    """Whether the expected words are said, with no denial in their clause before them, and no "or" on either side."""
    words = r"\s".join(map(re.escape, expected.split()))  # a clause may end between them
    sure = rf"(?:(?!(?:{_UNSURE}) )\S+ )*"
    return re.search(rf"(?m)^{sure}{words}(?!\S|\s(?:or|o|ou|oder)\s)", clauses) is not None


def _chosen(said: str, options: Sequence[str]) -> set[str]:
    """
    The letters of the options that a text chooses. It chooses the letters that it names and does not rule out. If there
    are none, it chooses the options whose texts it says, but not "cat" where it says the option "cat and dog".
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
    """A text with marked letters. The options' own texts are left out: the option "both A and B" names no letters."""
    plain = _plain(said)
    for option in options:
        if len(option) > 1:
            own = re.escape(_plain(option).rstrip("."))
            plain = re.sub(rf"(?i)(?<!\w)(?:an? \"?)?{own}(?!\w)", "", plain)
    return rewritten(plain, _MARKS)


def judge_at(address: str, model: str) -> Matcher:
    """
    A language model behind an OpenAI-compatible address as the judge of answers; its key is in `OPENAI_API_KEY`.

    Raises:
        ValueError: here if the package `openai` is not installed or a first request gets no reply; from the judge if
            a later one gets none. If a reply is neither yes nor no, the judge logs a warning and does not accept the
            answer.
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
        # What is not OpenAI's kind of error is about a reply that is no JSON, or an error page or another JSON.
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

"""Arguments of [`TinyWorldTrainer`]."""

from dataclasses import dataclass, field

from qtsplus.training.arguments import QTSplusTrainingArguments


@dataclass
class TinyWorldTrainingArguments(QTSplusTrainingArguments):
    """
    [`QTSplusTrainingArguments`], and what teaches a small base to see and to read.

    Args:
        language_model_learning_rate (`float`, *optional*): of the language model or its adapters, if another.
        muon_scale (`float`, *optional*): the weights of linear maps are trained by Muon, at this many times the
            learning rate of their part, and the rest by `optim`; a small model leaves its plateau several times sooner.
        naming_weight (`float`, defaults to 0): weight of the cross-entropy of what every visual token shows, for
            records with `token_words`, of the second, row and column that it stands in, and of what it shows beside
            earlier tokens.
        looking_weight (`float`, defaults to 0): for records with `needles`, weight of -log of the share of the
            attention that an answer pays to the visual tokens it rests on. `looking_share` of it is enough. With
            `token_words` the same, in the layer before, of what a token pays to the one of the step before that
            shows the same. Not in steps that leave tokens out.
        looking_share (`float`, defaults to 0.5): how much of its attention an answer is to pay to what it rests on.
        sparing_weight (`float`, defaults to 0): for records with `needles`, weight of -log of the share of the
            attention that an answer that rests on no visual token ("No") leaves to the text, up to nine tenths.
        looking_layer (`int`, defaults to 2): the layer of the language model that is to look, counted from 0.
        rivals (`int`, defaults to 0): with a `relevance_weight` and kept attention (`data.features`), for records with
            `token_words`: so many tokens of other videos that do not show what is asked for, among which a row's own
            are to be found too.

    Raises:
        ValueError: a value out of its range, or a loss of a part that is frozen.
    """

    language_model_learning_rate: float | None = field(default=None)
    muon_scale: float | None = field(default=None)
    naming_weight: float = field(default=0.0)
    looking_weight: float = field(default=0.0)
    looking_share: float = field(default=0.5)
    sparing_weight: float = field(default=0.0)
    looking_layer: int = field(default=2)
    rivals: int = field(default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("naming_weight", "looking_weight", "sparing_weight", "looking_layer", "rivals"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least 0.")
        if self.muon_scale is not None and self.muon_scale <= 0:
            raise ValueError(f"muon_scale={self.muon_scale}: expected a number above 0.")
        if self.naming_weight and self.freeze_vision_model and self.freeze_language_model:
            raise ValueError(
                "naming_weight teaches the vision tower and the language model: set freeze_vision_model or "
                "freeze_language_model to false."
            )
        if not 0 < self.looking_share <= 1:
            raise ValueError(f"looking_share={self.looking_share!r}: expected a share above 0, up to 1.")
        for name in ("looking_weight", "sparing_weight"):
            if getattr(self, name) and self.freeze_language_model:
                raise ValueError(f"{name} teaches the language model: set freeze_language_model to false.")

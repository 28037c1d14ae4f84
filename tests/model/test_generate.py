"""`generate` against a loop without a cache over the same shortened prompt."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from tiny import EOS, PAD, assert_same, batch, compress, prompt

VIDEO = (4, 8, 12)
WIDE = (3, 4, 20)
IMAGE = (1, 8, 8)
VOCABULARY = 512
NEW = 8
CALL = {
    "max_new_tokens": NEW,
    "do_sample": False,
}


@pytest.fixture(scope="module")
def ragged():
    """Rows that keep different counts: a video, text alone, an image with two videos."""
    return batch(
        prompt(videos=[VIDEO]),
        prompt(seed=1),
        prompt(images=[IMAGE], videos=[WIDE, VIDEO], seed=2),
    )


@pytest.fixture(scope="module")
def single():
    return batch(prompt(videos=[VIDEO]))


class Loop:
    """Decodes one token at a time, every step from the start, with nothing but the language model."""

    def __init__(self, model, inputs, copies=1, **call):
        self.model = model
        compact = compress(
            model.model,
            **inputs,
            **call,
            sample_gate=False,
            pad_left=True,
        )
        ids = compact.input_ids
        embeds = model.get_input_embeddings()(ids).detach()
        embeds = model.model.splice(embeds, ids, compact.features)
        self.prompt_length = ids.shape[1]
        self.ids = ids.repeat_interleave(copies, 0)
        self.embeds = embeds.repeat_interleave(copies, 0)
        self.mask = compact.attention_mask.repeat_interleave(copies, 0)
        self.positions = compact.position_ids.repeat_interleave(copies, 1)

    @property
    def new(self):
        return self.ids[:, self.prompt_length :]

    @torch.no_grad()
    def logits(self):
        output = self.model.model.language_model(
            inputs_embeds=self.embeds,
            attention_mask=self.mask,
            position_ids=self.positions,
            use_cache=False,
        )
        return self.model.lm_head(output.last_hidden_state[:, -1])

    @torch.no_grad()
    def append(self, tokens):
        new = tokens[:, None]
        embeds = self.model.get_input_embeddings()(new)
        next_positions = self.positions[..., -1:] + 1
        self.ids = torch.cat([self.ids, new], dim=1)
        self.embeds = torch.cat([self.embeds, embeds], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], dim=1)
        self.positions = torch.cat([self.positions, next_positions], dim=2)

    def select(self, rows):
        self.ids = self.ids[rows]
        self.embeds = self.embeds[rows]
        self.mask = self.mask[rows]
        self.positions = self.positions[:, rows]

    def decode(self, choose, steps=NEW):
        """Until every row has ended or `steps` tokens; a row that has ended gets padding."""
        is_done = torch.zeros(len(self.ids), dtype=torch.bool)
        scores = []
        for _ in range(steps):
            logits = self.logits()
            scores.append(logits)
            tokens = choose(logits).masked_fill(is_done, PAD)
            self.append(tokens)
            is_done |= tokens == EOS
            if is_done.all():
                break
        return scores


def greedy(logits):
    return logits.argmax(-1)


def new_tokens(sequences, inputs):
    """What comes behind the caller's own ids."""
    copies = len(sequences) // len(inputs["input_ids"])
    prompt_ids = inputs["input_ids"].repeat_interleave(copies, 0)
    width = prompt_ids.shape[1]
    assert_same(sequences[:, :width], prompt_ids)
    return sequences[:, width:]


def check_tokens(sequences, inputs, loop):
    assert_same(new_tokens(sequences, inputs), loop.new)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"retention": 0.1},
        {"max_visual_tokens": 5},
    ],
    ids=str,
)
def test_greedy_with_scores(model, ragged, call):
    loop = Loop(model, ragged, **call)
    scores = loop.decode(greedy)
    output = model.generate(
        **ragged,
        **call,
        **CALL,
        return_dict_in_generate=True,
        output_scores=True,
    )
    check_tokens(output.sequences, ragged, loop)
    assert_close(list(output.scores), scores, atol=1e-4, rtol=1e-4)
    counts = [len(kept) for kept in output.qtsplus.kept_indices]
    assert output.qtsplus.n.tolist() == counts
    assert counts[1] == 0


@pytest.mark.parametrize(("copies", "temperature"), [(1, 0.8), (2, 1.0)])
def test_sampling_with_a_seed_one_or_several_sequences_of_each_prompt(model, ragged, copies, temperature):
    def sample(logits):
        probabilities = (logits / temperature).softmax(-1)
        return torch.multinomial(probabilities, 1)[:, 0]

    loop = Loop(model, ragged, copies=copies)
    torch.manual_seed(7)
    loop.decode(sample)
    torch.manual_seed(7)
    output = model.generate(
        **ragged,
        max_new_tokens=NEW,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        num_return_sequences=copies,
    )
    check_tokens(output, ragged, loop)
    assert len(loop.new.unique(dim=0)) > 3 * copies - 3


@pytest.mark.parametrize("returned", [1, 2])
def test_beams(model, ragged, returned):
    beams = 3
    steps = 5
    rows = len(ragged["input_ids"])
    end = VOCABULARY - 1
    output = model.generate(
        **ragged,
        max_new_tokens=steps,
        num_beams=beams,
        num_return_sequences=returned,
        do_sample=False,
        eos_token_id=end,
        suppress_tokens=[end],
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert output.sequences_scores.shape == (rows * returned,)
    assert output.sequences_scores.isfinite().all()
    loop = Loop(model, ragged, copies=beams)
    first_of_row = torch.arange(rows)[:, None] * beams
    total = torch.full((rows, beams), -1e9)  # at first the beams of a row are equal, and one of them counts
    total[:, 0] = 0.0
    for _ in range(steps):
        logits = loop.logits()
        logits[:, end] = -torch.inf
        log_probabilities = logits.log_softmax(-1).view(rows, beams, -1)
        scores = log_probabilities + total[..., None]
        best = scores.flatten(1).topk(beams)
        total = best.values
        parents = best.indices // VOCABULARY + first_of_row
        tokens = best.indices % VOCABULARY
        loop.select(parents.flatten())
        loop.append(tokens.flatten())
    new = loop.new.view(rows, beams, -1)
    expected = new[:, :returned].flatten(0, 1)
    assert_same(new_tokens(output.sequences, ragged), expected)


def test_repetition_penalty(model, ragged):
    def penalised(logits):
        is_seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, ids in enumerate(loop.ids):
            is_real = loop.mask[row].bool()  # padding is not part of a row's text
            is_seen[row, ids[is_real]] = True
        penalty = torch.where(logits < 0, logits * 1.7, logits / 1.7)
        return torch.where(is_seen, penalty, logits).argmax(-1)

    loop = Loop(model, ragged)
    loop.decode(penalised)
    check_tokens(model.generate(**ragged, **CALL, repetition_penalty=1.7), ragged, loop)


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces = []
        self.has_ended = False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.has_ended = True


def test_streamer(model, single):
    streamer = Recorder()
    output = model.generate(**single, **CALL, streamer=streamer)
    shown_prompt, *shown_tokens = streamer.pieces
    (prompt_ids,) = single["input_ids"].tolist()
    assert shown_prompt == prompt_ids
    assert shown_tokens == new_tokens(output, single).T.tolist()
    assert streamer.has_ended


@pytest.mark.parametrize(
    "how",
    [
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 1},
    ],
    ids=str,
)
def test_prompt_lookup_gives_the_same_tokens(model, single, how):
    loop = Loop(model, single, retention=0.2)
    loop.decode(greedy, 16)
    output = model.generate(
        **single,
        retention=0.2,
        max_new_tokens=16,
        do_sample=False,
        **how,
    )
    check_tokens(output, single, loop)


def test_lengths_count_the_callers_prompt(model, ragged):
    length = ragged["input_ids"].shape[1] + 6
    expected = model.generate(**ragged, max_new_tokens=6, do_sample=False)
    assert_same(model.generate(**ragged, max_length=length, do_sample=False), expected)
    config = GenerationConfig(max_length=length, do_sample=False)
    assert_same(model.generate(**ragged, generation_config=config), expected)
    assert config.max_length == length, "the caller's configuration is left alone"


@pytest.mark.parametrize("name", ["min_new_tokens", "min_length"])
def test_at_least_some_tokens(model, single, name):
    """The first token that greedy decoding would choose is made the end, so that only the minimum holds it off."""
    minimum = 5
    first = model.generate(**single, max_new_tokens=1, do_sample=False)[0, -1].item()

    def choose(logits):
        if loop.new.shape[1] < minimum:
            logits[:, first] = -torch.inf
        return logits.argmax(-1)

    loop = Loop(model, single)
    loop.decode(choose, minimum)
    at_least = minimum
    if name == "min_length":
        at_least += single["input_ids"].shape[1]
    output = model.generate(
        **single,
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=first,
        **{name: at_least},
    )
    assert_same(new_tokens(output, single)[:, :minimum], loop.new)

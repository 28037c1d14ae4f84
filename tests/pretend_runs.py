"""
Everything the package does, on the pretend device and on the CPU, with equal results.

`test_pretend.py` runs this file in a process of its own, because the device stays registered. By hand:
`pytest tests/pretend_runs.py`.
"""

import copy
from dataclasses import dataclass

import pytest
import torch

import pretend_device
from clips import LIBRARY, render_world, write_mp4, write_records
from qtsplus import Stream, VideoSession, ask, encode, summarise
from qtsplus.evaluation.calibration import calibrate, read_labelled
from qtsplus.evaluation.exact_match import exact_match
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.model.methods_qtsplus import METHODS
from qtsplus.training.attention import answer_attention, relevance_divergences
from qtsplus.training.lora import add_lora, lora_config, merge_lora
from tiny import batch, load_bundled, prompt, stock_twin, tiny_model
from tiny_backbones import BACKBONES
from training_examples import collate, examples

pretend_device.start()

QUESTION = "What is in the red circle?"
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
METHOD_NAMES = [name for name in ("qtsplus", *METHODS) if name != "all"]


def seeded(function, inputs: dict, options: dict):
    """What a function of a model returns; random methods and gates draw the same each time."""
    torch.manual_seed(0)
    return function(**inputs, **options)


@dataclass(frozen=True)
class Pair:
    """One model twice: on the CPU and on the device."""

    host: torch.nn.Module
    device: torch.nn.Module

    @classmethod
    def of(cls, host: torch.nn.Module) -> "Pair":
        return cls(host, pretend_device.to_device(copy.deepcopy(host)))

    def generate(self, inputs: dict, **options) -> None:
        """Both write the same, from inputs on their own device."""
        expected = seeded(self.host.generate, inputs, options)
        written = seeded(self.device.generate, pretend_device.inputs_to_device(inputs), options)
        assert written.device.type == pretend_device.NAME
        assert torch.equal(written.cpu(), expected)

    def forward(self, inputs: dict, **options):
        """Logits, kept tokens and the loss are equal; the outputs, for what else is to be compared."""
        expected = seeded(self.host, inputs, options)
        output = seeded(self.device, pretend_device.inputs_to_device(inputs), options)
        torch.testing.assert_close(output.logits.detach().cpu(), expected.logits.detach(), **CLOSE)
        for kept, expected_kept in zip(output.qtsplus.kept_indices, expected.qtsplus.kept_indices, strict=True):
            assert torch.equal(kept.cpu(), expected_kept)
        return output, expected

    def train(self, inputs: dict) -> None:
        """The loss and every gradient are equal."""
        self.host.zero_grad()
        self.device.zero_grad()
        output, expected = self.forward(inputs)
        output.loss.backward()
        expected.loss.backward()
        torch.testing.assert_close(output.loss.detach().cpu(), expected.loss.detach(), **CLOSE)
        for parameter, on_host in zip(self.device.parameters(), self.host.parameters(), strict=True):
            for mine, theirs in ((parameter.grad, on_host.grad), (on_host.grad, parameter.grad)):
                if theirs is not None:  # where one of them has no gradient, the other's is zero
                    mine = torch.zeros_like(theirs) if mine is None else mine
                    torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def inputs():
    """Two rows: two videos, and a video with a longer question."""
    return batch(prompt(videos=[(4, 4, 6), (2, 4, 4)]), prompt(videos=[(6, 6, 4)], question=9, seed=1))


@pytest.fixture(scope="module")
def pair():
    return Pair.of(tiny_model())


@pytest.fixture(scope="module")
def bundled():
    """The trained model, with its processor."""
    model, processor = load_bundled()
    return Pair.of(model), processor


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """A folder with two videos."""
    folder = tmp_path_factory.mktemp("videos")
    for name in list(LIBRARY)[:2]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mp4(path, render_world(LIBRARY[name]), 2)
    return folder


@pytest.fixture(scope="module")
def video(videos):
    return str(min(videos.rglob("*.mp4")))


def test_a_tensor_that_was_left_on_the_host_is_noticed(inputs):
    pair = Pair.of(tiny_model())
    layer = pair.device.model.qtsplus.scoring_layers[0]
    name, weight = next(iter(layer.named_parameters()))
    owner = layer.get_submodule(name.rpartition(".")[0])
    owner._parameters[name.rpartition(".")[2]] = torch.nn.Parameter(weight.detach().cpu())
    with pytest.raises(RuntimeError, match="same device"):
        pair.forward(inputs)


def test_a_wait_is_counted_with_its_line():
    values = torch.ones(3, device=pretend_device.NAME)
    pretend_device.counts.reset()
    assert (values > 0).sum().item() == 3
    assert list(pretend_device.counts.waits.values()) == [1]
    assert "pretend_runs.py" in next(iter(pretend_device.counts.waits))


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.name)
def test_backbone(backbone, video):
    """The model's own budget, two methods that ask the backbone for what it knows, and a training step."""
    processor = backbone.processor()
    pair = Pair.of(backbone.build(processor))
    content = [{"type": "video", "video": video}, {"type": "text", "text": QUESTION}]
    rows = [[{"role": "user", "content": content}], [{"role": "user", "content": content[1:]}]]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    inputs = dict(processor.apply_chat_template(rows, **options, padding=True))
    pair.generate(inputs, **GREEDY)
    for name in ("temporal_redundancy", "lm_attention"):
        pair.generate(inputs, **GREEDY, selection=name, retention=0.3)
    pair.host.train()
    pair.device.train()
    pair.train({**inputs, "labels": inputs["input_ids"]})


@pytest.mark.parametrize("budget", [{}, {"retention": 0.3}, {"max_visual_tokens": 5}], ids=["own", "share", "count"])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_method(pair, inputs, method, budget):
    with torch.no_grad():
        pair.forward(inputs, selection=method, **budget)


def waits_of(model, inputs, **options):
    pretend_device.counts.reset()
    with torch.no_grad():
        model(**pretend_device.inputs_to_device(inputs), **options)
    return pretend_device.counts.waits


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_waits_do_not_grow_with_the_kept_tokens(pair, inputs, method):
    few = waits_of(pair.device, inputs, selection=method, retention=0.1)
    many = waits_of(pair.device, inputs, selection=method, retention=0.9)
    assert few == many


def test_waits_grow_neither_with_the_steps_of_a_video_nor_with_layers_and_are_hardly_more_than_stocks(pair):
    waits = []
    for steps in (4, 16):
        inputs = batch(prompt(videos=[(steps, 8, 8)]))
        waits.append(waits_of(pair.device, inputs, retention=0.3))
    assert waits[0] == waits[1]
    stock = pretend_device.to_device(stock_twin(tiny_model(selection="all", reencode_layers=0)))
    assert waits[0].total() <= waits_of(stock, inputs).total() + 15


def test_a_chunk_of_a_video_waits_four_times(pair):
    inputs = pretend_device.inputs_to_device(batch(prompt(videos=[(16, 8, 8)])))
    pretend_device.counts.reset()
    with torch.no_grad():
        pair.device.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    assert pretend_device.counts.total_waits <= 4, pretend_device.counts.waits


@pytest.mark.parametrize(("method", "most"), [("qtsplus", 12), ("lm_attention", 18)])
def test_a_further_question_waits_at_most_so_often(pair, method, most):
    inputs = batch(prompt(videos=[(4, 8, 8)]))
    pixels = inputs.pop("pixel_values_videos").to(pretend_device.NAME)
    features = pair.device.encode_videos(pixels, inputs["video_grid_thw"].to(pretend_device.NAME))
    waits = waits_of(pair.device, inputs, video_features=features, selection=method, retention=0.3)
    assert waits.total() <= most, waits


WAYS = {
    "sampling": {"do_sample": True, "temperature": 0.9, "max_new_tokens": 4},
    "beams": {"num_beams": 3, "max_new_tokens": 4},
    "several": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4},
    "static cache": {**GREEDY, "cache_implementation": "static"},
    "prompt lookup": {**GREEDY, "prompt_lookup_num_tokens": 2},
    "repetition penalty": {**GREEDY, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate(pair, way):
    rows = [prompt(videos=[(4, 4, 6)])] * (1 if way == "prompt lookup" else 2)
    pair.generate(batch(*rows), **WAYS[way])


def test_assisted_generation(pair):
    one = batch(prompt(videos=[(4, 4, 6)]))
    assistants = Pair.of(stock_twin(tiny_model(seed=1)))
    expected = pair.host.generate(**one, **GREEDY, assistant_model=assistants.host)
    on_device = pretend_device.inputs_to_device(one)
    written = pair.device.generate(**on_device, **GREEDY, assistant_model=assistants.device)
    assert torch.equal(written.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(inputs, dtype):
    half = Pair.of(tiny_model().to(dtype))
    half.generate({**inputs, "pixel_values_videos": inputs["pixel_values_videos"].to(dtype)}, **GREEDY)


@pytest.mark.parametrize("features_on", ["cpu", pretend_device.NAME])
def test_features_in_place_of_pixels(pair, inputs, features_on):
    rest = {name: value for name, value in inputs.items() if name != "pixel_values_videos"}
    pixels = inputs["pixel_values_videos"]
    expected = pair.host.encode_videos(pixels, inputs["video_grid_thw"])
    features = pair.device.encode_videos(pixels.to(pretend_device.NAME), inputs["video_grid_thw"], device=features_on)
    for mine, other in zip(features, expected, strict=True):
        assert mine.device.type == features_on
        torch.testing.assert_close(mine.cpu(), other, **CLOSE)
    written = pair.device.generate(**pretend_device.inputs_to_device(rest), video_features=features, **GREEDY)
    assert torch.equal(written.cpu(), pair.host.generate(**rest, video_features=expected, **GREEDY))


@pytest.mark.parametrize("gate", ["gumbel", "soft", "detached"])
def test_gate(gate):
    model = tiny_model(gate=gate, rho_min=0.1, rho_max=0.9, lambda_t=0.1, lambda_m=0.1, lambda_s=0.1).train()
    Pair.of(model).train(collate(examples(4)))


def test_gradient_checkpointing():
    pair = Pair.of(tiny_model(gate="soft").train())
    for model in (pair.host, pair.device):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    pair.train(collate(examples(4)))


def test_adapters_and_merged_weights(inputs):
    adapted = add_lora(tiny_model(gate="soft").train(), lora_config(4))
    pair = Pair.of(adapted)
    pair.train(collate(examples(4)))
    Pair(merge_lora(pair.host).eval(), merge_lora(pair.device).eval()).generate(inputs, **GREEDY)


def test_attention_distillation():
    pair = Pair.of(tiny_model())
    rows = collate(examples(4))
    losses = []
    for model, place in ((pair.host, "cpu"), (pair.device, pretend_device.NAME)):
        on_place = {name: value.to(place) for name, value in rows.items() if name != "source_ids"}
        labels = on_place.pop("labels")
        targets = answer_attention(model, on_place, labels)
        relevance = model(**on_place).qtsplus.log_relevance
        losses.append(relevance_divergences(relevance, targets).mean())
    losses[1].backward()
    torch.testing.assert_close(losses[1].detach().cpu(), losses[0].detach(), **CLOSE)


def test_asking_about_encoded_videos(bundled, video):
    pair, processor = bundled
    answers = []
    for model in (pair.host, pair.device):
        session = VideoSession(model, processor)
        session.add(video, "front")
        session.add(video, "back", fps=1)
        answers.append(
            [
                ask(model, processor, encode(model, processor, video), QUESTION, max_new_tokens=4),
                *session.ask_many([QUESTION, "Which colours does the cross take?"], max_new_tokens=4),
                session.chat(QUESTION, max_new_tokens=4),
                session.chat("And the ball?", max_new_tokens=4),
            ]
        )
    for mine, expected in zip(*answers, strict=True):
        assert (mine.answer, mine.kept_tokens) == (expected.answer, expected.kept_tokens)
        for name, keep_map in expected.keep_maps.items():
            assert torch.equal(mine.keep_maps[name].cpu(), keep_map)
        assert [place.start for place in mine.evidence] == [place.start for place in expected.evidence]


def test_library(bundled, videos, tmp_path):
    pair, processor = bundled
    results = []
    for name, model in (("host", pair.host), ("device", pair.device)):
        index(videos, tmp_path / name, model, processor, say=lambda line: None)
        library = Library(tmp_path / name, model, processor)
        moments = library.find(QUESTION, top=2)
        results.append(([(moment.name, moment.start) for moment in moments], library.ask(QUESTION).answer))
    assert results[0] == results[1]


def test_stream(bundled):
    pair, processor = bundled
    frames = render_world(next(iter(LIBRARY.values())))
    answers = []
    for model in (pair.host, pair.device):
        stream = Stream(model, processor, fps=2, memory_tokens=100, question=QUESTION)
        for start in range(0, len(frames), 4):
            seconds = [number / 2 for number in range(start, start + 4)]
            stream.append(list(frames[start : start + 4]), seconds)
        answers.append(stream.ask(QUESTION, max_new_tokens=4))
    assert answers[0].answer == answers[1].answer
    assert torch.equal(answers[0].keep_map, answers[1].keep_map.cpu())


def test_summary(bundled, video):
    pair, processor = bundled
    texts = []
    for model in (pair.host, pair.device):
        session = VideoSession(model, processor)
        session.add(video, "front")
        texts.append(summarise(session, QUESTION, longest=2, max_new_tokens=4).text)
    assert texts[0] == texts[1]


def test_calibration_and_evaluation(bundled, tmp_path):
    pair, processor = bundled
    file = write_records(tmp_path, 2, seconds=2, objects=6)
    asked = [one for one in read_labelled(file) if one.record.kind not in ("caption", "moment", "summary")]
    by_video = {one.record.video: one for one in asked}
    questions = list(by_video.values())
    records = [question.record for question in questions]
    results = []
    for model in (pair.host, pair.device):
        outcomes = exact_match(model, processor, records)
        calibration = calibrate(model, processor, questions)
        results.append(([outcome.said for outcome in outcomes], calibration))
    assert results[0][0] == results[1][0]
    assert results[0][1].readings.keys() == results[1][1].readings.keys()

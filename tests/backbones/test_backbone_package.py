"""The package's own ways in, `session` and the training data, work with every backbone."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.asking import session
from qtsplus.asking.question import Batch, prompt_inputs
from qtsplus.data.records import VideoRecord
from qtsplus.training import QTSplusTrainer, QTSplusTrainingArguments
from qtsplus.training.dataset import VideoQACollator, VideoQADataset
from qtsplus.training.features import encode_files
from qtsplus.video import storage
from tiny import assert_same, chat_inputs

QUESTION = "What moves?"
SAMPLING = {"processor_kwargs": {"fps": 2}}
CALL = {
    "max_new_tokens": 5,
    "retention": 0.3,
}


def check_answer(answer, model, processor, inputs):
    """It is what the model generates from these inputs, from the tokens that it keeps."""
    made = model.generate(**inputs, **CALL, return_dict_in_generate=True)
    new_ids = made.sequences[0, inputs["input_ids"].shape[1] :]
    text = processor.tokenizer.decode(new_ids, skip_special_tokens=True)
    assert answer.answer == text.strip()
    keep_map = torch.cat([keep_map.flatten() for keep_map in answer.keep_maps.values()])
    (kept,) = made.qtsplus.kept_indices
    assert_same(keep_map.nonzero()[:, 0], kept)
    assert answer.kept_tokens == len(kept)


def test_ask_encodes_in_chunks_and_answers_as_in_one_shot(model, processor, clips):
    path = clips / "long.mp4"
    video = session.encode(model, processor, path, fps=2, frames_per_chunk=2)
    inputs = chat_inputs(processor, path, QUESTION, fps=2)
    pixels = inputs["pixel_values_videos"]
    (features,) = model.encode_videos(pixels, inputs["video_grid_thw"])
    assert_close(video.features, features, atol=1e-5, rtol=1e-5)
    answer = session.ask(model, processor, video, QUESTION, **CALL)
    check_answer(answer, model, processor, inputs)
    assert answer.visual_tokens == len(features)
    for moment in answer.evidence:
        assert moment.start >= 0
        assert moment.start < moment.end
        assert moment.end <= answer.seconds_of_video


QUESTIONS = (QUESTION, "Why does the <|im_end|> move to the left?", "\n And then?")


@pytest.mark.parametrize("names", [["long"], ["long", "short"]])
@pytest.mark.parametrize("turns", [[], ["What was there?", "Nothing."]])
def test_the_prompts_of_a_batch_are_those_of_each_question(model, processor, clips, names, turns):
    videos = {name: session.encode(model, processor, clips / f"{name}.mp4", fps=2) for name in names}
    size = len(names)
    together = prompt_inputs(processor, Batch(videos, QUESTIONS, turns=turns))
    for row, question in enumerate(QUESTIONS):
        alone = prompt_inputs(processor, Batch(videos, [question], turns=turns))
        assert together.keys() == alone.keys()
        is_real = together["attention_mask"][row].bool()
        for name in ("input_ids", "query_mask"):
            of_row = together[name][row]
            assert_same(of_row[is_real], alone[name][0])
        first = row * size
        for name in ("video_grid_thw", "second_per_grid_ts"):
            of_row = together[name][first : first + size]
            assert_same(of_row, alone[name])


@pytest.fixture
def two_videos(model, processor, clips):
    """A session of two videos, by their names."""
    made = session.VideoSession(model, processor)
    for name in ("long", "short"):
        made.add(clips / f"{name}.mp4", name, fps=2)
    return made


def test_a_session_of_two_videos_alone_and_in_a_batch(model, processor, clips, two_videos):
    content = [
        "long: ",
        clips / "long.mp4",
        "short: ",
        clips / "short.mp4",
        QUESTION,
    ]
    inputs = chat_inputs(processor, *content, fps=2, query=QUESTION)
    answer = two_videos.ask(QUESTION, **CALL)
    check_answer(answer, model, processor, inputs)
    first, second = two_videos.ask_many([QUESTION, "Why?"], **CALL)
    assert first.answer == answer.answer
    assert second.answer == two_videos.ask("Why?", **CALL).answer


def test_a_conversation_is_that_of_a_session_from_disk(model, processor, two_videos, tmp_path):
    again = session.VideoSession(model, processor)
    for name, video in two_videos.videos.items():
        folder = tmp_path / name
        with storage.saved_video(video, folder, "here"):
            pass
        again.add(storage.load_video(folder, "here", model), name)
    call = {
        "selection": "all",
        "max_new_tokens": 5,
    }
    for question in (QUESTION, "Why?", "And then?"):
        again.turns = list(two_videos.turns)  # read again, without a cache
        answer = again.chat(question, **call)
        expected = two_videos.chat(question, **call)
        assert answer.answer == expected.answer
        assert answer.evidence == expected.evidence
    assert len(two_videos.turns) == 6


@pytest.fixture(scope="module")
def records(clips):
    known = {
        "question": QUESTION,
        "answer": "The red ball.",
        "source": "vqa",
    }
    paths = (clips / "long.mp4", clips / "short.mp4")
    return [VideoRecord(video=str(path), **known) for path in paths]


def collated(processor, dataset):
    """The inputs of the model for a batch of all examples."""
    batch = VideoQACollator(processor)(list(dataset))
    assert not batch.pop("skipped")
    batch.pop("source_ids")
    return batch


def test_training_examples(model, processor, records):
    dataset = VideoQADataset(records, processor, model_max_length=200, **SAMPLING)
    batch = collated(processor, dataset)
    assert torch.isfinite(model(**batch).loss)
    end = processor.tokenizer.convert_tokens_to_ids(processor.turn_end)
    for labels in batch["labels"]:
        *answer, last = labels[labels >= 0].tolist()
        assert processor.tokenizer.decode(answer) == "The red ball."
        assert last == end


def test_newlines_and_frame_texts_are_no_visual_tokens_to_the_trainer(backbone, processor, records, tmp_path):
    model = backbone.build(processor, selection="all")
    dataset = VideoQADataset(records, processor, **SAMPLING)
    arguments = QTSplusTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
    )
    trainer = QTSplusTrainer(
        model,
        arguments,
        train_dataset=dataset,
        data_collator=VideoQACollator(processor),
    )
    trainer.train()
    (line,) = (line for line in trainer.state.log_history if "visual_tokens" in line)
    tokens = 0
    for row in dataset:
        (features,) = model.encode_videos(row["pixel_values_videos"], row["video_grid_thw"])
        tokens += len(features)
    assert line["visual_tokens"] == tokens / 2
    assert line["n"] == tokens / 2
    assert line["kept_fraction"] == 1


def test_training_from_features_is_training_from_pixels(model, processor, records, tmp_path):
    files = [(str(record.video), None) for record in records]
    features = encode_files(model, processor, files, tmp_path, **SAMPLING)
    with_pixels = VideoQADataset(records, processor, **SAMPLING)
    with_features = VideoQADataset(records, processor, features=features, **SAMPLING)
    from_pixels = collated(processor, with_pixels)
    from_features = collated(processor, with_features)
    for name in ("input_ids", "labels", "query_mask", "video_grid_thw"):
        assert_same(from_features[name], from_pixels[name])
    assert "video_features" in from_features
    assert "pixel_values_videos" not in from_features
    assert_close(model(**from_features).loss, model(**from_pixels).loss, atol=1e-5, rtol=1e-5)


def test_a_query_of_its_own(model, processor, clips):
    query = "Where is the red ball?"
    inputs = chat_inputs(processor, clips / "short.mp4", QUESTION, query=query)
    (ids,) = inputs["query_input_ids"]
    assert processor.tokenizer.decode(ids) == query
    inputs.pop("mm_token_type_ids", None)
    kept = model(**inputs, retention=0.2).qtsplus
    assert len(kept.kept_indices[0]) == kept.n[0]

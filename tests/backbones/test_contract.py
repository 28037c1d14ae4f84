"""What every backbone has to hold: [`TestBackbone`] runs once for each of them."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from accelerate import cpu_offload
from torch.testing import assert_close

from model_checks import assert_row_is_alone, assert_trained, with_labels
from own_loop import answered, cached_columns, check_two_calls, full_width, in_two_calls
from qtsplus.asking.ranking import keys_fingerprint
from qtsplus.model.methods_qtsplus import METHODS, Candidates
from qtsplus.model.prompt_qtsplus import IMAGE, VIDEO
from qtsplus.video.storage import fingerprint
from tiny import assert_same, chat_inputs, compress, run, without
from tiny_backbones import each_unlike

NAMES = ("video", "image and video", "text", "two videos", "image", "earlier turns")
NEW = 5
CALL = {
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "do_sample": False,
}
STEPS = {
    "return_dict_in_generate": True,
    "output_logits": True,
}


def close(actual, expected, tolerance=1e-5):
    assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def logits(model, inputs, **call):
    return run(model, inputs, **call).logits


def kept_indices(model, inputs, **call):
    return run(model, inputs, **call).qtsplus.kept_indices


def width_of(inputs):
    return inputs["input_ids"].shape[1]


def encoded_video(model, inputs, **options):
    pixels = inputs["pixel_values_videos"]
    return model.encode_videos(pixels, inputs["video_grid_thw"], **options)


def merged_grids(model, inputs):
    return model.model.merged_grid(inputs["video_grid_thw"])


def with_features(model, inputs, **options):
    """The inputs with features in place of the videos' pixels."""
    with_pixels = dict(inputs)
    with_pixels["video_features"] = encoded_video(model, inputs, **options)
    return without(with_pixels, "pixel_values_videos")


def longer(mask, count, value):
    """A mask with further columns behind it."""
    return torch.nn.functional.pad(mask, (0, count), value=value)


LANGUAGE_MODEL = ("model.language_model", "lm_head")
DTYPES = {  # of modules by their names; the keys say what is less precise than the rest
    "language model": dict.fromkeys(LANGUAGE_MODEL, torch.bfloat16),
    "all but the language model": {"": torch.bfloat16, **dict.fromkeys(LANGUAGE_MODEL, torch.float32)},
    "all but the selector": {"": torch.bfloat16, "model.qtsplus": torch.float32},
}


def with_dtypes(model, dtypes):
    """A copy whose modules of these names have other dtypes."""
    mixed = deepcopy(model)
    for name, module in mixed.named_modules():
        if name in dtypes:
            module.to(dtypes[name])
    return mixed


class TestBackbone:
    """Make this green to add a backbone: one entry in `BACKBONES` of tiny_backbones.py."""

    @pytest.mark.parametrize("name", NAMES)
    def test_with_all_tokens_it_is_the_stock_model(self, backbone, all_tokens, stock, prepare, name):
        inputs = prepare(name)
        expected = backbone.stock_inputs(all_tokens, inputs)
        close(logits(all_tokens, inputs), logits(stock, expected))
        width = width_of(inputs)
        ours = all_tokens.generate(**inputs, **CALL)
        assert_same(ours[:, width:], stock.generate(**expected, **CALL)[:, width:])
        assert_same(ours[:, :width], inputs["input_ids"])

    @pytest.mark.parametrize("names", [NAMES[1:5], ("video", "text", "earlier turns")], ids=len)
    def test_with_all_tokens_a_padded_batch_is_the_stock_model(self, backbone, all_tokens, stock, prepare, names):
        inputs = prepare(*names)  # with videos of one length, for some stock models take no others
        expected = backbone.stock_inputs(all_tokens, inputs)
        is_real = inputs["attention_mask"].bool()
        close(logits(all_tokens, inputs)[is_real], logits(stock, expected)[is_real])

    @pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
    def test_parts_may_have_different_dtypes(self, backbone, model, all_tokens, stock, prepare, dtypes):
        inputs = prepare("video")
        expected = logits(with_dtypes(stock, dtypes), backbone.stock_inputs(all_tokens, inputs))
        close(logits(with_dtypes(all_tokens, dtypes), inputs), expected, 0.1)
        mixed = with_dtypes(model, dtypes)
        answer = mixed.generate(**inputs, **CALL)
        assert_same(mixed.generate(**with_features(mixed, inputs), **CALL), answer)

    def test_offloaded_weights_change_nothing(self, model, prepare, processor, tmp_path):
        inputs = prepare("video")
        copied = deepcopy(model)
        offloaded = cpu_offload(copied, torch.device("cpu"))
        assert_same(logits(offloaded, inputs, retention=0.1), logits(model, inputs, retention=0.1))
        expected = model.generate(**inputs, **CALL)
        for given in (inputs, with_features(offloaded, inputs)):
            assert_same(offloaded.generate(**given, **CALL), expected)
        assert fingerprint(offloaded, processor) == fingerprint(model, processor)
        assert keys_fingerprint(offloaded) == keys_fingerprint(model)
        with pytest.raises(ValueError, match="bring them back before you save"):
            offloaded.save_pretrained(tmp_path)

    def test_embeddings_beside_an_image_are_the_stock_model(self, backbone, all_tokens, stock, prepare):
        inputs = prepare("image")
        expected = backbone.stock_inputs(all_tokens, inputs)
        inputs_embeds = all_tokens.get_input_embeddings()(inputs["input_ids"])
        for call in (inputs, expected):
            call.update(input_ids=None, inputs_embeds=inputs_embeds)
            call.pop("mm_token_type_ids", None)
        stock.model.rope_deltas = None  # stock would take them from its prompt before
        close(logits(all_tokens, inputs), logits(stock, expected))

    @pytest.mark.parametrize("padding_side", ["left", "right"])
    @each_unlike
    def test_batch_is_single(self, model, prepare, padding_side):
        inputs = prepare(*NAMES, processor_kwargs={"padding_side": padding_side})
        together = run(model, inputs)
        # A recurrent state gathers rounding errors over the whole row: 2.2e-4 here, where the logits reach 8. With
        # the state alone in float64 the two differ by 1.5e-5, with all in float64 by 1.4e-13.
        is_recurrent = model.config.model_type == "qwen3_5_qtsplus"
        tolerance = 5e-4 if is_recurrent else 1e-4
        for row, name in enumerate(NAMES):
            assert_row_is_alone(together, row, run(model, prepare(name)), tolerance)

    @each_unlike
    def test_generate_batch_is_single(self, model, prepare):
        together = model.generate(**prepare(*NAMES), **CALL)
        for row, name in enumerate(NAMES):
            alone = model.generate(**prepare(name), **CALL)
            assert_same(together[row, -NEW:], alone[0, -NEW:])

    def test_without_a_mask_gaps_are_no_seams(self, model, prepare):
        """Attention without mask and cache takes jumps in 1-D positions for packed sequences."""
        inputs = prepare("video")
        expected = logits(model, inputs, retention=0.3)
        inputs.pop("attention_mask")
        assert_close(logits(model, inputs, retention=0.3, use_cache=False), expected)

    @pytest.mark.parametrize("selection", ["temporal_redundancy", "diversity"])
    @each_unlike
    def test_query_free_methods_choose_by_features_in_their_grid(self, model, prepare, selection):
        inputs = prepare("two videos")
        width = model.config.text_config.hidden_size
        visual = [features[:, :width] for features in encoded_video(model, inputs)]
        num_tokens = sum(map(len, visual))
        candidates = Candidates(
            visual=visual,
            query=visual[0][:0],
            positions=torch.zeros(3, num_tokens),
            grids=merged_grids(model, inputs),
            score=lambda _: pytest.fail("no question"),
        )
        (kept,) = kept_indices(model, inputs, selection=selection, retention=0.3)
        assert_same(kept, METHODS[selection](candidates, len(kept)))

    def test_outputs_name_what_was_encoded_as_stock_does(self, backbone, all_tokens, stock, prepare):
        inputs = prepare("image and video")
        ours = run(all_tokens, inputs)
        theirs = run(stock, backbone.stock_inputs(all_tokens, inputs))
        types = all_tokens.model.token_types(inputs["input_ids"])
        text = run(all_tokens, prepare("text"))
        for name, modality in (("image_outputs", IMAGE), ("video_outputs", VIDEO)):
            assert hasattr(ours, name) or not hasattr(theirs, name)
            output = getattr(ours, name)
            tokens = [] if output is None else output.pooler_output[0]
            expected = (types == modality).sum()
            assert len(tokens) == expected
            assert getattr(text, name) is None

    def test_stock_arguments_without_an_effect_are_named(self, model, prepare):
        inputs = prepare("video")
        for name in model.model.fixed_arguments:
            message = f"{name} has no effect on .*Model: leave it out"
            for call in (model, model.generate):
                with pytest.raises(ValueError, match=message):
                    call(**inputs, **{name: 1})
            for value in (None, getattr(model.config, name, None)):
                run(model, inputs, **{name: value})

    def test_trainers_average_its_loss_themselves_and_share_out_no_prompt(self, backbone, model):
        """Else they add up the penalties of the micro-batches, as they do with InternVL's sum over all tokens."""
        assert backbone.model.accepts_loss_kwargs is False
        assert not model._supports_context_parallel
        assert not model.model._supports_context_parallel

    def test_forward_and_generate_see_the_same(self, model, prepare):
        inputs = prepare(*NAMES)
        steps = model.generate(**inputs, **CALL, **STEPS)
        output = run(model, inputs)
        close(steps.logits[0], output.logits[:, -1], 1e-4)
        assert_same(steps.qtsplus.kept_indices, output.qtsplus.kept_indices)

    def test_decoding_goes_on_where_the_full_prompt_ends(self, model, prepare):
        """With a cache as without one, where every step lays the whole text out again."""
        inputs = prepare("video", "two videos")
        cached = model.generate(**inputs, **CALL, **STEPS)
        again = dict(inputs)
        again["input_ids"] = cached.sequences[:, :-1]
        again["attention_mask"] = longer(inputs["attention_mask"], NEW - 1, 1)
        again["query_mask"] = longer(inputs["query_mask"], NEW - 1, 0)
        whole = logits(model, again)
        close(torch.stack(cached.logits, dim=1), whole[:, -NEW:], 1e-4)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("mask", [full_width, cached_columns])
    def test_a_callers_own_loop_is_generate(self, model, prepare, mask, attention):
        """A mask of the full prompt's width beside the cache of the shortened one is understood."""
        before = model.config._attn_implementation
        model.set_attn_implementation(attention)
        answered(model, prepare("video", "two videos", "text")).check_loop(mask)
        model.set_attn_implementation(before)

    def test_a_prompt_in_two_calls_is_cut_behind_its_question_alone(self, model, prepare):
        inputs = prepare("video")
        last_word = inputs["query_mask"][0].nonzero().max()
        behind = width_of(inputs) - 1 - last_word
        check_two_calls(model, inputs, behind)
        with pytest.raises(ValueError, match="the new ids continue it or ask another"):
            in_two_calls(model, inputs, behind + 1)

    def test_seconds_that_a_collator_dropped_are_named(self, model, prepare):
        inputs = prepare("video", "two videos")
        inputs.pop("second_per_grid_ts")
        for call in (model.generate, model, model.train()):
            with pytest.raises(ValueError, match="The videos came without second_per_grid_ts"):
                call(**inputs)
        model.eval()

    def test_padding_without_its_mask_is_named(self, model, prepare):
        inputs = prepare("video", "text")
        del inputs["attention_mask"]
        for call in (model.generate, model):
            with pytest.raises(ValueError, match="padded, but came without attention_mask"):
                call(**inputs)

    def test_chunk_is_whole(self, model, prepare):
        inputs = prepare("two videos")
        whole = encoded_video(model, inputs)
        for frames in (1, 3, 5):
            close(encoded_video(model, inputs, frames_per_chunk=frames), whole)

    def test_no_chunk_has_more_patches_than_it_may(self, model, prepare, monkeypatch):
        inputs = prepare("two videos", "video")
        patches = []

        def count(_, given, out):
            width = out.shape[1]
            patches.append(out.numel() // width)

        convolutions = (torch.nn.Conv2d, torch.nn.Conv3d)
        embed = next(layer for layer in model.modules() if isinstance(layer, convolutions))
        hook = embed.register_forward_hook(count)
        whole = logits(model, inputs)
        room = max(patches) // 3
        total = sum(patches)
        patches.clear()
        monkeypatch.setattr("qtsplus.model.encoding_qtsplus.PATCHES_PER_CHUNK_ON_CPU", room)
        close(logits(model, inputs), whole)
        hook.remove()
        assert max(patches) <= room
        assert sum(patches) == total
        for chunk, following in pairwise(patches):
            assert chunk + following > room

    @each_unlike
    def test_encode_once_is_one_shot(self, model, prepare):
        inputs = prepare(*NAMES)
        features = with_features(model, inputs, frames_per_chunk=2.0)
        grids = merged_grids(model, inputs)
        for tokens, grid in zip(features["video_features"], grids, strict=True):
            assert len(tokens) == math.prod(grid)
            assert tokens.shape[1] == model.model.token_width
        expected = logits(model, inputs)
        assert_close(logits(model, features), expected, atol=5e-5, rtol=1e-5)
        expected_ids = model.generate(**inputs, **CALL)
        assert_same(model.generate(**features, **CALL), expected_ids)

    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 2},
            {"num_return_sequences": 2, "do_sample": True},
        ],
        ids=str,
    )
    @each_unlike
    def test_generates_with_beams_and_samples(self, model, prepare, options):
        inputs = prepare("video", "text")
        sequences = model.generate(**inputs, **CALL | options, retention=0.2)
        width = width_of(inputs)
        copies = len(sequences) // 2
        assert sequences.shape[1] == width + NEW
        assert_same(sequences[::copies, :width], inputs["input_ids"])

    def test_a_training_step_reaches_the_selector_alone(self, backbone, processor, prepare):
        model = backbone.build(processor).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".qtsplus." in name)
        model.model.qtsplus.freeze_unused()
        loss = model(**with_labels(prepare(*NAMES))).loss
        loss.backward()
        assert_trained(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "rho" not in name:
                assert parameter.grad.any(), name

    def test_the_question_alone_is_the_query(self, processor, model, prepare, rows):
        inputs = prepare(*NAMES)
        mask = inputs["query_mask"].bool()
        for row, name in enumerate(NAMES):
            last_turn = rows[name][-1]
            question = last_turn["content"][-1]["text"]
            ids = inputs["input_ids"][row]
            words = processor.tokenizer.decode(ids[mask[row]])
            assert words.strip() == question
        derived = without(inputs, "query_mask")
        expected = logits(model, inputs)
        assert_close(logits(model, derived), expected)
        for key, value in processor.query_token_ids.items():
            assert getattr(model.config, key) == value, key

    def test_a_question_before_the_video(self, processor, clips):
        question = "Which frame is it?"
        inputs = chat_inputs(processor, question, clips / "short.mp4")
        is_question = inputs["query_mask"].bool()
        words = processor.tokenizer.decode(inputs["input_ids"][is_question])
        assert words.strip() == question

    def test_separators_go_with_what_they_end(self, model, prepare):
        """What is no candidate stays in order; of the rest what the rule names."""
        inputs = prepare("two videos")
        (columns,) = run(model, inputs, retention=1.0, max_visual_tokens=3).qtsplus.columns
        assert_same(columns, columns.sort().values)
        (ids,) = inputs["input_ids"]
        kept = ids[columns]
        is_video = model.model.token_types(kept) == VIDEO
        assert is_video.sum() >= 3
        config = model.config
        turns = {config.user_turn_token_ids[0], config.turn_end_token_id}
        for token in turns.intersection(config.special_token_ids, ids.tolist()):
            before = (ids == token).sum()
            assert (kept == token).sum() == before
        (question,) = inputs["query_mask"]
        assert question[columns].sum() == question.sum()

    def test_whoever_keeps_a_token_keeps_all_of_it(self, backbone, processor, prepare):
        model = backbone.build(processor, reencode_layers=0).model
        inputs = prepare("video")
        (source,) = encoded_video(model, inputs)
        prompt = compress(model, **inputs, retention=0.3)
        (kept,) = prompt.qtsplus.kept_indices
        (tokens,) = prompt.features["video"]
        assert tokens.shape[1] == model.token_width
        assert len(source) >= 12
        if len(tokens) > len(kept):
            is_newline = (tokens == model.line_end).all(1)
            tokens = tokens[~is_newline]
        assert_same(tokens, source[kept])
        first_tokens = source[: len(kept)]
        assert not torch.equal(tokens, first_tokens)

    def test_original_positions_are_those_of_the_full_prompt(self, backbone, processor, prepare):
        inputs = prepare("video", "two videos")
        model = backbone.build(processor, position_ids="original").model
        full = compress(model, **inputs, retention=1.0)
        assert_same(full.qtsplus.n, full.qtsplus.num_tokens)
        short = compress(model, **inputs, retention=0.3)
        full_axes = model.language_axes(full.position_ids)
        axes = model.language_axes(short.position_ids)
        for row in range(2):
            columns = short.qtsplus.columns[row]
            is_kept = columns >= 0
            places = torch.searchsorted(full.qtsplus.columns[row], columns[is_kept])
            assert_same(axes[:, row, is_kept], full_axes[:, row, places])
        assert_same(short.next_position, full.next_position)

    def test_sequential_positions_count_what_was_kept(self, backbone, processor, prepare):
        inputs = prepare("video", "two videos")
        model = backbone.build(processor, position_ids="sequential").model
        short = compress(model, **inputs, retention=0.3)
        counts = short.attention_mask.sum(-1)
        assert_same(short.next_position, counts)
        axes = model.language_axes(short.position_ids)
        for row, count in enumerate(counts.tolist()):
            kept = axes[:, row, -count:]
            assert_same(kept, torch.arange(count).expand_as(kept))

    def test_the_reencoder_sees_absolute_time(self, model, prepare):
        """Three times the seconds between frames: other features, where no token moves in the text."""
        inputs = prepare("video")
        prompt = compress(model.model, **inputs, retention=0.5)
        inputs["second_per_grid_ts"] = 3 * inputs["second_per_grid_ts"]
        slower = compress(model.model, **inputs, retention=0.5)
        assert_same(slower.qtsplus.kept_indices, prompt.qtsplus.kept_indices)
        (features,) = prompt.features["video"]
        (slower_features,) = slower.features["video"]
        difference = slower_features - features
        assert difference.abs().max() > 1e-4

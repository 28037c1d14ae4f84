"""A recipe changes the configuration of a language model that starts from random weights."""

import pytest

from qtsplus.training.models import load_config, load_model
from qtsplus.training.recipe import load_recipe


def test_the_recipe_of_the_vision_tower_turns_rows_and_columns_further(pytestconfig):
    args = load_recipe(pytestconfig.rootpath / "recipes" / "qtsplus-tiny-vision.yaml").model
    plain, changed = (
        load_model(args.variant, None, {}, language_model=fields) for fields in (None, args.language_model)
    )
    ours, stock = (model.model.language_model.rotary_emb.inv_freq for model in (changed, plain))
    expected = stock.clone()
    expected[[8, 9, 12, 13]] = expected.new_tensor([0.5, 0.25, 0.5, 0.25])
    assert ours.tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert changed.config.qtsplus_config.to_dict() == plain.config.qtsplus_config.to_dict()


def test_other_fields_and_given_weights_are_refused(tiny_published):
    assert load_config("qtsplus-tiny", None, None, {"intermediate_size": 64}).text_config.intermediate_size == 64
    with pytest.raises(ValueError, match="The language model has no field depth"):
        load_config("qtsplus-tiny", None, None, {"depth": 2})
    with pytest.raises(ValueError, match="does not make a configuration"):
        load_config("qtsplus-tiny", None, None, {"num_hidden_layers": 2})
    with pytest.raises(ValueError, match="holds a language model: leave its configuration"):
        load_config(None, str(tiny_published), None, {"num_hidden_layers": 2})

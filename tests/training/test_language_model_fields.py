"""A recipe may change the configuration of a language model that starts from random weights."""

import pytest

from qtsplus.training.models import load_config


def test_other_fields_and_given_weights_are_refused(tiny_published):
    assert load_config("qtsplus-tiny", None, None, {"intermediate_size": 64}).text_config.intermediate_size == 64
    with pytest.raises(ValueError, match="The language model has no field depth"):
        load_config("qtsplus-tiny", None, None, {"depth": 2})
    with pytest.raises(ValueError, match="does not make a configuration"):
        load_config("qtsplus-tiny", None, None, {"num_hidden_layers": 2})
    with pytest.raises(ValueError, match="holds a language model: leave its configuration"):
        load_config(None, str(tiny_published), None, {"num_hidden_layers": 2})

"""Settings: what is of a wrong type is refused where it is made."""

import pytest

from agentfsm import MisuseError, Settings


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"stop": "END"}, r"stop='END'\): give a list of strings, .*\['END'\]"),
        ({"stop": [3]}, "a list of strings"),
        ({"seed": "7"}, "a whole number"),
        ({"stream": "no"}, "True or False"),
        ({"parallel_tool_calls": "no"}, "True or False, or None"),
        ({"tool_choice": ["search"]}, "a string"),
        ({"reasoning_effort": 3}, "a string"),
        ({"extra_body": None}, r"a dict, or \{\} for no fields"),
    ],
    ids=repr,
)
def test_a_setting_of_a_wrong_type_is_refused(fields, match):
    """With one that no journal could read again the run was stored; the letters of one text were each a stop."""
    with pytest.raises(MisuseError, match=match):
        Settings(**fields)
    assert Settings(stop=["END"]).stop == ("END",)


def test_zero_is_a_setting():
    """A run's temperature and seed of 0 go over the agent's; what is unset does not."""
    own = Settings(temperature=0, seed=0, extra_body={"a": 1})
    base = Settings(temperature=0.7, seed=7, max_tokens=9, stop=("END",), stream=True, extra_body={"a": 0, "b": 2})
    merged = own.with_defaults(base)
    assert (merged.temperature, merged.seed, merged.max_tokens, merged.stop, merged.stream) == (0, 0, 9, ("END",), True)
    assert merged.extra_body == {"a": 1, "b": 2}

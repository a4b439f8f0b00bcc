"""One line an error, with its place, what was found and expected, and what to do."""

import inspect

import pytest

from zero1ckpt.core import errors

CODES = {
    "Zero1CkptError": 1,
    "VerificationError": 1,
    "UsageError": 2,
    "MissingError": 3,
    "CorruptError": 4,
    "UnsupportedError": 5,
    "OutputError": 6,
    "InterruptedRunError": 130,
    "LostRankError": 130,
}


def test_exit_codes_are_those_of_the_contract():
    found = {name: cls.exit_code for name, cls in inspect.getmembers(errors, inspect.isclass)}
    assert found == CODES and set(errors.__all__) == set(CODES)


@pytest.mark.parametrize("name", CODES)
def test_message_is_one_line_with_everything(name):
    error = getattr(errors, name)(
        "is\nwrong", file="a/b", param="w", found=[1, 2], expected="two\r\nlines", hint="do this"
    )
    assert str(error) == "a/b: w: is wrong (found [1, 2], expected two lines); do this"
    assert isinstance(error, errors.Zero1CkptError)


def test_falsy_facts_are_told():
    assert str(errors.UsageError("bad", found=0, expected="")) == "bad (found 0, expected )"


def test_they_are_also_what_python_code_expects():
    assert issubclass(errors.MissingError, FileNotFoundError)
    assert issubclass(errors.OutputError, OSError)
    assert issubclass(errors.CorruptError, ValueError)

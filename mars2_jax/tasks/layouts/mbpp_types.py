"""The types of MBPP+'s inputs, which JSON has lost: tuples, sets and complex numbers are lists and strings there.

Which problem takes what is a fact of the data set (release 0.2.0 of its authors), so it stands here as a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mars2_jax.errors import DataError

__all__ = ["typed_inputs"]

_Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _tuples(value: list[Any]) -> list[Any]:
    return [tuple(item) for item in value]


def _deep(value: Any) -> Any:
    return tuple(_deep(item) for item in value) if isinstance(value, list) else value


def _tuple_of_tuples(value: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _sets(value: list[Any]) -> list[Any]:
    return [set(item) if isinstance(item, list) and item else {} for item in value]


def _dict_of_tuples(value: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(item) for key, item in value.items()}


# Converters of the arguments in their order; the last one is for all that follow.
_TABLE: tuple[tuple[str, tuple[_Convert, ...]], ...] = (
    ("2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809", (tuple,)),
    ("63 64 70 94 120 237 272 299 400 409 417 438 473 614 780", (_tuples,)),
    ("75 413 444 753", (_tuples, _same)),
    ("106 750", (_same, tuple, _same)),
    ("250 307 405 446 617 720 763 808", (tuple, _same)),
    ("259 278 401 445", (_tuple_of_tuples,)),
    ("580 615 791", (_deep,)),
    ("115", (_sets,)),
    ("124", (float, complex)),
    ("252", (complex,)),
    ("722", (_dict_of_tuples, _same)),
)
_CONVERTERS = {int(number): converters for numbers, converters in _TABLE for number in numbers.split()}


def typed_inputs(number: int, inputs: Any) -> Any:
    """The lists of arguments of a problem, with the types that its function takes.

    Args:
      number: of the problem.
      inputs: lists of arguments as JSON gives them.

    Raises:
      DataError: the arguments are not of the shape that this problem has.
    """
    converters = _CONVERTERS.get(number)
    if converters is None or not isinstance(inputs, list):
        return inputs
    try:
        return [[converters[min(i, len(converters) - 1)](arg) for i, arg in enumerate(args)] for args in inputs]
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the inputs of problem {number} are not those of MBPP+ ({error}): is the file whole?"
        ) from None

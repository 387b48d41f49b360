"""Checkers for the tests; the service imports them."""

import os
import sys
import time

NOT_A_FUNCTION = 1


def divisor(test_input, expected, actual):
    """Any divisor of the input but 1 and itself is right."""
    n, d = int(test_input), int(actual)
    print("a checker may print")
    return 1 < d < n and n % d == 0


def same_sum(test_input, expected, actual):
    (args, kwargs) = test_input
    assert (args, kwargs) == (([3, 4],), {"k": 2})
    assert type(args) is tuple
    return len(actual) == kwargs["k"] and sum(actual) == sum(expected)


def raises(test_input, expected, actual):
    raise KeyError("no such thing")


def leaves(test_input, expected, actual):
    sys.exit(3)


def dies(test_input, expected, actual):
    os._exit(1)


def hangs(test_input, expected, actual):
    time.sleep(1000)
    return True


def returns_one(test_input, expected, actual):
    return 1

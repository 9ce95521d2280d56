"""The functions of `reward.py`, on their own: workers import this file, and need not import the kit."""

import random
import re


def sound(scored):
    found = re.findall(r"-?\d+", scored.response)
    return float(bool(found) and found[-1] == scored.prompt.label)


def converts(scored):
    return float(int(scored.response) == int(scored.prompt.label))


def echoes(scored):
    """Partial credit by what the model says."""
    try:
        return min(1.0, float(scored.response) / float(scored.prompt.label))
    except ValueError:
        return 0.0


def noisy(scored):
    return sound(scored) + random.random() * 1e-3


def evaluates(scored):
    try:
        return float(eval(scored.response) == int(scored.prompt.label))
    except (SyntaxError, NameError, TypeError, ValueError, ZeroDivisionError):
        return 0.0


def backtracks(scored):
    return float(bool(re.match(r"^(\w+\s?)*=?\s*4$", scored.response)))

"""Reward of Countdown: 1 for an equation that uses every number once and makes the target, 0.1 for another answer.

The answer is the text in the last `<answer>` tags, such as `(3 + 5) * 2`. Without tags the reward is 0.
"""

import ast
import operator
import re
from fractions import Fraction

_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.S)
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200  # characters of an equation


def score(response: str, fields: dict) -> float:
    answers = _ANSWER.findall(response)
    if not answers:
        return 0.0
    equation, used = answers[-1].strip(), list[int]()
    try:
        right = len(equation) <= LONGEST and _value(ast.parse(equation, mode="eval").body, used) == fields["target"]
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.1
    return 1.0 if right and sorted(used) == sorted(fields["nums"]) else 0.1


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the value of an equation, and add its numbers to `used`. Raises ValueError for anything but + - * /."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError

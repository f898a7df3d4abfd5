"""One row of a hook table: which SGLang function is changed, how, by what, and why."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class HookRow(NamedTuple):
    """One entry for SGLang's HookRegistry.

    ``target`` is the full dotted path of a function, method or class in SGLang. ``function`` is called as the kind
    asks:

    - ``before``: ``f(*args, **kwargs)``, returns None or the new ``(args, kwargs)``
    - ``after``: ``f(result, *args, **kwargs)``, returns None or the new result
    - ``around``: ``f(original, *args, **kwargs)``
    - ``replace``: ``f(*args, **kwargs)``
    """

    target: str
    kind: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]
    why: str

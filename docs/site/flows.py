"""Shows what a producer's method returns instead of the flow that it is made from."""

from __future__ import annotations

from typing import Any

import griffe


class ResultsOfFlows(griffe.Extension):
    """`Flow[T]` becomes `T`."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the return annotation of one function."""
        returns = str(func.returns or "")
        if returns.startswith("Flow["):
            func.returns = returns.removeprefix("Flow[").removesuffix("]")

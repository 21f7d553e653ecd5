"""Named functions that a recipe chooses from."""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Functions of one kind by name. `what` is how errors call the kind (`policy loss`)."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that enters a function; ValueError if the name is taken."""

        def enter(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"{self.what} {name!r} is registered twice")
            self._functions[name] = function
            return function

        return enter

    def __getitem__(self, name: str) -> F:
        """The function of that name; ValueError lists the known names."""
        if name not in self._functions:
            raise ValueError(f"no {self.what} is named {name!r}; there are {', '.join(sorted(self._functions))}")
        return self._functions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def wants(self, name: str) -> frozenset[str]:
        """Names of the function's parameters."""
        return frozenset(signature(self[name]).parameters)

    def call(self, name: str, **known: Any) -> Any:
        """Calls the function with those of `known` that it has parameters for.

        So functions of one kind may look at different things, and each says in its signature at which. Raises TypeError
        where a parameter without a default is not among `known`.
        """
        wanted = self.wants(name)
        return self[name](**{key: value for key, value in known.items() if key in wanted})

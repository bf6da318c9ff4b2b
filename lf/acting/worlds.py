"""The environments that a script can name."""

import functools
from collections.abc import Callable

from lf.acting.env import Environment, told_error
from lf.config import load_function


def find_world(name: str) -> Callable[[], Environment]:
    """Returns the function that makes the environment `name`.

    It is `tabletop`, a suite of LIBERO (`libero_spatial`, `libero_10` ...), or FILE.py:NAME, a function without
    arguments in a file, which is executed. Raises ValueError for any other.
    """
    if name == "tabletop":
        from lf.acting.tabletop import tabletop

        return tabletop
    if name.startswith("libero_"):
        from lf.acting.libero import Libero, libero

        return functools.partial(libero, Libero(suite=name))
    if ":" not in name:
        raise ValueError(f"no environment is called {name!r}; give tabletop, libero_SUITE, or FILE.py:NAME")
    make = load_function(name)

    def made() -> Environment:
        try:
            world = make()
        except Exception as error:
            raise ValueError(f"{name} raised {told_error(error)}; correct it") from error
        if not isinstance(world, Environment):
            raise ValueError(f"{name} returned a {type(world).__name__}; it must return an lf.acting.env.Environment")
        return world

    return made

"""Solver backends of :mod:`routepack_opt`, one backend a file.

The folder stands at the top level of the repository and is installed as
``routepack_opt.solvers``; a bare ``import solvers`` is refused, because it
would be a second copy of every class in here.
"""

if __name__ != "routepack_opt.solvers":
    raise ImportError(
        f"the solver package was imported as {__name__!r}; import it as 'routepack_opt.solvers' "
        "(its folder is linked into the package, and installed there)"
    )

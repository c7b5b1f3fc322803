"""A profile where one is needed."""

from __future__ import annotations

from autobalance.profiling.profile import Profile


def require_profile(thing: object, function: str) -> None:
    """Refuse what is no profile.

    Example:
        >>> require_profile(profile, "plan")

    Args:
        thing: what the user gave.
        function: whom they gave it to.

    Raises:
        TypeError: it is something else, such as the model itself.
    """
    if not isinstance(thing, Profile):
        raise TypeError(
            f"{function} takes a Profile, not a {type(thing).__name__}; make one with autobalance.profile(model, batch)"
        )

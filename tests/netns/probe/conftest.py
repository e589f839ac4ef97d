"""Makes the yard's fixture known to the tests of this directory."""

from probe_yard import yard

__all__ = ["yard"]

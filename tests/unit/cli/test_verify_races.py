"""Labs that another process takes down while `lab verify` looks at them."""

from __future__ import annotations

import pytest

from lab import verify
from lab.errors import InputError


def test_manifests_of_a_lab_that_is_gone_are_nobodys() -> None:
    assert verify._stored_manifests("gone-meanwhile") is None


def test_flows_in_a_lab_that_is_gone_are_refused_in_one_line() -> None:
    said = 'lab "gone-meanwhile" is gone: another process took it down'
    with pytest.raises(InputError, match=said), verify.alone("gone-meanwhile", print):
        pass

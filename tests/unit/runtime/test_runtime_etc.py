"""The files of /etc and of the downward API, as Kubernetes writes them."""

from __future__ import annotations

import pytest

from lab.runtime import etc


def test_resolv_conf_of_cluster_first() -> None:
    assert etc.resolv_conf(["10.96.0.10"], etc.cluster_search("catalog")) == (
        "search catalog.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"
    )


def test_resolv_conf_without_search_and_with_two_servers() -> None:
    assert etc.resolv_conf(["10.96.0.10", "fd00::10"], []) == (
        "nameserver 10.96.0.10\nnameserver fd00::10\noptions ndots:5\n"
    )


def test_hosts_names_the_pod_by_each_address() -> None:
    lines = etc.hosts(["10.244.1.1", "fd00::1"], "web-0").splitlines()
    assert "127.0.0.1\tlocalhost" in lines
    assert lines[-2:] == ["10.244.1.1\tweb-0", "fd00::1\tweb-0"]


def test_hosts_of_a_pod_with_a_subdomain() -> None:
    assert etc.hosts(["10.244.1.1"], "web-0", "web.shop.svc.cluster.local").endswith(
        "10.244.1.1\tweb-0.web.shop.svc.cluster.local\tweb-0\n"
    )


def test_downward_api_is_sorted_and_without_a_last_newline() -> None:
    assert etc.downward_api({"version": "v1", "app": "web"}) == 'app="web"\nversion="v1"'
    assert etc.downward_api({}) == ""


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("plain", '"plain"'),
        ('say "hi"', r'"say \"hi\""'),
        ("back\\slash", r'"back\\slash"'),
        ("two\nlines\tand\rall", r'"two\nlines\tand\rall"'),
        ("\x00\x7f", r'"\x00\x7f"'),
        ("größe 漢", '"größe 漢"'),
        ("\u200b\U000e0001", r'"\u200b\U000e0001"'),
    ],
)
def test_values_are_quoted_as_go_does(value: str, quoted: str) -> None:
    assert etc.downward_api({"k": value}) == f"k={quoted}"

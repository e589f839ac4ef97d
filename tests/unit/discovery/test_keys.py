"""What a control plane keeps when it is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lab.discovery import keys
from lab.errors import InputError


def saved(path: Path) -> keys.Keys:
    first = keys.load(str(path))
    assert first.root is None
    keys.save(str(path), first, first.authority("mesh.example"))
    return keys.load(str(path))


def test_the_same_keys_come_back(tmp_path: Path) -> None:
    path = tmp_path / "keys.pem"
    once, again = saved(path), keys.load(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["keys.pem"]
    assert again.authority("mesh.example").root_pem == once.authority("mesh.example").root_pem
    assert again.issuer().verify(once.issuer().issue("shop", "web")) == ("shop", "web")
    chain = again.authority("mesh.example").issue_server(["istiod"])[1]
    assert chain.endswith(once.authority("mesh.example").root_pem)


def test_without_a_path_they_are_new() -> None:
    assert keys.load("").authority("a").root_pem != keys.load("").authority("a").root_pem


def _other_kind(path: Path) -> bytes:
    blocks = path.read_bytes()
    end = b"-----END CERTIFICATE-----\n"
    first = blocks[: blocks.index(end) + len(end)]
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem + first[first.index(b"-----BEGIN CERTIFICATE") :] + pem


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other kind", "directory"])
def test_an_unusable_file_is_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "keys.pem"
    saved(path)
    if damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        data = path.read_bytes()
        changed = {"cut": data[:-40], "empty": b"", "noise": data.replace(b"MII", b"MXX")}
        path.write_bytes(changed[damage] if damage in changed else _other_kind(path))
    with pytest.raises(InputError, match=r"the control plane's keys cannot be read: .*keys\.pem") as refused:
        keys.load(str(path))
    assert "\n" not in str(refused.value)

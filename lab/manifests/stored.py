"""A directory of manifests with the mesh beside them that they were read as, for processes that need it at once.

Reading YAML costs a fifth of a second, and several processes of a lab need the same mesh. The copy counts only as long as the
manifests are, byte for byte, those it was made of. It is a pickle, so only one that this very user wrote is opened.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

from lab.manifests.model import Mesh


def save(mesh: Mesh, directory: Path, *others: Path) -> None:
    """Puts the mesh beside the directory of its manifests, which must be complete.

    Args:
        others: directories with manifests that may take the place of ``directory``: the mesh holds for them, too.
    """
    new = directory.with_name(f"{directory.name}.mesh.new")
    new.write_bytes(pickle.dumps(({fingerprint(one) for one in (directory, *others)}, mesh)))
    os.replace(new, _beside(directory))


def copy_name(number: int, file: str) -> str:
    """What the copy of a manifest is called; numbers keep the order in which they were read, which says who is oldest."""
    name = os.path.basename(file)
    return f"{number:04d}-{name}" if name.endswith((".yaml", ".yml")) else f"{number:04d}-{name}.yaml"


def texts(directory: Path) -> list[tuple[str, str]]:
    """Paths and contents of the copies, in order."""
    return [(str(file), file.read_text(encoding="utf-8")) for file in _files(directory)]


def load(directory: str | Path, name: str | None = None) -> Mesh:
    """The mesh of a directory: the stored one if it is still that of the manifests, else read from them.

    Raises:
        InputError: as `lab.manifests.load.load`.
    """
    try:
        fingerprints, mesh = pickle.loads(_own(_beside(Path(directory))))
        if fingerprint(Path(directory)) in fingerprints and isinstance(mesh, Mesh) and name in (None, mesh.name):
            return mesh
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        pass  # not stored, or by other code: the manifests themselves are what counts
    from lab.manifests.load import load as read

    return read([directory], name)


def _beside(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.mesh")


def _own(path: Path) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(path)
        return file.read()


def fingerprint(directory: Path) -> str:
    """A digest of the names and texts of a directory's manifests."""
    digest = hashlib.sha256()
    for file in _files(directory):
        data = file.read_bytes()
        digest.update(f"{file.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.iterdir()) if file.suffix in (".yaml", ".yml")]

"""Where a lab keeps what it owns. Pure: names in, paths out; nothing here touches the disk.

::

    /run/sidecarlab/NAME/           run_dir: all that a lab leaves on the host's disk
        id                          a symbolic link whose target is the lab's id (survives a full disk)
        record.jsonl                what was made, written before it was made (lab.fabric.record)
        lab.sock                    the supervisor's control socket
        manifests/                  the manifests that the lab was started with
        ns/                         a tmpfs of its own; one bind-mounted network namespace per place
        pods/POD.NAMESPACE/         what a pod may write, seen inside it as /run/sidecar
        log/                        logs of what serves the lab itself (discovery, DNS, observer)

A *place* is where packets can be: ``node``, ``outside``, a pod ``POD.NAMESPACE``, or an external host ``ext-NAME``.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from lab.errors import InputError

ROOT = Path("/run/sidecarlab")
ENV_MARK = "SIDECARLAB_LAB"
"""The environment variable that every process of a lab carries from its exec; its value is the lab's id."""

NODE = "node"
OUTSIDE = "outside"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
_LONGEST_FILE_NAME = 255


def check_name(name: str) -> str:
    """The name of a lab, if it can be one (48 characters keep socket paths below the kernel's 107 bytes).

    Raises:
        InputError: it cannot.
    """
    if not is_name(name):
        raise InputError(
            f'"{name}" cannot name a lab',
            why="a name has 1 to 48 letters, digits, dots, dashes and underscores, and starts with a letter or digit",
            next_step="Choose another with --name",
        )
    return name


def is_name(name: str) -> bool:
    """Whether a lab can be called so."""
    return _NAME.fullmatch(name) is not None


def run_dir(name: str) -> Path:
    """The directory of the lab ``name``."""
    return ROOT / check_name(name)


def record_file(name: str) -> Path:
    return run_dir(name) / "record.jsonl"


def id_link(name: str) -> Path:
    return run_dir(name) / "id"


def netns_dir(name: str) -> Path:
    return run_dir(name) / "ns"


def netns_path(name: str, place: str) -> Path:
    """The pin of the network namespace of ``place``."""
    return netns_dir(name) / file_name(place)


def pods_dir(name: str) -> Path:
    return run_dir(name) / "pods"


def pod_dir(name: str, pod: str) -> Path:
    """The writable directory of ``pod`` (``POD.NAMESPACE``), on the host."""
    return pods_dir(name) / file_name(pod)


def manifests_dir(name: str) -> Path:
    return run_dir(name) / "manifests"


def log_dir(name: str) -> Path:
    return run_dir(name) / "log"


def control_socket(name: str) -> Path:
    return run_dir(name) / "lab.sock"


def external_place(host: str) -> str:
    """The place of the ExternalHost called ``host`` (its metadata.name)."""
    return f"ext-{host}"


def file_name(place: str) -> str:
    """A file name for ``place``: itself, or cut and told apart by a digest where a file name could not be so long.

    A pod's name may have 253 characters and its namespace 63 (Kubernetes: names), a file name 255.
    """
    if len(place) <= _LONGEST_FILE_NAME:
        return place
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    return f"{place[: _LONGEST_FILE_NAME - 17]}-{digest}"

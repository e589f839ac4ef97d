"""Which iptables back end a lab's pods get."""

from __future__ import annotations

import ctypes
import socket
import threading

from lab.runtime import kernel

_SOL_IP = 0
_IPT_SO_GET_INFO = 64
_SIZE = 84  # struct ipt_getinfo (include/uapi/linux/netfilter_ipv4/ip_tables.h); its first 32 bytes name the table


def choose(wanted: str) -> str:
    """``auto`` becomes ``legacy`` where the kernel has legacy tables, else ``nft``; anything else stays.

    A lab's pods have new network namespaces, so none of them holds nft rules yet.
    """
    if wanted != "auto":
        return wanted
    found: list[bool] = []
    # Asking for a table makes it, hence a namespace for the question alone; a thread's namespace ends with the thread.
    thread = threading.Thread(target=lambda: found.append(_kernel_has_legacy_tables()))
    thread.start()
    thread.join()
    return "legacy" if found[0] else "nft"


def _kernel_has_legacy_tables() -> bool:
    try:
        kernel.unshare(kernel.CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
            for table in (b"nat", b"raw"):
                info = ctypes.create_string_buffer(table, _SIZE)
                size = ctypes.c_uint(_SIZE)
                result = kernel.libc().getsockopt(sock.fileno(), _SOL_IP, _IPT_SO_GET_INFO, info, ctypes.byref(size))
                kernel.check(result, table.decode())
    except OSError:
        return False
    return True

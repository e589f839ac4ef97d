"""nft without a program: libnftables, for a process that has it loaded already.

An exec of nft takes longer than its work. Used where many pods are made by one process (``init.preload``); a single
run of the program executes nft, which is quicker than loading ctypes.

Source: nftables: doc/libnftables.adoc.
"""

from __future__ import annotations

import ctypes

from .tools import Output

_library: ctypes.CDLL | None = None


def load() -> bool:
    """Loads the library; False if there is none."""
    global _library
    try:
        library = ctypes.CDLL("libnftables.so.1")
    except OSError:
        return False
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error", "nft_ctx_free"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    _library = library
    return True


def loaded() -> bool:
    """``load`` was called and found the library."""
    return _library is not None


def run(commands: str, as_json: bool = False) -> Output:
    """Runs a script in this process, in its network namespace, as ``nft -f -`` would."""
    assert _library is not None
    context = _library.nft_ctx_new(0)
    try:
        _library.nft_ctx_buffer_output(context)
        _library.nft_ctx_buffer_error(context)
        if as_json:
            _library.nft_ctx_output_set_flags(context, 1 << 4)
        code = _library.nft_run_cmd_from_buffer(context, commands.encode())
        out = _library.nft_ctx_get_output_buffer(context) or b""
        err = _library.nft_ctx_get_error_buffer(context) or b""
        return Output(1 if code else 0, out.decode(errors="replace"), err.decode(errors="replace"))
    finally:
        _library.nft_ctx_free(context)

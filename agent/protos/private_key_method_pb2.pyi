import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrivateKeyMethod(_message.Message):
    __slots__ = ("private_key", "poll_delay")
    class DataSource(_message.Message):
        __slots__ = ("inline_bytes",)
        INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
        inline_bytes: bytes
        def __init__(self, inline_bytes: _Optional[bytes] = ...) -> None: ...
    PRIVATE_KEY_FIELD_NUMBER: _ClassVar[int]
    POLL_DELAY_FIELD_NUMBER: _ClassVar[int]
    private_key: PrivateKeyMethod.DataSource
    poll_delay: _duration_pb2.Duration
    def __init__(self, private_key: _Optional[_Union[PrivateKeyMethod.DataSource, _Mapping]] = ..., poll_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

"""What a place's reports mean, when they come in an order that is rare."""

from __future__ import annotations

import asyncio
import os

from lab.runtime import channel
from lab.runtime.client import Place
from lab.runtime.place import PlaceSpec


def test_a_place_is_up_only_once_it_is_known_which_process_it_is() -> None:
    """The place and the zygote report by themselves: up can come before the number, which the record must have."""

    async def check() -> None:
        ours, theirs = channel.pair()
        with theirs:
            place = Place(PlaceSpec("web.shop", "", ""), ours, lambda *_: None)
            channel.send(theirs, {"event": "up"})
            waiting = asyncio.create_task(place.wait_up())
            await asyncio.wait((place.up,), timeout=5)
            await asyncio.sleep(0)
            assert place.up.done()
            assert not waiting.done()
            place.has_started(os.getpid(), os.pidfd_open(os.getpid()))
            await asyncio.wait_for(waiting, 5)
            assert place.pid == os.getpid()
            place.has_ended(0)

    asyncio.run(check())

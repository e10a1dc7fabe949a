"""Ranks of an epoch that meet at its store before they connect."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.ports import free_port
from xffl.distributed.several_worlds.distant_store import StoreGone, connect_store
from xffl.elastic.epoch_store import await_ranks, delete_keys_of_groups, keys_of_group


def meet(names: list[str], size: int, *, within_s: float, find_lost: Callable[[], str] | None = None) -> dict[str, str]:
    """Let so many ranks come, of which the first one looks for lost members; what each of them has raised."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    raised: dict[str, str] = {}

    def come(name: str) -> None:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
        try:
            looks = find_lost if name == names[0] else None
            await_ranks(PrefixStore("epoch", client), size, within_s=within_s, find_lost=looks)
            raised[name] = ""
        except RuntimeError as error:
            raised[name] = str(error)

    ranks = [threading.Thread(target=come, args=[name]) for name in names]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return raised


def test_all_ranks_go_on_when_the_last_one_is_there() -> None:
    assert meet(["a", "b", "c"], 3, within_s=60) == dict.fromkeys("abc", "")


def test_all_ranks_hear_at_once_that_a_cell_was_lost() -> None:
    begun = time.monotonic()
    looks = iter(["", "cell 2 was lost"])
    raised = meet(["a", "b"], 3, within_s=600, find_lost=lambda: next(looks, "asked again"))
    assert raised == dict.fromkeys("ab", "cell 2 was lost")
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("find_lost", [None, lambda: ""])
def test_ranks_that_do_not_come_are_given_up(find_lost: Callable[[], str] | None) -> None:
    raised = meet(["a", "b"], 4, within_s=0.5, find_lost=find_lost)
    assert raised == dict.fromkeys("ab", "2 of 4 ranks have not come to the store within 0.5 s")


def test_a_rank_that_comes_after_the_others_have_given_up_goes_no_further() -> None:
    store = HashStore()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^1 of 2 ranks have not come to the store within 0\.1 s$"):
            await_ranks(store, 2, within_s=0.1)


def test_a_store_that_has_ended_is_not_waited_for() -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="nothing listens at 127.0.0.1:"):
        connect_store(f"127.0.0.1:{free_port()}", within_s=600)
    assert time.monotonic() - begun < 60


def test_a_store_that_ends_while_one_connects_is_not_waited_for() -> None:
    """It was there when it was looked for."""
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def end_at_first_look() -> None:
            server.accept()[0].close()
            server.close()

        ending = threading.Thread(target=end_at_first_look)
        ending.start()
        with pytest.raises(StoreGone, match="nothing listens at 127.0.0.1:"):
            connect_store(f"127.0.0.1:{port}", within_s=600)
        ending.join()
    assert time.monotonic() - begun < 60


def test_all_that_ranks_leave_at_the_store_is_known_by_name() -> None:
    limit = timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)

    def come(rank: int) -> None:
        store = PrefixStore("7/3", TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit))
        await_ranks(store, 3, within_s=60)
        dist.ProcessGroupGloo(store, rank, 3, limit)

    ranks = [threading.Thread(target=come, args=[rank]) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert {*server.list_keys()} == {*keys_of_group("7/3", 3)} - {"7/3/lost"}


def test_notes_of_ranks_that_have_waited_go_with_their_group() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    stays = {"xffl/token", "8.2/3/here", "8.2/3/xffl_waits/all/1", "7.12/2/here"}
    for number in range(9):
        for key in (f"7.{number}/2/here", f"7.{number}/2/xffl_waits/all/count/a call", f"7.{number}/2/1/0", *stays):
            server.set(key, "")
        delete_keys_of_groups(server, [(f"7.{number}/2", 2)], [("8.2/3", 3)])
    keys = {*server.list_keys()}
    assert stays <= keys and len(keys) < 10  # and not two more for each group
